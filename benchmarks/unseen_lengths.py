"""Worth of expecting lengths of prompts never answered, in the first epoch. Simulated: PAT's A40s, papers' lengths.

    python benchmarks/unseen_lengths.py                # about two minutes; --seeds 1 for a look

Two loads: responses of one data set (PAT's lengths), and of two that are mixed (PAT's and RLHFSpec's). A run is one
epoch, so each prompt comes once. What a data set's earlier responses say is used for one decision at a time:

- rank groups of the streaming pipeline, and deferral on top, as `scheduling/length_prior.py` does;
- outliers that move within their step, by the same limit;
- dispatch: a prompt never answered counts as one of its data set's mean length;
- TP switches: lengths of the data set's latest responses, and three spread up to the longest, are equally likely.

The last three are rules of this file, which nothing else uses. Each row divides the run's seconds without this use by
those with it, as mean, standard error, least and most over seeds and two shares of variance within a prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.scheduling.length_prior import Expected, LengthPrior
from rhyme_openrlhf.simulation.engine_kinds import load
from rhyme_openrlhf.simulation.planner import History
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import PRESETS, PromptLoad, StepLoad, Workload, drawn

STEPS, PROMPTS, SAMPLES = 8, 64, 8
WITHIN = (0.03, 0.3)
POINTS = 61
PIPELINE = Cluster(nodes=4, devices=4, tensor_parallel=2, trainer_tokens_per_second=20_000)
STAGES = Cluster(nodes=2, devices=8, tensor_parallel=2, trainer_tokens_per_second=1e9)


def one_data_set(seed: int, within: float) -> Workload:
    """Return a load of PAT's lengths."""
    shape = dataclasses.replace(PRESETS["pat-deepscaler"], within=within)
    return drawn(shape, STEPS, PROMPTS, SAMPLES, STEPS, seed)


def two_data_sets(seed: int, within: float) -> Workload:
    """Return a load whose prompts are half of PAT's lengths and half of RLHFSpec's, shuffled in each step."""
    random = np.random.default_rng(seed)
    parts = []
    for number, name in enumerate(("pat-deepscaler", "rlhfspec-lmsys")):
        shape = dataclasses.replace(PRESETS[name], within=within)
        own = drawn(shape, STEPS, PROMPTS // 2, SAMPLES, STEPS, seed + 1000 * number)
        parts.append((number * STEPS * PROMPTS, name, own))
    steps = []
    for place in range(STEPS):
        prompts = [
            dataclasses.replace(prompt, prompt=first + prompt.prompt, data_set=name)
            for first, name, own in parts
            for prompt in own.steps[place].prompts
        ]
        steps.append(StepLoad(1, tuple(prompts[at] for at in random.permutation(len(prompts)))))
    return Workload("two data sets", "made", tuple(steps), max(own.longest for _, _, own in parts))


class Nothing(LengthPrior):
    """Expects nothing."""

    def expected(self, own: Sequence[float | None], data_sets: Sequence[str]) -> Expected:
        """Return what history says."""
        return Expected(list(own), list(own))


class Guesses(History):
    """Takes a data set's earlier lengths for those of its prompts, where `kind` asks for lengths."""

    def __init__(self, workload: Workload, kind: str) -> None:
        super().__init__()
        self.prior = Nothing()
        self._kind = kind
        self._longest = workload.longest
        self._data_set = {prompt.prompt: prompt.data_set for step in workload.steps for prompt in step.prompts}
        self._seen: dict[str, list[int]] = {}

    def lengths(self, prompt: int) -> tuple[int, ...]:
        """Return the data set's mean length, for dispatch."""
        seen = self._seen.get(self._data_set[prompt])
        return (round(statistics.fmean(seen)),) if seen and self._kind == "dispatch" else ()

    def column(self, prompt: int) -> NDArray[np.int64]:
        """Return the data set's lengths, for TP switches."""
        seen = self._seen.get(self._data_set[prompt])
        if not seen or self._kind != "switch":
            return super().column(prompt)
        points = np.quantile(seen, (np.arange(POINTS) + 0.5) / POINTS)
        return np.array([*points, self._longest / 4, self._longest * 3 / 4, self._longest]).astype(np.int64)

    def note(self, number: int, step: StepLoad, load: PromptLoad) -> None:
        """Note the lengths for the data set; stages are complete one after the other."""
        self._seen.setdefault(load.data_set, []).extend(load.lengths)


def seconds(workload: Workload, cluster: Cluster, features: Features, kind: str) -> float:
    """Return the seconds of the run; `kind`: "" without the expectation, or one of USES."""
    run = Run(workload, cluster, features, load(["pat-a40"]))
    if kind in ("dispatch", "switch"):
        run.history = Guesses(workload, kind)
    elif kind == "outliers":
        run.history.prior = LengthPrior(defers=True)
    elif not kind:
        run.history.prior = Nothing()
    return run.go().seconds


LOADS: dict[str, Callable[[int, float], Workload]] = {"one data set": one_data_set, "two data sets": two_data_sets}
USES = ("rank groups", "outliers", "dispatch", "switch")
# Name: cluster, features and use of the expectation without what the row is about, then with it.
ROWS: dict[str, tuple[Cluster, tuple[Features, str], tuple[Features, str]]] = {
    "rank groups": (PIPELINE, (Features("pipeline"), ""), (Features("pipeline"), "rank groups")),
    "deferral, with rank groups": (
        PIPELINE,
        (Features("pipeline"), "rank groups"),
        (Features("pipeline", outliers=True, defer=True), "rank groups"),
    ),
    "outliers within the step, with rank groups": (
        PIPELINE,
        (Features("pipeline"), "rank groups"),
        (Features("pipeline", outliers=True), "outliers"),
    ),
    "dispatch": (STAGES, (Features("sync", dispatch=True), ""), (Features("sync", dispatch=True), "dispatch")),
    "TP switches": (
        STAGES,
        (Features("sync", switching="history"), ""),
        (Features("sync", switching="history"), "switch"),
    ),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="seeds of each load (default: %(default)s)")
    chosen = parser.parse_args()
    print("| expected lengths used for | load | gain in the first epoch | standard error | least | most |")
    print("|---|---|---|---|---|---|")
    for name, (cluster, without, use) in ROWS.items():
        for of, make in LOADS.items():
            loads = [make(seed, within) for within in WITHIN for seed in range(1, chosen.seeds + 1)]
            gains = [seconds(one, cluster, *without) / seconds(one, cluster, *use) for one in loads]
            error = statistics.stdev(gains) / len(gains) ** 0.5
            mean = statistics.fmean(gains)
            print(f"| {name} | {of} | {mean:.3f}x | {error:.3f} | {min(gains):.2f}x | {max(gains):.2f}x |", flush=True)


if __name__ == "__main__":
    main()
