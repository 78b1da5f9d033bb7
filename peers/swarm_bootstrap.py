"""``swarm-bootstrap``: start a run and keep it reachable."""

from __future__ import annotations

import re
from pathlib import Path

import click

from peers.terminal import end, event_log, finish, run
from swarm.config.peer import ANY_HOST, DAY_S, DEFAULT_PORT, BootstrapSettings, state_home
from swarm.config.spec import RunSpec
from swarm.errors import SwarmError, UsageError


class Duration(click.ParamType):
    """``90s``, ``15m``, ``12h``, ``30d`` in seconds, at least ``least_s``."""

    name = "duration"
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}  # noqa: RUF012

    def __init__(self, least_s: float = 0.0) -> None:
        self.least_s = least_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if match is None:
            self.fail(f"{value!r} is not a duration such as 90s, 15m, 12h or 30d", param, ctx)
        seconds = float(match[1]) * self.units[match[2]]
        if seconds < self.least_s:
            self.fail(f"{value} is shorter than {self.least_s:g}s", param, ctx)
        return seconds


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: swarm-bootstrap --spec run.toml --announce bootstrap.example.org:31337",
)
@click.option("--spec", "source", required=True, metavar="FILE|PRESET", help="Run spec in TOML, or a preset (demo).")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Identity, CA, commits. Default: one per run.")
@click.option(
    "--listen", default=f"{ANY_HOST}:{DEFAULT_PORT}", show_default=True, help="Address and port to listen on."
)
@click.option("--announce", help="Address that others reach this machine at, if it is not one of its own.")
@click.option("--local", is_flag=True, help="All peers are on this machine: use loopback.")
@click.option(
    "--dht-port", type=click.IntRange(0, 65535), default=0, show_default="free port", help="Port of the DHT daemon."
)
@click.option(
    "--uses",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="How many peers may enrol with the invitation.",
)
@click.option("--expires", type=Duration(1.0), default="30d", show_default=True, help="Lifetime of the invitation.")
@click.option(
    "--certificates", type=Duration(10.0), default="1d", show_default=True, help="Lifetime of peers' certificates."
)
@click.option("--invitation-file", type=click.Path(path_type=Path), help="Also write the invitation to this file.")
@click.option("--allow-restart", is_flag=True, help="Let a stage without any state take the run back to step 0.")
@click.option("--linger", type=Duration(), help="End this long after the run has finished. Default: stay.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each event.")
def main(
    source: str,
    state_dir: Path | None,
    listen: str,
    announce: str | None,
    local: bool,
    dht_port: int,
    uses: int,
    expires: float,
    certificates: float,
    invitation_file: Path | None,
    allow_restart: bool,
    linger: float | None,
    as_json: bool,
) -> None:
    """Start a run: be the entry to its DHT, enrol peers, coordinate them. Prints the invitation to join with."""
    try:
        spec = complete(RunSpec.load(source))
        folder = state_dir or state_home() / f"bootstrap-{spec.name}-{spec.run_id[:8]}"
        settings = BootstrapSettings(
            spec=spec,
            state_dir=folder,
            listen="127.0.0.1:0" if local and listen == f"{ANY_HOST}:{DEFAULT_PORT}" else listen,
            announce=announce,
            local=local,
            dht_port=dht_port,
            uses=uses,
            invitation_lifetime_s=expires,
            certificate_lifetime_s=certificates,
            invitation_file=invitation_file,
            allow_restart=allow_restart,
            linger_s=float("inf") if linger is None else linger,
        )
        log = event_log(as_json=as_json, folder=folder)
    except SwarmError as error:
        end(error, as_json=as_json)
    except OSError as error:
        end(
            UsageError(f"The state directory cannot be used: {error}.", remedy="Choose another --state-dir."),
            as_json=as_json,
        )

    async def serve() -> int:
        from swarm.runtime.bootstrap import serve as serve_run

        return await serve_run(settings, log)

    finish(run(serve, log, as_json=as_json))


def complete(spec: RunSpec) -> RunSpec:
    """Fill in what is derived from files of this machine, so that it is part of the run id."""
    if spec.data.tokenizer == "bytes" or spec.data.tokenizer_sha256:
        return spec
    from swarm.data.tokenizers import tokenizer_digest

    data = spec.data.model_copy(update={"tokenizer_sha256": tokenizer_digest(spec.data.tokenizer)})
    return spec.model_copy(update={"data": data})


if __name__ == "__main__":
    main()
