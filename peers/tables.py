"""Tables that commands print at their end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from swarm.observe.events import Result

if TYPE_CHECKING:
    from swarm.runtime.status import RunStatus


def result_table(result: Result) -> None:
    """What a run came to."""
    table = Table(title="Result", show_header=False)
    rows = [
        ("steps", f"{result.steps:,}"),
        ("training loss", _loss(result.train_loss)),
        ("validation loss", _loss(result.val_loss)),
        ("speed", f"{result.tokens_per_s:,.0f} tokens/s"),
        ("on the wire", f"{result.wire_bytes_per_token:.1f} bytes per token and boundary, both directions"),
        ("dense bf16", f"{result.dense_bytes_per_token:.1f} bytes"),
        ("compression", f"{result.compression:.1f} times"),
        ("peers", str(result.peers)),
        ("time", f"{result.seconds:.0f} s"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def _loss(value: float) -> str:
    return f"{value:.4f} nats/token" if math.isfinite(value) else "not measured"


def status_table(status: RunStatus) -> None:
    """How a run is doing."""
    console = Console()
    head = Table(title=f"Run {status.run_name} ({status.run_id[:8]})", show_header=False)
    loss = "–" if status.loss != status.loss else f"{status.loss:.4f}"
    val = "–" if status.validation_loss != status.validation_loss else f"{status.validation_loss:.4f}"
    head.add_row("phase", status.phase)
    head.add_row("step", f"{status.step} / {status.steps}")
    head.add_row("loss", loss)
    head.add_row("validation loss", f"{val} (step {status.validation_step})" if val != "–" else val)
    head.add_row("speed", "–" if status.tokens_per_s < 0 else f"{status.tokens_per_s:,.0f} tokens/s")
    for stage in range(status.stages):
        peer = next((member.peer_id for member in status.members if member.stage == stage), None)
        head.add_row(f"stage {stage}", peer or "[bold red]missing[/]")
    console.print(head)
    if status.links:
        links = Table(title="Links")
        for name in ("link", "goodput", "rtt", "rank", "dtype", "bytes/token", "queue"):
            links.add_column(name, justify="right")
        for link in status.links:
            goodput = "unknown" if link.goodput_bytes_s < 0 else f"{link.goodput_bytes_s * 8e-6:,.1f} Mbit/s"
            rtt = "unknown" if link.rtt_s < 0 else f"{1000 * link.rtt_s:.1f} ms"
            links.add_row(
                f"{link.source_stage} → {link.target_stage}",
                goodput,
                rtt,
                str(link.rank),
                link.dtype,
                f"{link.bytes_per_token:.1f}",
                str(link.queued_frames),
            )
        console.print(links)
