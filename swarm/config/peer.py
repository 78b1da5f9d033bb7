"""Settings of one process: what its owner chooses, as opposed to what the run prescribes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from swarm.config.spec import RunSpec

DEFAULT_PORT = 31337
"""Port of the bootstrap unless another is chosen: volunteers and firewalls want a fixed one."""

ANY_HOST = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
"""All interfaces, IPv6 and IPv4 where the machine has both."""

DAY_S = 86_400.0


class PeerSettings(BaseModel):
    """Of ``swarm-peer join``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    invitation: str
    stage: Annotated[int, Field(ge=0)]
    state_dir: Path
    listen: str = f"{ANY_HOST}:0"
    announce: str | None = None
    """What others are told to connect to, if it is not an address of this machine; several with commas."""
    device: str = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None
    local: bool = False
    """All peers of the run are on this machine: loopback may be announced."""
    dht_port: Annotated[int, Field(ge=0, le=65535)] = 0
    background: bool = False
    """Compute on processor time that nothing else on this machine wants."""


class BootstrapSettings(BaseModel):
    """Of ``swarm-bootstrap``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: RunSpec
    state_dir: Path
    listen: str = f"{ANY_HOST}:{DEFAULT_PORT}"
    announce: str | None = None
    local: bool = False
    dht_port: Annotated[int, Field(ge=0, le=65535)] = 0
    uses: Annotated[int, Field(ge=1)] = 100
    invitation_lifetime_s: Annotated[float, Field(gt=0)] = 30 * DAY_S
    certificate_lifetime_s: Annotated[float, Field(ge=10)] = DAY_S
    invitation_file: Path | None = None
    allow_restart: bool = False
    linger_s: Annotated[float, Field(ge=0)] = float("inf")
    """How long the daemon stays after the run has finished; infinite answers ``status`` until it is stopped."""


def state_home() -> Path:
    """Where state goes without ``--state-dir``: ``$XDG_STATE_HOME/swarm``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "swarm"
