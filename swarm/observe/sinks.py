"""Where events go: JSON lines, plain lines for people without a terminal, a bounded file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

from swarm.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    Enrolled,
    Event,
    Failed,
    FrameRefused,
    InvitationIssued,
    Left,
    LinkMeasured,
    PeerJoined,
    PeerLost,
    Resources,
    Restored,
    Result,
    Started,
    StepCommitted,
    Validation,
    ViewInstalled,
    Waiting,
    Warned,
)

FILE_LIMIT_BYTES = 16 * 2**20
"""An event file above this is moved aside once, so a run keeps between one and two of them."""


class JsonLines:
    """One object a line, flushed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        self._stream.write(json.dumps(event.as_json(), allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class FileLog:
    """JSON lines in a file that only this user can read, without secrets, bounded in size."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path
        self._file = self._open()

    def emit(self, event: Event) -> None:
        if isinstance(event, InvitationIssued):
            return
        self._file.write(json.dumps(event.as_json(), allow_nan=False) + "\n")
        self._file.flush()
        if self._file.tell() > FILE_LIMIT_BYTES:
            self._file.close()
            os.replace(self._path, self._path.with_suffix(".old.jsonl"))
            self._file = self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> TextIO:
        return os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w")


class PlainLines:
    """A line for each event that a person wants to read in a log; errors are said by the command itself, on stderr."""

    def __init__(self, stream: TextIO, *, every_steps: int = 10) -> None:
        self._stream = stream
        self._every = every_steps
        self._waiting = ""

    def emit(self, event: Event) -> None:
        if isinstance(event, StepCommitted) and event.step % self._every and event.step != event.steps:
            return
        text = "" if isinstance(event, Failed) else describe(event)
        if isinstance(event, Waiting):
            if text == self._waiting:
                return
            self._waiting = text
        if text:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def describe(event: Event) -> str:
    """One line for people; empty for what only programs need."""
    match event:
        case Started(role=role, stage=stage, run_name=name, device=device, addresses=addresses):
            what = "bootstrap" if stage is None else f"stage {stage}"
            where = ", ".join(addresses)
            return f"{what} of run {name!r} ({role}) on {device}, listening on {where}"
        case InvitationIssued(invitation=invitation, uses=uses):
            return f"invitation ({uses} uses):\n{invitation}"
        case Enrolled(run_id=run_id):
            return f"enrolled in run {run_id}"
        case ViewInstalled(view=view, step=step, members=members):
            who = ", ".join(f"{stage}={peer[:8]}" for stage, peer in members.items())
            return f"view {view} from step {step}: {who}"
        case Waiting(missing_stages=missing, reason=reason):
            stages = ", ".join(map(str, missing))
            return f"waiting for stage {stages} ({reason})" if missing else f"waiting: {reason}"
        case PeerLost(stage=stage, reason=reason):
            return f"lost stage {stage}: {reason}"
        case PeerJoined(stage=stage, peer_id=peer_id):
            return f"stage {stage} is hosted by {peer_id}"
        case StepCommitted(step=step, steps=steps, loss=loss):
            rate = "" if event.tokens_per_s is None else f", {event.tokens_per_s:,.0f} tokens/s"
            eta = "" if event.eta_s is None else f", {event.eta_s:,.0f} s left"
            return f"step {step}/{steps}: loss {loss:.4f}{rate}{eta}"
        case Validation(step=step, loss=loss):
            return f"validation loss after {step} steps: {loss:.4f}"
        case CheckpointSaved(step=step, bytes=size, seconds=seconds):
            return f"checkpoint of step {step}: {size / 2**20:.1f} MiB in {seconds:.2f} s"
        case CheckpointFailed(step=step, error=error):
            return f"no checkpoint of step {step}: {error}"
        case Restored(step=step, source=source, replayed_steps=replayed):
            return f"restored step {step} from the {source}, {replayed} steps replayed"
        case FrameRefused(sender=sender, reason=reason):
            return f"frame of {sender} refused: {reason}"
        case Warned() | Failed():
            return " ".join(part for part in (event.what, event.meaning, event.remedy) if part)
        case Left(reason=reason):
            return f"left: {reason}"
        case Result():
            return (
                f"{event.steps} steps: training loss {event.train_loss:.4f}, validation loss {event.val_loss:.4f}, "
                f"{event.tokens_per_s:,.0f} tokens/s, {event.wire_bytes_per_token:.1f} bytes per token and boundary "
                f"({event.compression:.1f} times fewer than dense bf16)"
            )
        case LinkMeasured() | Resources():
            return ""
        case _:
            return event.event
