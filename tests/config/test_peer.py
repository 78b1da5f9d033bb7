"""Settings of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swarm.config.peer import ANY_HOST, BootstrapSettings, PeerSettings, state_home
from swarm.config.spec import RunSpec

PEER: dict[str, Any] = {"invitation": "swarm1.x", "stage": 0, "state_dir": Path("state")}
BOOTSTRAP: dict[str, Any] = {"spec": RunSpec(), "state_dir": Path("state")}


@pytest.mark.parametrize(
    "wrong", [{"stage": -1}, {"threads": 0}, {"dht_port": 65536}, {"dht_port": -1}, {"gpu": "cuda"}]
)
def test_settings_of_a_peer_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        PeerSettings(**PEER | wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"uses": 0},
        {"invitation_lifetime_s": 0},
        {"certificate_lifetime_s": 9},
        {"linger_s": -1},
        {"dht_port": 65536},
        {"port": 1},
    ],
)
def test_settings_of_a_bootstrap_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        BootstrapSettings(**BOOTSTRAP | wrong)


def test_defaults() -> None:
    peer, bootstrap = PeerSettings(**PEER), BootstrapSettings(**BOOTSTRAP)
    assert (peer.listen, peer.device, peer.threads, peer.local) == (f"{ANY_HOST}:0", "auto", None, False)
    assert (bootstrap.listen, bootstrap.uses, bootstrap.allow_restart) == (f"{ANY_HOST}:31337", 100, False)
    assert bootstrap.certificate_lifetime_s == 24 * 3600
    assert math.isinf(bootstrap.linger_s)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PeerSettings(**PEER).stage = 1  # type: ignore[misc]


def test_state_goes_where_the_desktop_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_home() == tmp_path / "swarm"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_home() == tmp_path / ".local" / "state" / "swarm"
