"""Do two versions of the drafter draft the same? Every token, probability and cut, on recorded runs and random cases.

    python benchmarks/same_drafts.py --against CHECKOUT --cases 10000

Each version runs in a process of its own, with its own package, and prints a digest for each case. The digest covers
draft indexes, all drafts with their probabilities and sources, a planner's cuts, and windows. A recorded case is the
replay of a trace (replay.py) by one set of rules. A random case is a few steps of a few samples of a few prompts, with
random texts, settings, histories, arrivals and verdicts. Fails with the first cases that differ. Versions that read
whole texts (before the compiled core was C++) are given them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import replay

from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES, HistoryDrafter, Verified
from rhyme_openrlhf.drafting.planner import DraftPlanner
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

# Of the random cases these, as shares: large batches, long texts in which memory grows, and a planner.
LARGE, LONG, PLANNED = 0.01, 0.03, 0.5


class Watched:
    """A drafter of either version, that is given whole texts and keeps a digest of all that it says."""

    def __init__(self, settings: HistoSpecSettings, ms_a_row: float | None = None) -> None:
        self.digest = hashlib.sha256()
        self._drafter: Any = HistoryDrafter(settings)
        self._old = not hasattr(self._drafter, "append")
        self._known: dict[str, int] = {}
        self._watch()
        if ms_a_row is not None:
            points = tuple(
                StepPoint(b, b * each, b * d, 0.010 + ms_a_row / 1000 * (b + b * d), 0.0, 9)
                for b in (1, 64)
                for each in (16, 1024)
                for d in (0, 1, 31)
            )
            model = StepModel(Profile(Subject("m", "h", "d", 1), "measured", points))
            if hasattr(self._drafter, "plan_by"):
                self._drafter.plan_by(Predictor(model))
            else:
                self._drafter.plan_with(DraftPlanner(Predictor(model), len(SOURCE_NAMES)))

    def _watch(self) -> None:
        """Have the digest of what is proposed before anything is cut."""
        of = self._drafter._texts if self._old else self._drafter
        propose, name = (of.draft, "draft") if self._old else (of.propose, "propose")

        def watched(*arguments: Any, **named: Any) -> Any:
            drafts = propose(*arguments, **named)
            of_drafts = drafts.lengths, drafts.sources, drafts.matches, drafts.recents
            for array in (*of_drafts, drafts.flat, drafts.confidences):
                self.digest.update(array.tobytes())
            return drafts

        setattr(of, name, watched)

    def install(self, key: str, pieces: list[Piece]) -> None:
        buffer = build_index(pieces)
        self.digest.update(buffer.tobytes())
        self._drafter.install(key, buffer)

    def forget(self, key: str) -> None:
        self._drafter.forget(key)

    def start(self, name: str, key: str, prompt: list[int], most: int, window: int | None = None) -> None:
        if self._old:
            self._drafter.start(name, key, len(prompt), most, window)
        else:
            self._drafter.start(name, key, prompt, len(prompt), most, window)
            self._known[name] = len(prompt)

    def draft(self, names: list[str], texts: list[list[int]], most: int) -> list[list[int]]:
        context = max(sum(map(len, texts)) - len(texts), 0)
        if self._old:
            drafts = self._drafter.draft(names, texts, context, most)
        else:
            new = [text[self._known[name] :] for name, text in zip(names, texts, strict=True)]
            self._known.update({name: len(text) for name, text in zip(names, texts, strict=True)})
            self._drafter.append(names, new)
            drafts = self._drafter.draft(names, context, most)
            self._drafter.computing()
        self.digest.update(json.dumps([drafts, self._drafter.decision]).encode())
        found: list[list[int]] = drafts
        return found

    def verified(self, names: list[str], drafted: list[int], accepted: list[int]) -> list[int]:
        came = self._drafter.verified(Verified(names, np.array(drafted), np.array(accepted)))
        said = [list(map(int, came.sources)), came.numbers.tolist(), list(map(int, came.accepted))]
        self.digest.update(json.dumps([said, [self._drafter.window(name) for name in names]]).encode())
        return said[0]

    def finish(self, name: str) -> None:
        self._drafter.finish(name)
        self._known.pop(name, None)

    def result(self) -> str:
        return self.digest.hexdigest()[:16]


class Replayed:
    """A watched drafter as replay.py has one."""

    def __init__(self, watched: Watched, rollouts: int) -> None:
        self._watched = watched
        self._rollouts = rollouts
        self._kept: dict[str, list[Piece]] = {}

    def begin(self, samples: list[replay.Sample]) -> None:
        for sample in samples:
            most = len(sample.context) + len(sample.response)
            self._watched.start(sample.name, sample.prompt_key, sample.context, most)

    def draft(self, running: list[replay.Sample]) -> list[list[int]]:
        return self._watched.draft([sample.name for sample in running], [sample.text for sample in running], 512)

    def verified(self, sample: replay.Sample, drafted: int, accepted: int) -> str:
        if not drafted:
            return ""
        return SOURCE_NAMES[self._watched.verified([sample.name], [drafted], [accepted])[0]]

    def finished(self, sample: replay.Sample) -> None:
        self._watched.finish(sample.name)

    def learn(self, records: list[Any]) -> None:
        for record in records:
            before = self._kept.get(record.prompt_key, [])
            kept = [*before, *record.pieces][-self._rollouts * len(record.pieces) :]
            self._kept[record.prompt_key] = kept
            self._watched.install(record.prompt_key, kept)


def recorded(path: Path, ms_a_row: float | None) -> str:
    """Return the digest of a replay."""
    watched = [Watched(HistoSpecSettings(), ms_a_row) for _ in range(replay.ENGINES)]
    totals = replay.replay(replay.read_trace(path), [Replayed(one, 2) for one in watched])
    return " ".join([*(one.result() for one in watched), str(sum(total["accepted"] for total in totals))])


def random_settings(rng: random.Random) -> HistoSpecSettings:
    """Return any that are allowed."""
    longest = rng.choice([1, 2, 3, 7, 16, 16, 32])
    most = rng.choice([1, 4, 8, 32, 32, 128])
    return HistoSpecSettings(
        prefix_max=longest,
        prefix_min=rng.randint(1, min(longest, 4)),
        window_max=most,
        window_start=rng.randint(1, min(most, 6)),
        window_step=rng.randint(0, 4),
        extend_confidence=rng.choice([0.01, 0.3, 0.7, 0.7, 1.0]),
        stop_confidence=rng.choice([0.0, 0.3, 0.5, 0.5, 1.0]),
        siblings=rng.random() < 0.8,
        own_output=rng.random() < 0.8,
    )


def random_case(seed: int) -> str:
    """Return the digest of one random case; which it is, only the seed says."""
    rng = random.Random(seed)
    kind = rng.random()
    samples = rng.randint(200, 500) if kind < LARGE else rng.randint(1, 12)
    long = LARGE <= kind < LARGE + LONG
    steps, prompts = rng.randint(2, 14), rng.randint(1, 4 if samples < 20 else 40)
    vocabulary = rng.choice([2, 3, 5, 50, 5000, 2**31 - 1])
    watched = Watched(random_settings(rng), rng.choice([0.01, 0.3, 3.0]) if rng.random() < PLANNED else None)

    def text(most: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(0, most))]

    bases = [text(3000 if long else 60) + [0] for _ in range(prompts)]

    def variant(base: list[int]) -> list[int]:
        """Return the base with a few tokens changed, from somewhere on."""
        changed = [rng.randrange(vocabulary) if rng.random() < 0.05 else token for token in base]
        return changed[rng.randrange(len(changed)) // 3 :] * rng.choice([1, 1, 2])

    def history(prompt: int) -> list[Piece]:
        rewards = rng.choice([[0.0, 1.0], [1.0], [-1.0, 0.25, 3.5, float("nan")]])
        return [
            Piece(bases[prompt][: rng.randint(0, 3)], variant(bases[prompt]), rng.choice(rewards))
            for _ in range(rng.choice([0, 1, 2, 8, 40]))
        ]

    running: dict[str, tuple[int, list[int], list[int]]] = {}
    begun = 0
    for _ in range(steps):
        for prompt in range(prompts):
            if rng.random() < 0.2:
                watched.install(f"p{prompt}", history(prompt))
            if rng.random() < 0.05:
                watched.forget(f"p{prompt}")
        while len(running) < samples and (not running or rng.random() < 0.9):
            name, prompt = f"s{begun}", int(rng.random() ** 2 * prompts)
            begun += 1
            full = bases[prompt][:3] + variant(bases[prompt]) * (4 if long else 1)
            given = min(rng.randint(0, 5), len(full))
            watched.start(name, f"p{prompt}", full[:given], rng.choice([given + 5, len(full), 5 * len(full)]))
            running[name] = prompt, full[:given], full
        for _, (_, known, full) in running.items():
            size = rng.choice([0, 1, 2, 3, 8, 20, 1500 if long else 70])
            known += full[len(known) : len(known) + size]
        asked = [name for name in running if rng.random() < 0.9] or [*running][:1]
        rng.shuffle(asked)
        drafts = watched.draft(asked, [running[name][1] for name in asked], rng.choice([4, 100, 10000]))
        judged = [(name, len(draft)) for name, draft in zip(asked, drafts, strict=True) if draft and rng.random() < 0.9]
        if judged:
            accepted = []
            for name, size in judged:
                _, known, full = running[name]
                draft, hits = drafts[asked.index(name)], 0
                while hits < size and full[len(known) + hits : len(known) + hits + 1] == [draft[hits]]:
                    hits += 1
                accepted.append(hits)
                known += full[len(known) : len(known) + hits + 1]
            watched.verified([name for name, _ in judged], [size for _, size in judged], accepted)
        for name in [name for name in running if rng.random() < 0.1]:
            watched.finish(name)
            del running[name]
    return watched.result()


def results(cases: int, first: int) -> dict[str, str]:
    """Return the digests of this process's package."""
    found = {f"random {seed}": random_case(seed) for seed in range(first, first + cases)}
    for path in replay.TRACES:
        for ms_a_row in (None, 0.3):
            found[f"{path.name}, {'rules' if ms_a_row is None else 'planned'}"] = recorded(path, ms_a_row)
    return found


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first random case")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        np.seterr(all="raise")
        print("RESULT " + json.dumps(results(chosen.cases, chosen.first)))
        return
    if chosen.against is None:
        parser.error("--against: give another checkout of this repository to compare with")
    here = Path(__file__).resolve().parent
    digests = []
    for checkout in (here.parent, chosen.against.resolve()):
        command = [sys.executable, "-P", __file__, "--one", "--cases", str(chosen.cases), "--first", str(chosen.first)]
        paths = os.pathsep.join([str(checkout), str(here)])
        digests.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE))
    both = []
    for process in digests:
        output, _ = process.communicate()
        lines = [line for line in output.decode().splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit("a version failed; what it wrote stands above")
        both.append(json.loads(lines[-1][len("RESULT ") :]))
    now, before = both
    different = [case for case in now if now[case] != before[case]]
    print(f"{len(now)} cases, {len(different)} differ")
    if different:
        raise SystemExit(f"the first that differ: {different[:10]}")


if __name__ == "__main__":
    main()
