"""One frozen dataclass for each thing that is worth telling, and the log that fans them out."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

log = logging.getLogger(__name__)

SHORT_ID_CHARACTERS = 8
"""Enough to tell the peers of a run apart in a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``event`` names the kind in JSON."""

    event: ClassVar[str] = "event"
    time: float = field(default_factory=time.time)
    """Wall seconds since the epoch."""
    peer: str | None = None
    """Short id of the peer whose process tells it; :class:`EventLog` fills it in as soon as it is known."""

    def as_json(self) -> dict[str, Any]:
        """JSON-able fields: ``event``, ``time``, ``peer`` (where known), then its own.

        What is not a finite number becomes null.
        """
        fields: dict[str, Any] = {"event": self.event}
        for entry in dataclasses.fields(self):
            if entry.name != "peer" or self.peer is not None:
                fields[entry.name] = _plain(getattr(self, entry.name))
        return fields


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The process is ready."""

    event: ClassVar[str] = "started"
    role: str
    peer_id: str
    stage: int | None
    run_id: str
    run_name: str
    device: str
    addresses: tuple[str, ...]
    stages: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class InvitationIssued(Event):
    """What volunteers join with. A secret of the run: whoever has it can enrol."""

    event: ClassVar[str] = "invitation"
    invitation: str
    expires_at_s: float
    uses: int


@dataclass(frozen=True, slots=True)
class Enrolled(Event):
    """This peer has a certificate of the run."""

    event: ClassVar[str] = "enrolled"
    run_id: str
    certificate_expires_at_s: float


@dataclass(frozen=True, slots=True)
class ViewInstalled(Event):
    """Membership changed."""

    event: ClassVar[str] = "view"
    view: int
    step: int
    members: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """Nothing can be trained until the stages named are hosted, or the coordinator is back."""

    event: ClassVar[str] = "waiting"
    missing_stages: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    """A member left or died."""

    event: ClassVar[str] = "peer_lost"
    peer_id: str
    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerJoined(Event):
    """A member came."""

    event: ClassVar[str] = "peer_joined"
    peer_id: str
    stage: int


@dataclass(frozen=True, slots=True)
class StepCommitted(Event):
    """One optimizer step of the whole swarm."""

    event: ClassVar[str] = "step"
    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float | None
    seconds: float | None
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Validation(Event):
    """Validation loss of the parameters after ``step`` steps, in nats per token."""

    event: ClassVar[str] = "validation"
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class LinkMeasured(Event):
    """One directed link. ``compression`` counts its bytes per token against dense bf16 in the same direction."""

    event: ClassVar[str] = "link"
    source_stage: int
    target_stage: int
    peer_id: str
    goodput_bytes_s: float | None
    rtt_s: float | None
    rank: int
    dtype: str
    bytes_per_token: float
    dense_bytes_per_token: float
    compression: float
    queued_frames: int


@dataclass(frozen=True, slots=True)
class Resources(Event):
    """What this process uses."""

    event: ClassVar[str] = "resources"
    loop_stall_p99_s: float | None
    rss_bytes: int
    in_flight_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk."""

    event: ClassVar[str] = "checkpoint"
    step: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointFailed(Event):
    """A checkpoint is not on disk; the one before it is whole."""

    event: ClassVar[str] = "checkpoint_failed"
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """Where this peer continues from."""

    event: ClassVar[str] = "restored"
    step: int
    source: str
    replayed_steps: int


@dataclass(frozen=True, slots=True)
class FrameRefused(Event):
    """A frame was not used."""

    event: ClassVar[str] = "frame_refused"
    sender: str
    reason: str


@dataclass(frozen=True, slots=True)
class Warned(Event):
    """Something that somebody should look at."""

    event: ClassVar[str] = "warning"
    code: str
    what: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """Why the process ends with a non-zero exit code."""

    event: ClassVar[str] = "error"
    code: str
    what: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Left(Event):
    """The process ends."""

    event: ClassVar[str] = "left"
    reason: str


@dataclass(frozen=True, slots=True)
class Result(Event):
    """What the run came to. Bytes per token are those of one boundary, both directions, token ids counted."""

    event: ClassVar[str] = "result"
    steps: int
    train_loss: float
    val_loss: float
    tokens_per_s: float
    wire_bytes_per_token: float
    dense_bytes_per_token: float
    compression: float
    peers: int
    seconds: float


def from_json(fields: Mapping[str, Any]) -> Event | None:
    """The event that :meth:`Event.as_json` wrote; None for what this version does not know. Extra keys are ignored."""
    kind = _KINDS.get(str(fields.get("event")))
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(kind):
        if entry.name in fields:
            value = fields[entry.name]
            if value is None and entry.type == "float":
                value = math.nan  # what as_json could not write
            values[entry.name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**values)
    except TypeError:
        return None


_KINDS: dict[str, type[Event]] = {kind.event: kind for kind in Event.__subclasses__()}


class Sink(Protocol):
    """Takes events; may raise, which only costs it the event."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Gives each event to all sinks. A sink that fails is reported once and never stops the caller.

    From :class:`Started` on, events carry the short id of this process's peer.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks
        self._failed: set[int] = set()
        self._peer: str | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, Started):
            self._peer = event.peer_id[:SHORT_ID_CHARACTERS]
        if event.peer is None and self._peer is not None:
            event = dataclasses.replace(event, peer=self._peer)
        for sink in self._sinks:
            try:
                sink.emit(event)
            except Exception as error:
                if id(sink) not in self._failed:
                    self._failed.add(id(sink))
                    log.warning("Events can no longer be written by %s: %s", type(sink).__name__, error)

    def close(self) -> bool:
        """Close all sinks; False if one of them hangs, so that its stream must not be touched any more."""
        in_order = True
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                in_order = in_order and not isinstance(error, TimeoutError)
                log.warning("%s could not be closed: %s", type(sink).__name__, error)
        return in_order
