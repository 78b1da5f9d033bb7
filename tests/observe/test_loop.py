"""A loop that is blocked is noticed."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import pytest

from swarm.observe import loop as meter_module
from swarm.observe.loop import LoopMeter, percentile
from swarm.observe.process import resident_bytes

BLOCKED_S = 0.05


async def test_a_blocked_loop_is_seen() -> None:
    meter = LoopMeter()
    assert meter.p99_s is None
    meter.start()
    await asyncio.sleep(0.03)
    time.sleep(BLOCKED_S)  # noqa: ASYNC251
    await asyncio.sleep(0.03)
    meter.stop()
    assert meter.p99_s is not None
    # The timer was due up to one interval into the block.
    assert meter.p99_s >= BLOCKED_S - meter_module.INTERVAL_S


async def test_start_up_can_be_forgotten() -> None:
    meter = LoopMeter()
    meter.start()
    time.sleep(BLOCKED_S)  # noqa: ASYNC251
    await asyncio.sleep(0.03)
    meter.reset()
    assert meter.p99_s is None
    meter.stop()


async def test_a_stopped_meter_takes_no_samples() -> None:
    meter = LoopMeter()
    meter.start()
    meter.stop()
    meter.stop()
    await asyncio.sleep(3 * meter_module.INTERVAL_S)
    assert meter.p99_s is None


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        ([], 0.99, None),
        ([1.0], 0.99, 1.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([float(number) for number in range(100)], 0.99, 99.0),
        ([0.0] * 999 + [1.0], 0.99, 0.0),
        ([0.0] * 980 + [1.0] * 20, 0.99, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_percentile(samples: list[float], share: float, expected: float | None) -> None:
    assert percentile(deque(samples), share) == expected


def test_resident_memory_grows_with_what_is_used() -> None:
    before = resident_bytes()
    block = bytearray(b"x") * (32 * 2**20)
    assert resident_bytes() - before > 24 * 2**20
    del block
    assert 2**20 < before < 2**36
