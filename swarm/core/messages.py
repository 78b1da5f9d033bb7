"""What peers and the coordinator say to each other on the control session. Plain data; ``swarm.net`` has the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.core.ledger import Ledger
from swarm.core.view import View


@dataclass(frozen=True, slots=True)
class Commit:
    """The decision to apply one step. Written to disk by the coordinator before anyone is told."""

    step: int
    clip_scale: float
    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Span:
    """Versions ``first..last`` that a peer can restore, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class PeerState:
    """What a peer holds: the version in memory, its ledger of the next step, and what it can go back to."""

    version: int
    prepared_step: int
    """The step that the peer has promised to be able to apply (0 if none)."""
    ledger: Ledger
    restorable: tuple[Span, ...]


# peer to coordinator


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session."""

    run_id: str
    protocol: int
    stage: int
    state: PeerState
    corpus_digest: str = ""
    """Of the peers of stage 0: two heads must draw from the same text."""
    instance: str = ""
    """Drawn by each process when it starts: tells a process that connects again from a second one with its identity."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Answer to :class:`Collect`: from here on the peer refuses frames of views below ``view``."""

    view: int
    state: PeerState


@dataclass(frozen=True, slots=True)
class Installing:
    """The peer is restoring or connecting for ``view``; resets the coordinator's deadline."""

    view: int
    detail: str


@dataclass(frozen=True, slots=True)
class Installed:
    """The peer holds the version of the view and has links to its neighbours."""

    view: int


@dataclass(frozen=True, slots=True)
class CannotInstall:
    """The peer failed to reach the version it was told to restore; ``restorable`` is what is left."""

    view: int
    reason: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """All microbatches of the step are accumulated on this peer; it can apply them and has them on disk."""

    view: int
    step: int
    squared_norm: float
    loss: float
    """Mean nats per token over the global batch; only the last stage knows it, others say 0."""
    beat_s: float = 0.0
    """Mean seconds that this peer computed on one microbatch of the step, forward and backward; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Validation loss of the parameters before slot ``step``; only the last stage says it."""

    view: int
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A link of this peer failed; the coordinator answers with a new view that repeats what is missing."""

    view: int
    neighbour: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What a peer measured of one outgoing link. ``goodput_bytes_s`` and ``rtt_s`` are negative while unknown."""

    target_peer: str
    source_stage: int
    target_stage: int
    goodput_bytes_s: float
    rtt_s: float
    rank: int
    dtype: str
    bytes_per_token: float
    queued_frames: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The peer leaves on purpose."""

    reason: str


# coordinator to peer


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing can be trained until these stages are hosted."""

    missing_stages: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Collect:
    """View ``view`` is being formed: say what you hold."""

    view: int


@dataclass(frozen=True, slots=True)
class Install:
    """Go to the version of ``view``; ``commits`` are the decisions a peer may have missed."""

    view: View
    commits: tuple[Commit, ...]
    rollback: bool
    """True when committed steps above the version of the view are given up."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Everybody has installed ``view``: the head drives what is outstanding."""

    view: int
    step: int
    training: tuple[int, ...]
    evaluations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """The step is committed: everyone applies it."""

    view: int
    commit: Commit
    beat_s: float = 0.0
    """Largest ``Prepared.beat_s`` of the step: the time of the slowest stage, which transfers hide behind."""


@dataclass(frozen=True, slots=True)
class Validated:
    """Validation loss of version ``step``, told to everybody."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The run has done all its steps."""

    steps: int


PeerMessage = (
    Hello | Collected | Installing | Installed | CannotInstall | Prepared | Evaluated | Disturbed | LinkReport | Goodbye
)
CoordinatorMessage = Waiting | Collect | Install | Begin | Apply | Validated | Finished
