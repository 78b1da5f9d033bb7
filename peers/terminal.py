"""What all commands share: events on the terminal, errors as sentences and exit codes, Ctrl-C that leaves cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn

# Before gRPC is imported anywhere: it logs refused handshakes, which have their own errors here, on stderr, and the DHT
# daemon is started by exec, for which its fork handlers are of no use.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import click

from swarm.errors import SwarmError
from swarm.observe.background import Background
from swarm.observe.events import EventLog, Failed, Sink
from swarm.observe.sinks import FileLog, JsonLines, PlainLines

LEAVE_DEADLINE_S = 4.5
"""After Ctrl-C the process is gone by then."""

INTERRUPTED = 130

PARENT = "SWARM_PARENT"
"""Environment variable with the process id of whoever started this process and wants it to end with them."""

PARENT_EVERY_S = 1.0
"""Between two looks at whether they are still there."""


def event_log(*, as_json: bool, folder: Path | None = None) -> EventLog:
    """JSON lines, or a live view on a terminal, or plain lines; and a file in ``folder``.

    All of them are written in the background: a terminal that is held (Ctrl-S) or a full pipe does not stop training.
    """
    sinks: list[Sink] = []
    if as_json:
        sinks.append(JsonLines(sys.stdout))
    elif sys.stdout.isatty():
        from rich.console import Console

        from swarm.observe.live import LiveView

        sinks.append(LiveView(Console()))
    else:
        sinks.append(PlainLines(sys.stdout))
    outputs = [Background(sink) for sink in sinks]
    if folder is not None:
        outputs.append(Background(FileLog(folder / "events.jsonl")))
    return EventLog(*outputs)


def run(
    main: Callable[[], Coroutine[Any, Any, int]],
    log: EventLog,
    *,
    as_json: bool,
    abort: Callable[[], None] = lambda: None,
) -> int:
    """Run ``main`` in a loop of its own and close ``log``; returns the exit code of the process.

    The first Ctrl-C (or SIGTERM, or the end of the terminal) cancels it, so that it leaves in order, within a deadline;
    the second quits at once, after ``abort``, which must leave nothing behind and may be called from any thread.
    """
    departure = _Departure(abort, as_json)
    if PARENT in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), name="parent", daemon=True).start()
    failure: SwarmError | None = None
    try:
        with departure.on_signals():
            code = _loop(_guarded(main, departure))
    except SwarmError as error:
        failure, code = error, error.exit_code
        log.emit(Failed(error.code, error.what, error.meaning, error.remedy))
    except Exception as error:
        # A defect: the traceback is for its report, the event for whoever reads the output.
        log.emit(Failed("internal", f"{type(error).__name__}: {error}", "The process ends.", "Please report it."))
        log.close()
        raise
    in_order = log.close()
    if failure is not None and not as_json:
        show(failure)
    if not in_order or not _flushed():
        # Somebody does not read our output, or is gone: the interpreter would wait for them, or complain.
        abort()
        os._exit(code)
    return code


def show(error: SwarmError) -> None:
    """An error for people, on stderr."""
    click.secho(f"Error: {error.what}", fg="red", bold=True, err=True)
    for part in (error.meaning, error.remedy):
        if part:
            click.echo(f"       {part}", err=True)


def end(error: SwarmError, *, as_json: bool) -> NoReturn:
    """End the process for what was wrong before it started: sentences on stderr, with ``--json`` also the event."""
    if as_json:
        click.echo(json.dumps(Failed(error.code, error.what, error.meaning, error.remedy).as_json()))
    show(error)
    sys.exit(error.exit_code)


def finish(code: int) -> NoReturn:
    """End the process, once :func:`run` has closed everything.

    Not by ``sys.exit``: to take apart an interpreter with torch in it takes a second of processor time.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Departure:
    """What signals do. They are handled by Python itself and not by the loop, which may be busy importing."""

    def __init__(self, abort: Callable[[], None], as_json: bool) -> None:
        self.signals: list[int] = []
        self._abort = abort
        self._as_json = as_json
        self._leave: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        # nohup asks for SIGHUP to be ignored.
        before = {number: signal.getsignal(number) for number in numbers}
        before = {number: action for number, action in before.items() if action is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, self._interrupt)
        try:
            yield
        finally:
            # Once a signal has come the process is on its way out: another one, while the log is closed, still means
            # "at once" and not whatever Python does by default.
            for number, action in before.items() if not self.signals else ():
                signal.signal(number, action)

    def cancels(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[int]) -> None:
        """From now on a signal cancels ``task``, and one that has come already does."""
        self._leave = lambda: loop.call_soon_threadsafe(self._cancel, task)
        if self.signals:
            self._cancel(task)

    @property
    def exit_code(self) -> int:
        # A daemon that is told to end and ends in order has done its job.
        return 0 if self.signals[:1] == [signal.SIGTERM] else 128 + self.signals[0] if self.signals else INTERRUPTED

    def _interrupt(self, number: int, _frame: object) -> None:
        self.signals.append(number)
        if len(self.signals) > 1:
            self._quit(number)
        deadline = threading.Timer(LEAVE_DEADLINE_S, self._quit, [number])
        # Not a timer of the loop: it also ends what waits for threads after the loop has ended.
        deadline.daemon = True
        deadline.start()
        self._leave()

    def _cancel(self, task: asyncio.Task[int]) -> None:
        task.cancel()
        if not self._as_json:
            with contextlib.suppress(OSError):  # the terminal may be gone
                click.echo("Leaving in order; once more to quit at once.", err=True)

    def _quit(self, number: int) -> None:
        self._abort()
        os._exit(128 + number)


async def _guarded(main: Callable[[], Coroutine[Any, Any, int]], departure: _Departure) -> int:
    task: asyncio.Task[int] = asyncio.ensure_future(main())
    departure.cancels(asyncio.get_running_loop(), task)
    try:
        return await task
    except asyncio.CancelledError:
        return departure.exit_code


def _loop(coroutine: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _flushed() -> bool:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return False
    return True
