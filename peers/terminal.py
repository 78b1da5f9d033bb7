"""What all commands share: events on the terminal, errors as sentences and exit codes, Ctrl-C that leaves cleanly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

# Before gRPC is imported anywhere: it logs refused handshakes, which have their own errors here, on stderr, and the DHT
# daemon is started by exec, for which its fork handlers are of no use.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import click

from swarm.errors import SwarmError
from swarm.observe.events import EventLog, Failed, Sink
from swarm.observe.sinks import FileLog, JsonLines, PlainLines

LEAVE_DEADLINE_S = 5.0
"""After Ctrl-C the process is gone by then."""

INTERRUPTED = 130


def event_log(*, as_json: bool, folder: Path | None = None) -> EventLog:
    """JSON lines, or a live view on a terminal, or plain lines; and a file in ``folder``."""
    sinks: list[Sink] = []
    if as_json:
        sinks.append(JsonLines(sys.stdout))
    elif sys.stdout.isatty():
        from rich.console import Console

        from swarm.observe.live import LiveView

        sinks.append(LiveView(Console()))
    else:
        sinks.append(PlainLines(sys.stdout))
    if folder is not None:
        sinks.append(FileLog(folder / "events.jsonl"))
    return EventLog(*sinks)


def run(main: Callable[[], Coroutine[Any, Any, int]], log: EventLog, *, as_json: bool) -> int:
    """Run ``main`` in a loop of its own; returns the exit code of the process.

    The first Ctrl-C (or SIGTERM) cancels it, so that it leaves in order, within a deadline; the second quits at once.
    """
    try:
        return _loop(_guarded(main))
    except SwarmError as error:
        log.emit(Failed(error.code, error.what, error.meaning, error.remedy))
        if not as_json:
            show(error)
        return error.exit_code
    finally:
        log.close()


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


async def _guarded(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main())
    signals: list[int] = []

    def interrupt(number: int) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(128 + number)
        task.cancel()
        loop.call_later(LEAVE_DEADLINE_S, os._exit, 128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        # A daemon that is told to end and ends in order has done its job.
        return 0 if signals and signals[0] == signal.SIGTERM else INTERRUPTED


def _loop(coroutine: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)
