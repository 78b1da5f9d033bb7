"""`make bench-overhead`: tokens/s of the three-process swarm against the reference trainer on the same cores.

The two are interleaved in one run, since the machine drifts; each figure is the median over all its steps but the
first of every round. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from swarm.config.spec import RunSpec
from swarm.data import Sampler, open_corpus
from swarm.model.reference import ReferenceTrainer
from tests.bench.swarm_run import committed, run_demo

WARM_STEPS = 5


def overhead_spec(steps: int) -> RunSpec:
    """The demo's run without evaluation."""
    fields = RunSpec.load("demo").model_dump(mode="json")
    fields |= {"name": "overhead", "steps": steps}
    fields["evaluation"] |= {"every": 0}
    return RunSpec.parse(fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    threads = os.cpu_count() or 1
    spec = overhead_spec(options.steps)
    tokens = spec.batch.sequences * spec.model.context
    reference_s: list[float] = []
    swarm_s: list[float] = []
    stalls_s: list[float] = []
    rss_bytes: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sampler = Sampler(spec, open_corpus(spec.data, spec.model, folder / "corpus"))
        for number in range(options.rounds):
            trainer = ReferenceTrainer(spec, sampler, threads=threads)
            for step in range(options.steps // 2):
                began = time.perf_counter()
                trainer.step()
                if step >= WARM_STEPS:
                    reference_s.append(time.perf_counter() - began)
            del trainer
            events = run_demo(spec, folder, timeout_s=600)
            swarm_s += [event["seconds"] for event in committed(events)[WARM_STEPS:]]
            resources = [event for event in events if event["event"] == "resources"]
            stalls_s += [event["loop_stall_p99_s"] for event in resources if event["loop_stall_p99_s"] is not None]
            rss_bytes += [event["rss_bytes"] for event in resources]
            row = {
                "round": number,
                "reference_tokens_per_s": tokens / median(reference_s),
                "swarm_tokens_per_s": tokens / median(swarm_s),
            }
            print(json.dumps(row), flush=True)
    result = {
        "swarm_tokens_per_s": tokens / median(swarm_s),
        "reference_tokens_per_s": tokens / median(reference_s),
        "ratio": median(reference_s) / median(swarm_s),
        "reference_threads": threads,
        "loop_stall_p99_s": max(stalls_s, default=None),
        "largest_rss_bytes": max(rss_bytes, default=None),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
