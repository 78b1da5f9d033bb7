"""Runs a whole swarm as processes on loopback, and gives back the events it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers.demo import to_toml
from swarm.config.spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]


def run_demo(spec: RunSpec, folder: Path, *, timeout_s: float) -> list[dict[str, Any]]:
    """Train ``spec`` with one process per stage; the events of ``swarm-peer demo --json``.

    Raises:
        RuntimeError: the demo did not exit with 0.
    """
    path = folder / "run.toml"
    path.write_text(to_toml(spec))
    command = [sys.executable, "-m", "peers.swarm_peer", "demo", "--json", "--spec", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"the demo ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def committed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps as the coordinator committed them, one event each."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "step" and event["source"] == "bootstrap":
            steps.setdefault(event["step"], event)
    return [steps[step] for step in sorted(steps)]
