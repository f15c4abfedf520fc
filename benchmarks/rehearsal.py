"""Bubbles spent on drafts: what an idle engine would gain if it generated samples of its next prompts to draft from.

    python benchmarks/rehearsal.py [--out rehearsal.json]

Simulated, by exact replay (benchmarks/replay.py) of all recorded runs and made texts (benchmarks/made_tasks.py). Two of
each prompt's samples are held out: no arm decodes them or keeps them as history. They are the rehearsed samples.
A rehearsal makes one token in each decode step of the bubble, as it has no drafts. A bubble as long as the rollout cuts
rehearsed texts to as many tokens as the rollout without them has decode steps. The first training step has no bubble
before it.

Not in a replay: the policy of a rehearsal is one training step older than that of the sample. Verifying costs no time,
so fewer decode steps are an upper bound of the time saved.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from made_tasks import TASKS, made
from replay import ENGINES, STEPS_PER_EPOCH, TRACES, Ours, Sample, name_of, read_trace, rollout, samples_of

from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

HELD_OUT = 2
# Lengths of the bubble, in lengths of the rollout without rehearsal; None: until the rehearsals are over.
BUBBLES = (0.25, 0.5, 1.0, None)
WITHOUT, TWO = "without", "two samples, whole"


class Rehearsed(Ours):
    """Our drafter as a run has it, with texts that were rehearsed."""

    def __init__(self) -> None:
        super().__init__(HistoSpecSettings(), rollouts=2)

    def rehearse(self, samples: list[Sample], most: int | None) -> None:
        """Let the samples' siblings draft from at most `most` tokens of each response, until `forget`."""
        self.begin(samples)
        for sample in samples:
            sample.text = [*sample.context, *sample.response[:most]]
        self.draft(samples)

    def forget(self, samples: list[Sample]) -> None:
        """Drop rehearsed texts."""
        for sample in samples:
            self.finished(sample)


def arms() -> dict[str, tuple[int, float | None]]:
    """Return by name: samples that are rehearsed of each prompt, and the length of the bubble."""
    one = {f"one sample, bubble {share}x" if share else "one sample, whole": (1, share) for share in BUBBLES}
    return {WITHOUT: (0, None), **one, TWO: (2, None)}


def held_out(record: Record, count: int) -> list[Sample]:
    """Return the first `count` samples of the record, by other names than those that are decoded."""
    return [replace(sample, name=f"rehearsed {sample.name}") for sample in list(samples_of(record))[:count]]


def replayed(
    steps: list[list[Record]], count: int, share: float | None, lengths: list[list[int]]
) -> list[Counter[str]]:
    """Return each step's totals with `count` rehearsed samples of each prompt.

    `lengths`: decode steps of each step and engine without rehearsal, by which a bubble is `share` long.
    """
    drafters = [Rehearsed() for _ in range(ENGINES)]
    totals: list[Counter[str]] = []
    for number, records in enumerate(steps):
        total: Counter[str] = Counter()
        real = [replace(record, pieces=record.pieces[HELD_OUT:]) for record in records]
        for engine, drafter in enumerate(drafters):
            held = [sample for record in records[engine::ENGINES] for sample in held_out(record, count)]
            texts = held if number else []
            most = None if share is None else int(share * lengths[number][engine])
            drafter.rehearse(texts, most)
            before = total["steps"]
            rollout(drafter, real[engine::ENGINES], total)
            total[f"steps of engine {engine}"] = total["steps"] - before
            drafter.forget(texts)
        for drafter in drafters:
            drafter.learn(real)
        totals.append(total)
    return totals


def figures(total: Counter[str]) -> dict[str, float]:
    """Return tokens a decode step, and the decode steps of the slower engine of each training step."""
    return {
        "tokens_per_step": total["tokens"] / total["samples"],
        "decode_steps": total["slowest"],
        "drafted": total["drafted"],
        "acceptance": total["accepted"] / max(1, total["drafted"]),
    }


def compared(steps: list[list[Record]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of one load by arm, in the first epoch behind its first step and in all later epochs."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    lengths: list[list[int]] = [[0] * ENGINES for _ in steps]
    for name, (count, share) in arms().items():
        totals = replayed(steps, count, share, lengths)
        by_engine = [[total[f"steps of engine {engine}"] for engine in range(ENGINES)] for total in totals]
        if name == WITHOUT:
            lengths = by_engine
        for total, of_step in zip(totals, by_engine, strict=True):
            total["slowest"] = max(of_step)
        first, later = totals[1:STEPS_PER_EPOCH], totals[STEPS_PER_EPOCH:]
        found[name] = {"epoch 1": figures(sum(first, Counter())), "later": figures(sum(later, Counter()))}
    return found


def table(results: dict[str, Any]) -> str:
    """Return all results as text."""
    lines = []
    for load, by_arm in results.items():
        for arm, by_epoch in by_arm.items():
            for epoch, row in by_epoch.items():
                ratio = by_arm[WITHOUT][epoch]["decode_steps"] / row["decode_steps"]
                lines.append(
                    f"{load:26s} {arm:24s} {epoch:8s} {row['tokens_per_step']:6.2f} tokens a step  "
                    f"{row['decode_steps']:6,.0f} decode steps ({ratio:.2f}x)  {row['drafted']:8,.0f} drafted  "
                    f"{row['acceptance']:4.0%} accepted"
                )
    return "\n".join(lines)


def main() -> None:
    """Replay and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("rehearsal.json"))
    chosen = parser.parse_args()
    loads = {name_of(path): read_trace(path) for path in TRACES}
    loads |= {task: made(task) for task in TASKS}
    results = {name: compared(steps) for name, steps in loads.items()}
    chosen.out.write_text(json.dumps({"kind": "simulated", "loads": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
