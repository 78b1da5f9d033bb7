from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.config.spec import RunSpec
from tests.e2e.processes import Swarm


@pytest.fixture
def new_swarm(tmp_path: Path) -> Iterator[Callable[[RunSpec], Swarm]]:
    """Makes swarms whose processes are gone when the test is over."""
    swarms: list[Swarm] = []

    def make(spec: RunSpec) -> Swarm:
        folder = tmp_path / f"swarm-{len(swarms)}"
        folder.mkdir()
        swarms.append(Swarm(folder, spec))
        return swarms[-1]

    yield make
    for swarm in swarms:
        swarm.end()
