"""`swarm-peer demo --json`: what a program gets from it, and what a peer weighs."""

from __future__ import annotations

from pathlib import Path

from swarm.core.frame import dense_bytes_per_token
from tests.e2e.processes import Process, tiny_spec, to_toml

LIMIT_BYTES = 600 * 10**6
RESULT_KEYS = {
    "steps",
    "train_loss",
    "val_loss",
    "tokens_per_s",
    "wire_bytes_per_token",
    "dense_bytes_per_token",
    "compression",
    "peers",
    "seconds",
}


def test_the_last_line_is_the_result_and_peers_stay_within_their_memory(tmp_path: Path) -> None:
    spec = tiny_spec(steps=60, evaluation={"every": 30})
    (tmp_path / "run.toml").write_text(to_toml(spec))
    demo = Process("peers.swarm_peer", "demo", "--spec", str(tmp_path / "run.toml"))
    try:
        assert demo.exit_code() == 0
    finally:
        demo.end()
    result = demo.events[-1]
    assert result["event"] == "result"
    assert set(result) >= RESULT_KEYS
    assert (result["steps"], result["peers"]) == (60, 3)
    assert result["dense_bytes_per_token"] == dense_bytes_per_token(spec)
    for stage in range(3):
        resources = [e for e in demo.events if e["event"] == "resources" and e["source"] == f"stage-{stage}"]
        assert resources, "every peer tells what it uses"
        assert max(event["rss_bytes"] - event["in_flight_bytes"] for event in resources) < LIMIT_BYTES
    sources = {event["source"] for event in demo.events if event["event"] == "step"}
    assert sources == {"bootstrap", "stage-0", "stage-1", "stage-2"}, "everybody sees every step"
