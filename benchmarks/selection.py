"""Cost of choosing draft lengths in a step: one predicted step time, and the whole choice. Measured, without an engine.

    python benchmarks/selection.py --profile PROFILE

`drafting/planner.py` makes the choice from a step's proposals: each token's probability, the table of step times with
its correction, and the cut. Beside it stand the lists for vLLM, which every drafter has to make. Its context grows as
in a run, so that some of the tables are made anew. Each figure stands beside the profile's own time of a step of that
size, with as many draft tokens as were taken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES
from rhyme_openrlhf.drafting.planner import DraftPlanner, Drafts
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import read
from rhyme_openrlhf.latency.step_model import StepModel

SAMPLES = (1, 8, 64, 512)
SOURCES = len(SOURCE_NAMES)
# Proposed for each sample, and how many tokens all of them grow by in a step.
PROPOSED, GROWTH = 16, 4
FIRST_CONTEXT = 150
# Contexts end where the embedded task's do.
STEPS = 100
CALLS = 20_000


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the microseconds of a call; the median of nine rounds."""
    rounds = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(rounds)


def answers(model: StepModel) -> tuple[float, float]:
    """Microseconds of a cached answer, and of one that is not."""
    predictor, chance = Predictor(model), random.Random(0)
    predictor.step_seconds(8, 4000, 24)
    cached = microseconds(lambda: predictor.step_seconds(8, 4000, 24))
    asked = [(chance.randint(1, 64), chance.randint(100, 30_000), chance.randint(0, 500)) for _ in range(2000)]
    began = time.perf_counter()
    fresh = Predictor(model)
    for question in asked:
        fresh.step_seconds(*question)
    return cached, (time.perf_counter() - began) / len(asked) * 1e6


def choices(model: StepModel, samples: int) -> tuple[list[float], float, float]:
    """Return the microseconds of each of STEPS choices for `samples` samples, and of their lists (median).

    The third value is the profile's milliseconds of such a step.
    """
    planner = DraftPlanner(Predictor(model), SOURCES)
    chance = np.random.default_rng(0)
    lengths = chance.integers(0, PROPOSED + 1, samples)
    tokens = int(lengths.sum())
    drafts = Drafts(
        flat=np.arange(tokens, dtype=np.int32),
        confidences=chance.uniform(0.3, 1, tokens).astype(np.float32),
        lengths=lengths,
        sources=chance.integers(1, SOURCES, samples),
        matches=chance.integers(2, 30, samples),
        recents=chance.integers(0, 1000, samples),
    )
    took, lists, seconds, context = [], [], [], samples * FIRST_CONTEXT
    for step in range(STEPS + 20):
        context += GROWTH * samples
        began = time.perf_counter()
        kept, decision = planner.cut(drafts, samples, context, tokens)
        ended = time.perf_counter()
        profiled = planner.predictor.profiled_seconds(samples, context, decision.drafts)
        planner.took(samples, context, decision.drafts, profiled * 1.1)
        lists_began = time.perf_counter()
        kept.tokens()
        made = time.perf_counter() - lists_began
        if step >= 20:
            took.append((ended - began) * 1e6)
            lists.append(made * 1e6)
            seconds.append(profiled)
    return took, statistics.median(lists), statistics.fmean(seconds) * 1000


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True)
    model = StepModel(read(parser.parse_args().profile))
    cached, missed = answers(model)
    print(f"a predicted step time: {cached:.2f} us cached, {missed:.1f} us not")
    print("samples   choice us, median   95 %   longest   lists us   step ms   both of the step")
    for samples in SAMPLES:
        took, lists, step_ms = choices(model, samples)
        median, high = statistics.median(took), statistics.quantiles(took, n=20)[-1]
        share = (median + lists) / 1000 / step_ms
        print(
            f"{samples:7d}  {median:18.1f}  {high:5.1f}  {max(took):8.1f}  {lists:9.1f}  {step_ms:8.2f}  {share:16.2%}"
        )


if __name__ == "__main__":
    main()
