"""Quality of decisions on when to go on with more tensor parallelism. Recorded stages, replayed offline.

    python benchmarks/switch_decisions.py                                  # the recorded runs beside this file
    python benchmarks/switch_decisions.py --runs RUN_DIRECTORY ... --stretch 1
    python benchmarks/switch_decisions.py --profiles tp1.json tp2.json --devices 2

A stage is a recorded step whose prompts were seen before. It holds the lengths of its responses, and the policy's
knowledge: the lengths of the same prompts' last responses. Engines are given prompts as in a run, and their steps take
the times of their profile. The default profiles are the two derived from PAT's print of eight A40: four engines of TP
2, one of TP 8. The policy decides as often as in a run.

Its peers are staying, and the best single switch of all. The best one is found by trying every moment at which a sample
ends or the policy could have decided. Lengths can be stretched, because the recorded task has at most 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from replay import read_trace

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.scheduling.stage_course import Layout, Unfinished
from rhyme_openrlhf.scheduling.step_plan import assign
from rhyme_openrlhf.scheduling.tp_switch import EACH_SECONDS, SwitchCost, decide, in_turn
from rhyme_openrlhf.settings.tp_switch import BY_HISTORY, BY_MAXIMUM, TpSwitchSettings
from rhyme_openrlhf.simulation.engine_kinds import load
from rhyme_openrlhf.simulation.trace import read_trace as read_lengths

DATA = Path(__file__).parent / "data"
RECORDED = ("embedded-4-epochs", "embedded-6-epochs", "embedded-6-epochs-seed-3")
PROMPT_TOKENS = 32
# Step times are linear in the context between profiled points, so this many evaluations suffice for a stretch with one
# number of samples.
LOOKS = 9
RULES = (BY_HISTORY, BY_MAXIMUM)


@dataclass(frozen=True)
class Response:
    """One sample of a stage. `earlier`: lengths of its prompt's last responses."""

    prompt: int
    prompt_tokens: int
    length: int
    earlier: tuple[int, ...]


Stage = list[Response]


def dealt(stage: Stage, engines: int) -> list[Stage]:
    """Return each engine's prompts, dealt out as in a run, by their last responses."""
    prompts = {one.prompt: one.earlier for one in stage}
    means = [statistics.fmean(earlier) if earlier else None for earlier in prompts.values()]
    chosen = dict(zip(prompts, assign(means, [0.0] * engines), strict=True))
    return [[one for one in stage if chosen[one.prompt] == engine] for engine in range(engines)]


def steps_seconds(model: StepModel, contexts: Sequence[int], lengths: Sequence[int]) -> NDArray[np.float64]:
    """Return the end of each step of an engine whose samples have these contexts and this many tokens to come.

    The first entry, 0, is its beginning.
    """
    ends = sorted(set(lengths))
    pieces, first = [np.zeros(1)], 0
    for end in ends:
        alive = [context for context, length in zip(contexts, lengths, strict=True) if length >= end]
        known = np.unique(np.linspace(first, end - 1, LOOKS).round())
        at = [model.seconds(len(alive), round(sum(alive) + len(alive) * token), 0) for token in known]
        pieces.append(np.interp(np.arange(first, end), known, at))
        first = end
    return np.cumsum(np.concatenate(pieces))


class Replay:
    """One stage under the aligned layout, and what becomes of it when it is switched at some moment."""

    def __init__(self, engines: Sequence[Stage], profiles: tuple[Profile, Profile], tails: int, each_s: float) -> None:
        """`engines`: what each aligned engine is given; `tails`: engines of the tail layout."""
        # As a run takes it before it has made a switch.
        self.cost = SwitchCost(each_s).between([TransferModel(profile) for profile in profiles])
        sizes = [profile.subject.tensor_parallel_size for profile in profiles]
        self._models = [StepModel(profile) for profile in profiles]
        self._tails = tails
        self.layouts = tuple(
            Layout(size, count, Predictor(model).step_seconds)
            for size, count, model in zip(sizes, (len(engines), tails), self._models, strict=True)
        )
        self._engines = engines
        self._clocks = [
            steps_seconds(self._models[0], [one.prompt_tokens for one in own], [one.length for one in own])
            for own in self._engines
        ]

    @property
    def seconds(self) -> float:
        """Return the seconds of the stage without a switch."""
        return max(float(clock[-1]) for clock in self._clocks)

    def ends(self) -> list[float]:
        """Return the times at which samples end without a switch."""
        both = zip(self._engines, self._clocks, strict=True)
        return sorted({float(clock[one.length]) for own, clock in both for one in own})

    def unfinished(self, moment: float) -> tuple[list[Unfinished], list[int], list[int]]:
        """Return the policy's view at that moment, each sample's real remainder, and the engine it is on."""
        seen, rest, engines = [], [], []
        for engine, (own, clock) in enumerate(zip(self._engines, self._clocks, strict=True)):
            done = bisect_right(clock, moment) - 1
            left = [one for one in own if one.length > done]
            engines += [engine] * len(left)
            seen += [Unfinished(done, one.prompt_tokens + done, one.earlier) for one in left]
            rest += [one.length - done for one in left]
        return seen, rest, engines

    def switched(self, moment: float) -> float:
        """Seconds of the stage with one switch then."""
        seen, rest, _ = self.unfinished(moment)
        if not seen:
            return self.seconds
        tails: list[list[int]] = [[] for _ in range(self._tails)]
        for place, engine in in_turn([sample.generated for sample in seen], self._tails):
            tails[engine].append(place)
        took = [
            steps_seconds(self._models[1], [seen[i].context for i in own], [rest[i] for i in own])[-1]
            for own in tails
            if own
        ]
        return moment + self.cost(0, 1, [sample.context for sample in seen]) + float(max(took))

    def asked(self, interval_s: float) -> list[float]:
        """Return the times at which a run decides."""
        return list(np.arange(interval_s, self.seconds, interval_s))

    def policy(self, rule: str, longest: int, interval_s: float) -> tuple[float, int]:
        """Seconds of the stage with the policy's switch, and how many samples it took with it (0: none)."""
        for moment in self.asked(interval_s):
            seen, _, engines = self.unfinished(moment)
            if seen and decide(0, self.layouts, seen, longest, self.cost, rule == BY_HISTORY, engines) is not None:
                return self.switched(moment), len(seen)
        return self.seconds, 0

    def best(self, interval_s: float) -> float:
        """Seconds of the stage with the best single switch, or none."""
        return min(self.seconds, *map(self.switched, {0.0, *self.ends(), *self.asked(interval_s)}))


