"""`make parity`: the losses of a three-process swarm against the single-process reference, fp32 on the wire.

Prints one JSON line for each boundary kind.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from swarm.config.spec import BoundaryKind, RunSpec
from swarm.data import Sampler, open_corpus
from swarm.model.reference import ReferenceTrainer
from tests.bench.swarm_run import committed, run_demo

STEPS = 20
LIMIT = 1e-4


def parity_spec(kind: BoundaryKind, steps: int = STEPS) -> RunSpec:
    """The demo's run, short, with fp32 on the wire."""
    fields = RunSpec.load("demo").model_dump(mode="json")
    fields |= {"name": f"parity-{kind.value}", "steps": steps}
    fields["boundary"] |= {"kind": kind.value, "dtype": "fp32", "learned_basis": False}
    fields["evaluation"] |= {"every": steps // 2, "sequences": 8}
    return RunSpec.parse(fields)


def reference_losses(spec: RunSpec, folder: Path) -> tuple[list[float], dict[int, float]]:
    """Training losses of every step and validation losses by version, in one process."""
    sampler = Sampler(spec, open_corpus(spec.data, spec.model, folder / "corpus"))
    trainer = ReferenceTrainer(spec, sampler)
    validation = {0: trainer.validate()}
    losses = []
    for step in range(1, spec.steps + 1):
        losses.append(trainer.step().loss)
        if step % spec.evaluation.every == 0:
            validation[step] = trainer.validate()
    return losses, validation


def compare(spec: RunSpec, folder: Path) -> dict[str, object]:
    """Run both and compare."""
    expected, expected_validation = reference_losses(spec, folder)
    events = run_demo(spec, folder, timeout_s=240)
    losses = [event["loss"] for event in committed(events)]
    validation = {event["step"]: event["loss"] for event in events if event["event"] == "validation"}
    differences = [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
    differences += [abs(validation[step] - loss) / loss for step, loss in expected_validation.items()]
    return {
        "kind": spec.boundary.kind.value,
        "steps": spec.steps,
        "max_relative_difference": max(differences),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "reference_last_loss": expected[-1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    worst = 0.0
    for kind in BoundaryKind:
        with tempfile.TemporaryDirectory() as folder:
            row = compare(parity_spec(kind, steps), Path(folder))
        print(json.dumps(row), flush=True)
        worst = max(worst, float(str(row["max_relative_difference"])))
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
