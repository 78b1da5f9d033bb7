"""``swarm-peer``: join a run, look at one, or try one out on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from peers.terminal import end, event_log, finish, run
from swarm.config.peer import ANY_HOST, PeerSettings, state_home
from swarm.errors import SwarmError, UsageError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example, on this machine alone: swarm-peer demo"
)
def main() -> None:
    """Train one transformer together with others: host one stage of it on this machine."""


@main.command(epilog="Example: swarm-peer join --stage 1 swarm1.eJx…   (or a file with the invitation, or - for stdin)")
@click.argument("invitation")
@click.option("--stage", type=click.IntRange(min=0), required=True, help="Which stage of the model to host.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Identity, checkpoints. Default: one per stage.")
@click.option(
    "--listen", default=f"{ANY_HOST}:0", show_default=True, help="Address and port to listen on; 0 is a free one."
)
@click.option("--announce", help="Address that others reach this machine at, if it is not one of its own.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, xpu, mps, …")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with on a CPU. Default: all cores.")
@click.option("--background", is_flag=True, help="Compute on processor time that nothing else wants.")
@click.option("--local", is_flag=True, help="All peers are on this machine: use loopback.")
@click.option(
    "--dht-port", type=click.IntRange(0, 65535), default=0, show_default="free port", help="Port of the DHT daemon."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each event.")
def join(
    invitation: str,
    stage: int,
    state_dir: Path | None,
    listen: str,
    announce: str | None,
    device: str,
    threads: int | None,
    background: bool,
    local: bool,
    dht_port: int,
    as_json: bool,
) -> None:
    """Host a stage of the run that INVITATION names, until the run is finished. Ctrl-C leaves it in order."""
    if threads is not None:
        # Before torch is imported, or its thread pools are made for all cores.
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    try:
        from swarm.net.invitation import Invitation

        # A peer that is enrolled comes back with it even when it has expired; enrolling checks again.
        parsed = Invitation.parse(invitation, accept_expired=True)
        folder = state_dir or state_home() / f"peer-{parsed.run_id[:8]}-stage-{stage}"
        settings = PeerSettings(
            invitation=parsed.encode(),
            stage=stage,
            state_dir=folder,
            listen="127.0.0.1:0" if local and listen == f"{ANY_HOST}:0" else listen,
            announce=announce,
            device=device,
            threads=threads,
            background=background,
            local=local,
            dht_port=dht_port,
        )
        log = event_log(as_json=as_json, folder=folder)
    except SwarmError as error:
        end(error, as_json=as_json)
    except OSError as error:
        end(
            UsageError(f"The state directory cannot be used: {error}.", remedy="Choose another --state-dir."),
            as_json=as_json,
        )

    async def host() -> int:
        from swarm.runtime.peer import join as join_run

        return await join_run(settings, log)

    finish(run(host, log, as_json=as_json))


@main.command(epilog="Example: swarm-peer status swarm1.eJx…")
@click.argument("invitation")
@click.option("--json", "as_json", is_flag=True, help="The status as one JSON object.")
def status(invitation: str, as_json: bool) -> None:
    """Show how the run that INVITATION names is doing. Uses nothing of the invitation up."""
    import asyncio

    try:
        from swarm.net.invitation import Invitation
        from swarm.runtime.status import query

        answer = asyncio.run(query(Invitation.parse(invitation)))
    except SwarmError as error:
        end(error, as_json=as_json)
    if as_json:
        click.echo(json.dumps({"event": "status", **answer.as_dict()}))
    else:
        from peers.tables import status_table

        status_table(answer)


@main.command(epilog="Example: swarm-peer demo --steps 50")
@click.option("--spec", "source", default="demo", show_default=True, metavar="FILE|PRESET", help="The run to train.")
@click.option("--steps", type=click.IntRange(min=1), help="Train fewer (or more) steps than the spec says.")
@click.option(
    "--peers",
    "stages",
    type=click.IntRange(min=1),
    help="Cut the model into this many stages, one peer each. Default: as the spec says.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Keep all state in this directory instead of deleting it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line; the last is the result.")
def demo(source: str, steps: int | None, stages: int | None, keep: Path | None, as_json: bool) -> None:
    """Train a small model with one process per stage on this machine, over real links."""
    from peers.demo import run_demo

    sys.exit(run_demo(source, steps=steps, stages=stages, keep=keep, as_json=as_json))


if __name__ == "__main__":
    main()
