"""Three peer processes train one model, and get what one process would get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.config.spec import BoundaryKind, RunSpec
from swarm.core.frame import boundary_bytes_per_token
from swarm.data import Sampler, open_corpus
from swarm.model.reference import ReferenceTrainer
from tests.e2e.processes import Swarm, committed, tiny_spec

NewSwarm = Callable[[RunSpec], Swarm]


def reference(spec: RunSpec, folder: Path) -> tuple[list[float], dict[int, float]]:
    """Losses of all steps and of all validations, in this process."""
    sampler = Sampler(spec, open_corpus(spec.data, spec.model, folder))
    trainer = ReferenceTrainer(spec, sampler, threads=1)
    losses, validation = [], {0: trainer.validate()}
    for step in range(1, spec.steps + 1):
        losses.append(trainer.step().loss)
        if step % spec.evaluation.every == 0 or step == spec.steps:
            validation[step] = trainer.validate()
    return losses, validation


@pytest.mark.parametrize("kind", list(BoundaryKind))
def test_losses_equal_the_reference(kind: BoundaryKind, new_swarm: NewSwarm, tmp_path: Path) -> None:
    spec = tiny_spec(boundary={"kind": kind.value})
    swarm = new_swarm(spec)
    bootstrap = swarm.bootstrap("--linger", "10s")
    peers = swarm.peers()
    assert [peer.exit_code() for peer in peers] == [0, 0, 0]
    assert bootstrap.exit_code() == 0
    losses, validation = reference(spec, tmp_path / "reference")
    steps = committed(bootstrap)
    assert [event["step"] for event in steps] == list(range(1, spec.steps + 1))
    assert [event["loss"] for event in steps] == pytest.approx(losses, rel=1e-4)
    seen = {event["step"]: event["loss"] for event in bootstrap.events if event["event"] == "validation"}
    assert seen == pytest.approx(validation, rel=1e-4)
    result = bootstrap.kind("result")
    assert result["steps"] == spec.steps
    assert result["val_loss"] == pytest.approx(validation[spec.steps], rel=1e-4)
    expected = boundary_bytes_per_token(spec, spec.wire_rank, spec.boundary.dtype)
    assert result["wire_bytes_per_token"] == pytest.approx(expected)
    assert result["peers"] == 3
