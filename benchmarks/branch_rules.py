"""The best child of a branch to follow: several rules, by exact replay of recorded runs (benchmarks/replay.py).

    python benchmarks/branch_rules.py [TRACE ...]

Simulated. An index follows the child with the greatest sum of weights, then counts (history/index.py). A rule gives
each response a weight: its reward, its advantage within its prompt's group, or 1 with a share of them. A response of
the rollout before the last weighs less. The table has, for each
rule and trace and all epochs but the first, the tokens gained per sample and decode step and the engines' decode steps.
Beside them are the drafted tokens and the share of them that is accepted.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from replay import ENGINES, TRACES, Ours, read_trace, replay

from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

# What a response weighs: of its reward, its reward less its group's mean, and how many rollouts ago it was.
Rule = Callable[[float, float, int], float]
RULES: dict[str, Rule] = {
    "reward": lambda reward, advantage, age: reward,
    "counts": lambda reward, advantage, age: 0.0,
    "advantage": lambda reward, advantage, age: advantage,
    "1 + reward": lambda reward, advantage, age: 1 + reward,
    "1 + advantage": lambda reward, advantage, age: 1 + advantage,
    "older: a quarter": lambda reward, advantage, age: 0.25**age,
    "1 + advantage, older: a quarter": lambda reward, advantage, age: (1 + advantage) * 0.25**age,
}


class ByRule(Ours):
    """Our drafter with responses weighed by a rule."""

    def __init__(self, rule: Rule, rollouts: int) -> None:
        super().__init__(HistoSpecSettings(shared_tokens=0), rollouts=rollouts)
        self._rule = rule
        self._groups: dict[str, list[tuple[Piece, ...]]] = {}

    def learn(self, records: list[Record]) -> None:
        for record in records:
            groups = [*self._groups.get(record.prompt_key, []), record.pieces][-self._rollouts :]
            self._groups[record.prompt_key] = groups
            weighed = [
                replace(piece, reward=self._rule(piece.reward, piece.reward - mean, len(groups) - 1 - number))
                for number, group in enumerate(groups)
                for mean in [statistics.fmean(each.reward for each in group)]
                for piece in group
            ]
            assert all(math.isfinite(piece.reward) for piece in weighed)
            self._drafter.install(record.prompt_key, build_index(weighed))


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*", default=TRACES)
    parser.add_argument("--rollouts", type=int, default=2, help="rollouts of a prompt that its index covers")
    chosen = parser.parse_args()
    for path in chosen.traces:
        steps = read_trace(path)
        print(f"\n{path.name}: tokens a step, decode steps, drafted, accepted")
        for name, rule in RULES.items():
            epochs = replay(steps, [ByRule(rule, chosen.rollouts) for _ in range(ENGINES)])
            total = sum(epochs[1:], Counter[str]())
            print(
                f"{name:34s}{total['tokens'] / total['samples']:8.3f}{total['steps']:8,d}{total['drafted']:10,d}"
                f"{total['accepted'] / total['drafted']:8.1%}"
            )


if __name__ == "__main__":
    main()
