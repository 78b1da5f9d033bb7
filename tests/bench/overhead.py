"""`make bench-overhead`: tokens/s of the three-process swarm against the reference trainer on the same cores.

The two are interleaved in one run, since the machine drifts; each figure is the median over all its steps but the
first of every round. Loop stalls are those of the peers over the last 30 s of each round; ``sleep_p99_s`` is the
lateness of a bare sleep in an idle process at the same time, which the machine itself is to blame for. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from statistics import median

from swarm.config.spec import RunSpec
from swarm.data import Sampler, open_corpus
from swarm.model.reference import ReferenceTrainer
from swarm.observe.loop import INTERVAL_S, WINDOW, percentile
from tests.bench.swarm_run import committed, run_demo

WARM_STEPS = 5


def overhead_spec(steps: int) -> RunSpec:
    """The demo's run without evaluation."""
    fields = RunSpec.load("demo").model_dump(mode="json")
    fields |= {"name": "overhead", "steps": steps}
    fields["evaluation"] |= {"every": 0}
    return RunSpec.parse(fields)


class SleepMeter(threading.Thread):
    """Lateness of plain sleeps in this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: deque[float] = deque(maxlen=WINDOW)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(INTERVAL_S)
            self.samples.append(time.monotonic() - began - INTERVAL_S)

    def end(self) -> float | None:
        self._ended.set()
        self.join()
        return percentile(self.samples, 0.99)


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
    sleeps_s: list[float] = []
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
            sleeper = SleepMeter()
            sleeper.start()
            events = run_demo(spec, folder, timeout_s=600)
            sleeps_s.append(sleeper.end() or 0.0)
            swarm_s += [event["seconds"] for event in committed(events)[WARM_STEPS:]]
            resources = [event for event in events if event["event"] == "resources"]
            last = {event["source"]: event["loop_stall_p99_s"] for event in resources if event["source"] != "bootstrap"}
            stalls_s += [stall_s for stall_s in last.values() if stall_s is not None]
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
        "loop_stall_p99_s": median(stalls_s) if stalls_s else None,
        "largest_loop_stall_p99_s": max(stalls_s, default=None),
        "sleep_p99_s": median(sleeps_s),
        "largest_rss_bytes": max(rss_bytes, default=None),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
