"""Numbered membership: who hosts which stage, and from which step on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A peer and the stage it hosts."""

    stage: int
    peer_id: str


@dataclass(frozen=True, slots=True)
class View:
    """Membership from ``first_step`` on. A higher number fences all lower ones."""

    term: int
    number: int
    first_step: int
    members: tuple[Member, ...]
    """One member per stage, ordered by stage."""

    @property
    def version(self) -> int:
        """How many optimizer steps the parameters of every member have behind them when the view begins."""
        return self.first_step - 1

    @property
    def route(self) -> tuple[str, ...]:
        """The peer of every stage, for source routing."""
        return tuple(member.peer_id for member in self.members)

    def peer_of(self, stage: int) -> str:
        """The peer that hosts ``stage``."""
        return self.members[stage].peer_id

    def stage_of(self, peer_id: str) -> int | None:
        """The stage of ``peer_id``, or None if it is not a member."""
        return next((member.stage for member in self.members if member.peer_id == peer_id), None)
