"""`make bench-quality`: what each boundary is worth, with both controls. Reference trainer, no network.

One JSON line a row, for the demo's shape: dense, lone peer (a dense model with one stage's layers), cut wire (rank 0),
and both compressed kinds at the demo's rank. The last line has the worth of the wire of the demo's default,
(loss cut - loss at its rank) / (loss cut - loss dense), and whether it beats the lone peer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from swarm.config.spec import BoundaryKind, RunSpec
from swarm.core.frame import boundary_bytes_per_token
from swarm.data import Sampler, open_corpus
from swarm.model.reference import ReferenceTrainer


def variant(base: RunSpec, *, lone: bool = False, **boundary: Any) -> RunSpec:
    """``base`` with another boundary; ``lone`` keeps one stage's layers only."""
    fields = base.model_dump(mode="json")
    fields["boundary"] |= boundary
    if lone:
        fields["model"] |= {"layers": len(base.model.stage_layers(0)), "stages": 1}
    return RunSpec.parse(fields)


def rows(base: RunSpec) -> dict[str, RunSpec]:
    """The runs to compare, by name."""
    dense = {"kind": BoundaryKind.DENSE.value, "learned_basis": False, "ladder": []}
    return {
        "dense": variant(base, **dense),
        "lone_peer": variant(base, lone=True, **dense),
        "cut_wire": variant(base, rank=0, ladder=[]),
        "subspace": variant(base, kind=BoundaryKind.SUBSPACE.value, learned_basis=False),
        "anchored": variant(base, kind=BoundaryKind.ANCHORED.value),
    }


def train(spec: RunSpec, folder: Path, threads: int | None) -> float:
    """Validation loss after all steps of ``spec``."""
    sampler = Sampler(spec, open_corpus(spec.data, spec.model, folder))
    trainer = ReferenceTrainer(spec, sampler, threads=threads)
    for _ in range(spec.steps):
        trainer.step()
    return trainer.validate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="instead of the demo's")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="*", help="names of rows")
    options = parser.parse_args()
    fields = RunSpec.load("demo").model_dump(mode="json")
    # The final loss is compared, over more of the held-out part than the demo takes.
    fields["evaluation"] |= {"sequences": 256}
    if options.steps:
        fields["steps"] = options.steps
    base = RunSpec.parse(fields)
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in rows(base).items():
            if options.only and name not in options.only:
                continue
            losses[name] = train(spec, Path(folder), options.threads)
            row = {
                "name": name,
                "kind": spec.boundary.kind.value,
                "rank": spec.wire_rank if spec.model.stages > 1 else None,
                "dtype": spec.boundary.dtype.value,
                "bytes_per_token": boundary_bytes_per_token(spec, spec.wire_rank, spec.boundary.dtype)
                if spec.model.stages > 1
                else 0.0,
                "val_loss": losses[name],
                "steps": spec.steps,
            }
            print(json.dumps(row), flush=True)
    if {"dense", "cut_wire", "lone_peer", base.boundary.kind.value} <= set(losses):
        reached = losses[base.boundary.kind.value]
        worth = (losses["cut_wire"] - reached) / (losses["cut_wire"] - losses["dense"])
        result = {
            "worth_of_wire": worth,
            "beats_lone_peer": reached < losses["lone_peer"],
            "kind": base.boundary.kind.value,
            "rank": base.boundary.rank,
            "times_fewer_coefficients": base.model.d_model / base.boundary.rank,
            "val_loss": reached,
            "lone_peer_val_loss": losses["lone_peer"],
            "dense_val_loss": losses["dense"],
            "cut_wire_val_loss": losses["cut_wire"],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
