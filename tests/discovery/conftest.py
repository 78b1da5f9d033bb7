from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from swarm.discovery import Directory
from tests.discovery.nodes import start


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable]:
    """The loop that peers run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def node() -> AsyncIterator[Callable[..., Awaitable[Directory]]]:
    """Starts directories, see :func:`start`; all are closed at the end."""
    started: list[Directory] = []

    async def begin(name: str, *initial: Directory | str, **options) -> Directory:
        directory = await start(name, *initial, **options)
        started.append(directory)
        return directory

    yield begin
    for directory in started:
        await directory.close()
