"""The live view of a run on a terminal."""

from __future__ import annotations

import math
import threading
from collections import deque
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm.observe.events import (
    Event,
    Failed,
    InvitationIssued,
    LinkMeasured,
    PeerJoined,
    PeerLost,
    Resources,
    Started,
    StepCommitted,
    Validation,
    ViewInstalled,
    Waiting,
)
from swarm.observe.sinks import describe

MESSAGES = 6
SPARK_POINTS = 60
SPARKS = "▁▂▃▄▅▆▇█"


class RunPicture:
    """What is known of a run, fed by events and drawn on demand, possibly from another thread."""

    def __init__(self) -> None:
        self.title = "swarm"
        self.members: dict[int, str] = {}
        self.missing: tuple[int, ...] = ()
        self.waiting = ""
        self.step: StepCommitted | None = None
        self.validation: Validation | None = None
        self.links: dict[tuple[int, int], LinkMeasured] = {}
        self.stall_s: float | None = None
        self.rss_bytes = 0
        self.losses: deque[float] = deque(maxlen=2000)
        self.messages: deque[str] = deque(maxlen=MESSAGES)
        self._lock = threading.Lock()

    def take(self, event: Event) -> None:
        with self._lock:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Started(run_name=name, run_id=run_id):
                role = "" if event.stage is None else f" · stage {event.stage} on {event.device}"
                self.title = f"{name} · run {run_id[:8]}{role}"
            case ViewInstalled(members=members):
                self.members = {int(stage): peer for stage, peer in members.items()}
                self.missing, self.waiting = (), ""
            case Waiting(missing_stages=missing, reason=reason):
                self.missing, self.waiting = missing, reason
            case PeerJoined(stage=stage, peer_id=peer_id):
                self.members[stage] = peer_id
            case PeerLost(stage=stage):
                self.members.pop(stage, None)
            case StepCommitted():
                self.step, self.waiting, self.missing = event, "", ()
                if math.isfinite(event.loss):
                    self.losses.append(event.loss)
                return
            case Validation():
                self.validation = event
            case LinkMeasured():
                self.links[event.source_stage, event.target_stage] = event
                return
            case Resources():
                self.stall_s, self.rss_bytes = event.loop_stall_p99_s, event.rss_bytes
                return
            case Failed():
                return  # the command says it itself, below the view
            case _:
                pass
        text = describe(event)
        if text:
            self.messages.append(text)

    def __rich__(self) -> RenderableType:
        with self._lock:
            return self._draw()

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [self._head()]
        if self.links:
            parts.append(self._link_table())
        if self.missing or self.waiting:
            what = f"WAITING FOR STAGE {', '.join(map(str, self.missing))}" if self.missing else "WAITING"
            parts.append(Text(f"{what}: {self.waiting}", style="bold red"))
        parts.append(Text("\n".join(self.messages), style="dim", overflow="fold"))
        return Panel(Group(*parts), title=self.title, border_style="cyan")

    def _head(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        step = self.step
        if step is None:
            grid.add_row(Text("no step yet"), Text(self._members()))
            return grid
        rate = "–" if step.tokens_per_s is None else f"{step.tokens_per_s:,.0f} tokens/s"
        eta = "–" if step.eta_s is None else clock(step.eta_s)
        val = "–" if self.validation is None else f"{self.validation.loss:.4f} (step {self.validation.step})"
        grid.add_row(f"step {step.step} / {step.steps}", ProgressBar(total=step.steps, completed=step.step, width=40))
        grid.add_row(f"loss {step.loss:.4f}  {sparkline(list(self.losses))}", f"validation {val}")
        grid.add_row(f"{rate}, {eta} left", self._members())
        if self.stall_s is not None:
            grid.add_row(f"loop stall p99 {1000 * self.stall_s:.1f} ms", f"memory {self.rss_bytes / 2**20:,.0f} MiB")
        return grid

    def _members(self) -> str:
        return "  ".join(f"{stage}:{peer[:6]}" for stage, peer in sorted(self.members.items())) or "no peers yet"

    def _link_table(self) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
        for name in ("link", "goodput", "rtt", "rank", "dtype", "bytes/token", "compression", "queue"):
            table.add_column(name, justify="left" if name == "link" else "right")
        for (source, target), link in sorted(self.links.items()):
            goodput = "unknown" if link.goodput_bytes_s is None else f"{link.goodput_bytes_s * 8e-6:,.1f} Mbit/s"
            rtt = "unknown" if link.rtt_s is None else f"{1000 * link.rtt_s:.1f} ms"
            compression = f"{link.compression:.1f}x" if link.bytes_per_token else "–"
            table.add_row(
                f"{source} → {target}",
                goodput,
                rtt,
                str(link.rank),
                link.dtype,
                f"{link.bytes_per_token:.1f}",
                compression,
                str(link.queued_frames),
            )
        return table


class LiveView:
    """A sink that redraws the picture a few times a second."""

    def __init__(self, console: Console) -> None:
        self.picture = RunPicture()
        self._console = console
        self._live = Live(self.picture, console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def emit(self, event: Event) -> None:
        if isinstance(event, InvitationIssued):
            # Above the live area and unwrapped, so that it can be copied.
            self._console.print(describe(event), soft_wrap=True, highlight=False, markup=False)
            return
        self.picture.take(event)

    def close(self) -> None:
        self._live.stop()


def sparkline(values: list[float], points: int = SPARK_POINTS // 2) -> str:
    """The course of ``values`` in block characters, each the mean of its share."""
    if len(values) < 2:
        return ""
    count = min(points, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(SPARKS[int((mean - low) / span * (len(SPARKS) - 1))] for mean in means)


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
