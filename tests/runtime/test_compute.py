"""The compute thread: one at a time, the most urgent first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from swarm.core.stage import Work
from swarm.runtime.compute import HOUSEKEEPING, ComputeThread


@pytest_asyncio.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


async def test_backward_goes_before_forward_and_both_before_housekeeping(compute: ComputeThread) -> None:
    order: list[str] = []
    gate = threading.Event()
    first = compute.submit(-1, gate.wait, 5)
    tasks = [
        compute.submit(HOUSEKEEPING, order.append, "save"),
        compute.submit(Work.FORWARD, order.append, "forward 1"),
        compute.submit(Work.EVALUATE, order.append, "evaluate"),
        compute.submit(Work.FORWARD, order.append, "forward 2"),
        compute.submit(Work.BACKWARD, order.append, "backward"),
    ]
    gate.set()
    await asyncio.gather(first, *tasks)
    assert order == ["backward", "forward 1", "forward 2", "evaluate", "save"]


async def test_results_and_exceptions_come_back_to_the_loop(compute: ComputeThread) -> None:
    assert await compute.submit(0, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await compute.submit(0, divmod, 7, 0)
    assert await compute.submit(0, threading.current_thread) is not threading.current_thread()


async def test_draining_waits_for_all_that_was_queued(compute: ComputeThread) -> None:
    done: list[int] = []
    for number in range(20):
        compute.submit(HOUSEKEEPING, done.append, number)
    await compute.drain()
    assert done == list(range(20))


async def test_a_cancelled_future_only_drops_its_result(compute: ComputeThread) -> None:
    done: list[int] = []
    compute.submit(0, done.append, 1).cancel()
    await compute.drain()
    assert done == [1]


async def test_closing_ends_the_running_task_and_refuses_new_ones() -> None:
    thread = ComputeThread()
    assert await thread.submit(0, lambda: 5) == 5
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(0, lambda: 5)


async def test_closing_drops_what_waits() -> None:
    thread = ComputeThread()
    began, go = threading.Event(), threading.Event()
    done: list[str] = []

    def running() -> None:
        began.set()
        go.wait(5)
        done.append("running")

    thread.submit(0, running)
    waiting = thread.submit(0, done.append, "waiting")
    await asyncio.to_thread(began.wait, 5)
    closing = asyncio.create_task(asyncio.to_thread(thread.close))
    while not thread._closed:  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.001)
    go.set()
    await closing
    assert done == ["running"]
    assert not waiting.done()
