"""Rollouts with drafts against rollouts without, by step times of other hardware: what a GPU may gain in each epoch.

    python benchmarks/rollout_times.py --out rollout_times.json
    python benchmarks/rollout_times.py --profile PROFILE       # by a measured profile (`rhyme profile`) too

Simulated: texts are those of recorded runs (benchmarks/replay.py), and the drafter and its budget are the real ones.
Each decode step takes what the profile says for its samples, context and draft tokens. A rollout ends with its slowest
engine. The host's work and prefills are left out. Without `--profile`, step times are from a data sheet (Llama-3.1-8B
on an H100, `roofline.py`). A larger model than the recorded one writes other texts, so the tokens a step are those of
the recorded load.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from papers_inputs import EFFICIENCY, H100, LLAMA_8B
from replay import REAL_TRACE, TRACES, Ours, Sample, epochs_of, name_of, read_trace, replay
from roofline import roofline

from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile, read
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.history import HistorySettings


class Timed(Ours):
    """Our drafter with its budget, or none at all; `seconds` are those of each rollout so far.

    `plain`: what the same tokens would have taken without drafts, as a run's own estimate has it (drafting/gain.py).
    """

    def __init__(self, model: StepModel, drafts: bool) -> None:
        super().__init__(HistoSpecSettings(), rollouts=HistorySettings().rollouts)
        self._model = model
        self.seconds: list[float] = []
        self.plain: list[float] = []
        # The samples of the last step, the tokens that their texts had, and the step's seconds without drafts.
        self._last: tuple[list[Sample], int, float] = [], 0, 0.0
        if drafts:
            self._drafter.plan_by(Predictor(model))

    def begin(self, samples: list[Sample]) -> None:
        self.settle()
        super().begin(samples)
        self.seconds.append(0.0)
        self.plain.append(0.0)

    def settle(self) -> None:
        """Count what the tokens of the last step would have taken."""
        running, before, seconds = self._last
        if running:
            tokens = sum(len(sample.text) for sample in running) - before
            self.plain[-1] += tokens / len(running) * seconds
        self._last = [], 0, 0.0

    def draft(self, running: list[Sample]) -> list[list[int]]:
        drafts = super().draft(running) if self._drafter.planner is not None else [[] for _ in running]
        self.settle()
        context = sum(len(sample.text) for sample in running)
        self._last = list(running), context, self._model.seconds(len(running), context, 0)
        self.seconds[-1] += self._model.seconds(len(running), context, sum(map(len, drafts)))
        return drafts

    def learn(self, records: list[Record]) -> None:
        if self._drafter.planner is not None:
            super().learn(records)
            self._drafter.planner.policy_updated()


def times(steps: list[list[Record]], model: StepModel, engines: int, drafts: bool) -> list[dict[str, float]]:
    """Return each epoch's seconds of rollouts, its tokens a decode step of a sample, and the gain by estimate."""
    drafters = [Timed(model, drafts) for _ in range(engines)]
    totals = replay(steps, [*drafters])
    seconds = [0.0] * len(totals)
    plain, busy = [0.0] * len(totals), [0.0] * len(totals)
    for drafter in drafters:
        drafter.settle()
        for epoch, *both in zip(epochs_of(steps), drafter.plain, drafter.seconds, strict=True):
            plain[epoch - 1] += both[0]
            busy[epoch - 1] += both[1]
    for epoch, *each in zip(epochs_of(steps), *(drafter.seconds for drafter in drafters), strict=True):
        seconds[epoch - 1] += max(each)
    return [
        {"seconds": of_epoch, "tokens_per_step": total["tokens"] / total["samples"], "estimate": without / took}
        for of_epoch, total, without, took in zip(seconds, totals, plain, busy, strict=True)
    ]


def row(load: str, engines: int, profile: Profile) -> dict[str, Any]:
    """Return how many times as fast the load's rollouts are with drafts, in epoch 1 and later, and tokens a step."""
    steps = read_trace(PATHS[load])
    without, drafted = (times(steps, StepModel(profile), engines, drafts) for drafts in (False, True))
    found: dict[str, Any] = {"load": load, "engines": engines, "device": profile.subject.hardware}
    found["samples"] = sum(len(record.pieces) for record in steps[0]) // engines
    for when, epochs in (("first", slice(0, 1)), ("later", slice(1, None))):
        both = [sum(epoch["seconds"] for epoch in arm[epochs]) for arm in (without, drafted)]
        found[when] = {
            "ratio": both[0] / both[1],
            "tokens_per_step": statistics.fmean(epoch["tokens_per_step"] for epoch in drafted[epochs]),
            "estimate": statistics.fmean(epoch["estimate"] for epoch in drafted[epochs]),
        }
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| load | samples an engine | step times | epoch 1 | later epochs |", "|---|---|---|---|---|"]
    for one in rows:
        cells = [
            f"{one[when]['ratio']:.2f}x ({one[when]['tokens_per_step']:.1f}; estimate {one[when]['estimate']:.2f}x)"
            for when in ("first", "later")
        ]
        lines.append(f"| {one['load']} | {one['samples']} | {one['device']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


PATHS = {name_of(path): path for path in (*TRACES, REAL_TRACE)}


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="step times to take as well, made by rhyme profile")
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 1], help="a rollout's samples are spread over")
    parser.add_argument("--out", type=Path, default=Path("rollout_times.json"))
    chosen = parser.parse_args()
    if min(chosen.engines) < 1:
        parser.error("--engines must be 1 or more")
    profiles = [roofline(LLAMA_8B, H100, 1, EFFICIENCY), *([read(chosen.profile)] if chosen.profile else [])]
    rows = []
    for profile in profiles:
        for load in PATHS:
            for engines in chosen.engines:
                rows.append(row(load, engines, profile))
                chosen.out.write_text(json.dumps({"kind": "simulated", "rows": rows}) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