def recorded(name: str) -> list[list[tuple[str, int, list[int]]]]:
    """Prompts of each step of a recorded run: key, tokens, response lengths."""
    return [
        [(one.prompt_key, PROMPT_TOKENS, [len(piece.tokens) for piece in one.pieces]) for one in step]
        for step in read_trace(DATA / f"{name}.jsonl.xz")
    ]


def of_run(directory: Path) -> list[list[tuple[str, int, list[int]]]]:
    """Return the same of a run directory's `lengths.jsonl`."""
    return [
        [(str(one.prompt), one.prompt_tokens, list(one.lengths)) for one in step.prompts]
        for step in read_lengths(directory / "lengths.jsonl").steps
    ]


def stages(steps: list[list[tuple[str, int, list[int]]]], stretch: int, together: int) -> list[Stage]:
    """Stages whose prompts have all been seen before; `together` steps make one."""
    known: dict[str, tuple[int, ...]] = {}
    found = []
    for begin in range(0, len(steps) - together + 1, together):
        prompts = [prompt for step in steps[begin : begin + together] for prompt in step]
        if all(key in known for key, _, _ in prompts):
            found.append(
                [
                    Response(number, tokens, length * stretch, known[key])
                    for number, (key, tokens, lengths) in enumerate(prompts)
                    for length in lengths
                ]
            )
        known |= {key: tuple(length * stretch for length in lengths) for key, _, lengths in prompts}
    return found


def compare(found: list[Stage], profiles: tuple[Profile, Profile], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of all stages: as they are, with each rule, with the best switch; and each rule against the best."""
    longest = max(one.length for stage in found for one in stage)
    rows = []
    for stage in found:
        engines, tails = (options.devices // profile.subject.tensor_parallel_size for profile in profiles)
        replay = Replay(dealt(stage, engines), profiles, tails, options.each)
        row: dict[str, Any] = {"without": replay.seconds, "best": replay.best(options.interval)}
        for rule in RULES:
            row[rule], row[f"{rule}_samples"] = replay.policy(rule, longest, options.interval)
        rows.append(row)
    total = {arm: sum(row[arm] for row in rows) for arm in ("without", "best", *RULES)}
    return {
        "stages": len(rows), "samples": len(found[0]), "seconds": total, "rows": rows,
        **{
            rule: {
                "gain": total["without"] / total[rule], "over_best": total[rule] / total["best"],
                "worst": max(row[rule] / row["best"] for row in rows),
                "switched": sum(row[f"{rule}_samples"] > 0 for row in rows),
            }
            for rule in RULES
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("switch-decisions.json"))
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="run directories instead of the recorded runs")
    parser.add_argument("--profiles", nargs="+", default=["pat-a40"], help="of two sizes; or a shipped name")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--stretch", type=int, nargs="+", default=[1, 16], help="times as many tokens as recorded")
    parser.add_argument("--together", type=int, default=1, help="recorded steps that make one stage")
    parser.add_argument("--each", type=float, default=EACH_SECONDS, help="seconds that a switch costs for each sample")
    parser.add_argument("--interval", type=float, default=TpSwitchSettings().status_s, help="seconds between two looks")
    options = parser.parse_args()
    by_size = load(options.profiles)
    sizes = sorted(by_size)
    if len(sizes) != 2 or options.devices % sizes[1]:
        parser.error(f"--profiles must be of two sizes that divide {options.devices} devices, got {sizes}")
    profiles = by_size[sizes[0]], by_size[sizes[1]]
    loads = {path.name: of_run(path) for path in options.runs} or {name: recorded(name) for name in RECORDED}
    found: dict[str, Any] = {"kind": "replayed", "profiles": options.profiles}
    print("| stages | x | samples | without | best switch | gain | history: of best, worst | maximum: of best, worst |")
    print("|---|---|---|---|---|---|---|---|")
    for name, steps in loads.items():
        for stretch in options.stretch:
            one = found[f"{name} x {stretch}"] = compare(stages(steps, stretch, options.together), profiles, options)
            seconds = one["seconds"]
            rules = " | ".join(f"{one[rule]['over_best']:.3f}, {one[rule]['worst']:.3f}" for rule in RULES)
            print(
                f"| {name}: {one['stages']} | {stretch} | {one['samples']} | {seconds['without']:.1f} s "
                f"| {seconds['best']:.1f} s | {one[BY_HISTORY]['gain']:.3f} | {rules} |", flush=True
            )  # fmt: skip
    options.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
