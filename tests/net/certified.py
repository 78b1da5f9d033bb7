"""Certified members of one run, for the tests of servers and channels."""

from __future__ import annotations

from functools import cache

from swarm.net.authority import Role, RunAuthority
from swarm.net.credentials import Credentials
from swarm.net.identity import Identity

RUN_ID = "ab" * 16
LIFETIME_S = 3600.0


@cache
def authority(run_id: str = RUN_ID) -> RunAuthority:
    return RunAuthority.create(run_id)


@cache
def identity(name: str) -> Identity:
    return Identity.create()


@cache
def member(name: str, role: Role = Role.PEER, run_id: str = RUN_ID, lifetime_s: float = LIFETIME_S) -> Credentials:
    """The same name is the same key; every run has one authority."""
    return Credentials.issue(authority(run_id), identity(name), role, lifetime_s)


def certified(*names: str) -> list[Credentials]:
    return [member(name) for name in names]
