"""The one thread that owns the device. Everything that touches tensors runs here, backward before forward."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

NICENESS = 5
"""Linux only: the loop's thread goes first when both want the processor, so that frames do not wait for a matmul."""

QUEUE_LIMIT = 4096
"""Tasks that may wait; the protocol keeps far fewer, so reaching it is a fault worth an exception."""

HOUSEKEEPING = 9
"""Priority of everything that is not a microbatch."""


class ComputeThread:
    """Runs callables one at a time in order of (priority, arrival), and gives their results to the loop.

    Args:
        background: Linux only: compute on processor time that nothing else wants. For volunteers whose machine has
            other work, and for several peers on few cores, where it keeps the loops of all of them prompt.
    """

    def __init__(self, *, background: bool = False) -> None:
        self._background = background
        self._loop = asyncio.get_running_loop()
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue(QUEUE_LIMIT)
        self._order = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="swarm-compute", daemon=True)
        self._thread.start()

    def submit(self, priority: int, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue ``function``; the future belongs to the loop. Cancelling it only drops the result."""
        if self._closed:
            raise RuntimeError("the compute thread is closed")
        future: asyncio.Future[T] = self._loop.create_future()

        def task() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                self._post(_fail, future, error)
            else:
                self._post(_succeed, future, result)

        self._queue.put_nowait((priority, next(self._order), task))
        return future

    async def drain(self) -> None:
        """Wait until everything queued before has run."""
        await self.submit(HOUSEKEEPING + 1, lambda: None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the running task end, drop the waiting ones and stop."""
        if self._closed:
            return
        self._closed = True
        self._queue.put_nowait((-1, next(self._order), None))
        self._thread.join(timeout_s)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _run(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            if self._background:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while True:
            _, _, task = self._queue.get()
            if task is None:
                return
            task()
            # A reference kept until the next task would keep its tensors alive.
            del task


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
