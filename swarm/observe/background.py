"""A sink that writes from a thread of its own: a pipe that nobody reads or a slow disk must not stop the loop."""

from __future__ import annotations

import threading
from collections import deque

from swarm.observe.events import Event, EventLog, Sink, Warned

QUEUE_LIMIT = 1024
"""Events that wait to be written; beyond it the oldest are dropped, and how many is said later."""

CLOSE_DEADLINE_S = 1.0
"""How long the end of the process waits for what is still to be written."""


class Background:
    """Hands events on to ``sinks`` in their order; :meth:`emit` never waits and never raises."""

    def __init__(self, *sinks: Sink, limit: int = QUEUE_LIMIT) -> None:
        self._log = EventLog(*sinks)
        self._limit = limit
        self._waiting: deque[Event] = deque()
        self._dropped = 0
        self._closing = False
        self._changed = threading.Condition()
        # A daemon: a write that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._write, name="events", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        with self._changed:
            if self._closing:
                return
            if len(self._waiting) == self._limit:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(event)
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, then close the sinks; twice is fine.

        Raises:
            TimeoutError: it takes longer than :data:`CLOSE_DEADLINE_S`; the thread may hold a lock of its stream.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"nobody took the last events within {CLOSE_DEADLINE_S:g} s")

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    break
                event = self._waiting.popleft()
                dropped, self._dropped = self._dropped, 0
            if dropped:
                self._log.emit(
                    Warned(
                        "events_dropped",
                        f"{dropped} events were dropped here.",
                        "They came faster than this output took them; training did not wait.",
                        "Read the output faster, or look at events.jsonl in the state directory.",
                    )
                )
            self._log.emit(event)
        self._log.close()
