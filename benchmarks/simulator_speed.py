"""Time and memory of a simulation itself. Measured, one core.

    python benchmarks/simulator_speed.py [--only NAME ...] [--out simulator_speed.json]

Responses of up to 16K tokens (preset pat-deepscaler, profile pat-a40 at TP 2, KV cache as there), 64 samples an engine
and step. Each case runs in a process of its own, whose peak resident memory is reported. The time includes drawing the
lengths.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any

from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import PRESETS, drawn

SAMPLES = 16
PER_ENGINE = 64
PIPELINE = Features("pipeline", two_tier=True, outliers=True, defer=True, speculation="budget")
EVERYTHING = dataclasses.replace(PIPELINE, reallocation=True, switching="history")
# Name -> engines, steps, steps of an epoch, features. Drafts, rank groups and outliers begin with the second epoch.
CASES: dict[str, tuple[int, int, int, Features]] = {
    "128 engines, 100 steps, async": (128, 100, 4, Features()),
    "128 engines, 100 steps, pipeline, two-tier, outliers, defer, budget": (128, 100, 4, PIPELINE),
    "128 engines, 100 steps, async, reallocation": (128, 100, 4, Features(reallocation=True)),
    "128 engines, 100 steps, sync, tp-switch": (128, 100, 4, Features("sync", switching="history")),
    "128 engines, 100 steps, everything": (128, 100, 4, EVERYTHING),
    "4096 engines, 1 step, async": (4096, 1, 1, Features()),
    "4096 engines, 2 steps, pipeline, two-tier, outliers, defer, budget": (4096, 2, 1, PIPELINE),
    "4096 engines, 2 steps, everything": (4096, 2, 1, EVERYTHING),
}


def measured(name: str) -> dict[str, Any]:
    """Seconds and peak memory of one case, in this process."""
    engines, steps, an_epoch, features = CASES[name]
    begun = time.perf_counter()
    load = drawn(PRESETS["pat-deepscaler"], steps, engines * PER_ENGINE // SAMPLES, SAMPLES, an_epoch, seed=1)
    result = Run(
        load, Cluster(nodes=engines // 4, devices=8, tensor_parallel=2), features, engine_kinds.load(["pat-a40"])
    ).go()
    return {
        "case": name,
        "seconds": time.perf_counter() - begun,
        # Of one core, where others use the machine too.
        "cpu_seconds": time.process_time(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "samples": sum(step.samples for step in result.steps),
        "tokens": result.tokens_generated,
        "simulated_hours": result.seconds / 3600,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES), action="append", help="one case; again for another")
    parser.add_argument("--out", type=Path, default=Path("simulator_speed.json"))
    chosen = parser.parse_args()
    found = []
    for name in chosen.only or CASES:
        # Its own process: peak memory never falls.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(measured, (name,)))
        last = found[-1]
        print(
            f"{name}: {last['seconds']:.1f} s, of one core {last['cpu_seconds']:.1f} s with its imports, "
            f"{last['peak_mb']:.0f} MB, {last['samples']:,} samples, "
            f"{last['tokens']:.3g} tokens, {last['simulated_hours']:.0f} h simulated",
            flush=True,
        )
    chosen.out.write_text(json.dumps({"kind": "measured", "cpus": os.cpu_count(), "cases": found}) + "\n")


if __name__ == "__main__":
    main()
