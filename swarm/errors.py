"""Errors that people read: what happened, what it means for the run, what to do.

Every error that leaves a public function of ``swarm`` on bad input derives from :class:`SwarmError`. It has a
``code`` for programs (stable, snake case) and the exit code a command ends with.
"""

from __future__ import annotations

from typing import ClassVar


class SwarmError(Exception):
    """Base of all errors of the project.

    Args:
        what: what happened, one sentence with the values that explain it.
        meaning: what it means for the run.
        remedy: what the reader can do.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, meaning: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.meaning = meaning
        self.remedy = remedy

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.meaning, self.remedy) if part)

    def as_dict(self) -> dict[str, str]:
        """The error as one JSON object (the ``error`` event of ``--json``)."""
        return {"code": self.code, "what": self.what, "meaning": self.meaning, "remedy": self.remedy}


class SpecError(SwarmError):
    """A run spec or a setting is not usable."""

    code = "bad_spec"
    exit_code = 2


class UsageError(SwarmError):
    """The command line asks for something that cannot be done."""

    code = "usage"
    exit_code = 2


class DataError(SwarmError):
    """A corpus is empty, unreadable or lacks the field asked for."""

    code = "bad_data"
    exit_code = 2


class UnreachableError(SwarmError):
    """A peer, the bootstrap or the DHT does not answer."""

    code = "unreachable"
    exit_code = 3


class RefusedError(SwarmError):
    """Somebody answered, and said no."""

    code = "refused"
    exit_code = 4


class InvitationError(RefusedError):
    """An invitation is altered, expired, used up or belongs to another run."""

    code = "bad_invitation"


class IdentityInUseError(RefusedError):
    """Another process with this identity is connected, or seems to be since its death was not noticed yet."""

    code = "identity_in_use"


class ClockSkewError(RefusedError):
    """The clock of this machine is too far from that of the run."""

    code = "clock_skew"


class FrameError(SwarmError):
    """A frame is not what its receiver holds; it is refused and charged to its sender."""

    code = "bad_frame"


class CheckpointError(SwarmError):
    """A checkpoint is missing, truncated or altered."""

    code = "bad_checkpoint"
