"""For all tests."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has Ctrl-C ignored, and what is ignored is inherited: the processes
# that tests interrupt would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
