from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.runtime.in_process import InProcessSwarm, short_spec


@pytest_asyncio.fixture(loop_scope="session")
async def new_swarm(tmp_path: Path) -> AsyncIterator[Callable[..., InProcessSwarm]]:
    """Makes swarms that have stopped when the test is over; keywords change the spec."""
    swarms: list[InProcessSwarm] = []

    def make(**changes) -> InProcessSwarm:
        folder = tmp_path / f"swarm-{len(swarms)}"
        folder.mkdir()
        swarms.append(InProcessSwarm(short_spec(tmp_path, **changes), folder, pytest.MonkeyPatch()))
        return swarms[-1]

    yield make
    for swarm in swarms:
        await swarm.end()
