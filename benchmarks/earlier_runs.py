"""Drafts from earlier runs: tokens a decode step in replays, and what it costs to find their responses. No model.

    python benchmarks/earlier_runs.py --parts replay      # tokens a step by epoch (simulated)
    python benchmarks/earlier_runs.py --parts scan        # 10,000 prompts x 20 runs: seconds and memory (measured)

A replay (replay.py) runs through what a history worker does: archives of other recorded runs, the choice of responses,
the judgement of runs after each step. The arms:

- `cold`: this run's own history alone.
- `one`, `two`: with one or two other runs of the same prompts.
- `half`: with one other run, which has half of the prompts.
- `other task`: with a run of other prompts.
- `poisoned`: with a run whose responses begin like the real ones after any two tokens, and go on wrongly.
- `halves`: SmolLM2's run, two samples of each prompt from the other two.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from made_tasks import made
from replay import ENGINES, REAL_TRACE, TRACES, Ours, epochs_of, name_of, read_trace, rollout

from rhyme_openrlhf.history.archive import About, Archive, ArchiveWriter, read_archive
from rhyme_openrlhf.history.earlier import EarlierRuns, Sources
from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import Record, encode
from rhyme_openrlhf.history.shard import HistoryShard
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.history import HistorySettings

PARTS = ["replay", "scan"]
LIMIT = 10**10
VOCABULARY = 2**31 - 1
MOST_TOKENS = 10**7
# Of the part "scan".
PROMPTS, RUNS, SAMPLES, LENGTH = 10_000, 20, 16, 300
Steps = list[list[Record]]


class FromWorker(Ours):
    """Our drafter, which gets its indexes from a history worker's parts."""

    def install(self, key: str, index: np.ndarray | None) -> None:
        """Draft for a prompt from this index."""
        if index is not None:
            self._drafter.install(key, index)
        else:
            self._drafter.forget(key)

    def learn(self, records: list[Record]) -> None:
        """Learn nothing here: the worker does."""


def written(folder: Path, name: str, records: Sequence[Record], started: float) -> Archive:
    """Write the archive of a run."""
    lengths = (replace(record, lengths=tuple(len(piece.tokens) for piece in record.pieces)) for record in records)
    return written_as(folder, name, map(encode, lengths), started)


def written_as(folder: Path, name: str, encoded: Iterable[bytes], started: float) -> Archive:
    """Write the archive of a run whose records are encoded."""
    writer = ArchiveWriter(folder / name, About(name, "a tokenizer", "", started), 0, LIMIT)
    for one in encoded:
        writer.add(one)
    writer.close()
    return read_archive(folder / name)


def replayed(steps: Steps, archives: Sequence[Archive], engines: int, say: Callable[[str], None]) -> list[Counter[str]]:
    """Return each epoch's totals of a run that drafts from these archives too."""
    drafters = [FromWorker(HistoSpecSettings()) for _ in range(engines)]
    shard = HistoryShard(HistorySettings().rollouts)
    earlier = EarlierRuns(Sources(tuple(archives), vocabulary=VOCABULARY), lambda _: True, MOST_TOKENS, say)
    earlier.refresh()
    epochs: list[Counter[str]] = []
    for epoch, records in zip(epochs_of(steps), steps, strict=True):
        if epoch > len(epochs):
            epochs.append(Counter())
        for record in records:
            key = record.prompt_key
            index = shard.build(key, earlier.pieces(earlier.choose(key, shard.visits(key))))
            for drafter in drafters:
                drafter.install(key, index)
        for engine, drafter in enumerate(drafters):
            rollout(drafter, records[engine::engines], epochs[-1])
        for record in records:
            earlier.judge(record.prompt_key, shard.visits(record.prompt_key), record.pieces)
        for record in records:
            lengths = [len(piece.tokens) for piece in record.pieces]
            shard.record(record.prompt_key, record.rollout_id, record.pieces, lengths)
    return epochs


def poisoned(records: Sequence[Record]) -> list[Record]:
    """Return responses that go on wrongly after any two tokens of the real ones."""

    def wrong(piece: Piece) -> Piece:
        tokens = [int(token) for token in piece.tokens]
        others = tokens[:]
        random.Random(1).shuffle(others)
        bad = [new for at in range(len(tokens) - 1) for new in (*tokens[at : at + 2], others[at])]
        return Piece(piece.context, bad, piece.reward)

    return [replace(record, pieces=tuple(map(wrong, record.pieces))) for record in records]


def flat(steps: Steps) -> list[Record]:
    """Return the records of all steps."""
    return list(itertools.chain.from_iterable(steps))


def replays(folder: Path) -> None:
    """Print tokens a step, with drafted tokens, by epoch."""
    runs = {name_of(path): read_trace(path) for path in TRACES}
    archives = {name: written(folder, name, flat(steps), at) for at, (name, steps) in enumerate(runs.items())}
    other = written(folder, "other task", flat(made("reasoning")), 9.0)
    for name, steps in runs.items():
        others = [archive for of, archive in archives.items() if of != name]
        first = next(of for of in runs if of != name)
        keys = sorted({record.prompt_key for record in flat(runs[first])})
        half = [record for record in flat(runs[first]) if record.prompt_key in keys[::2]]
        arms = {
            "cold": [],
            "one": others[:1],
            "two": others,
            "half": [written(folder, f"half for {name}", half, 1.0)],
            "other task": [other],
            "poisoned": [written(folder, f"poisoned for {name}", poisoned(flat(runs[first])), 1.0)],
        }
        for arm, chosen in arms.items():
            show(name, arm, steps, chosen, ENGINES)
    real = read_trace(REAL_TRACE)
    halves = [
        [[replace(record, pieces=record.pieces[begin : begin + 2]) for record in records] for records in real]
        for begin in (0, 2)
    ]
    show(name_of(REAL_TRACE), "half, cold", halves[1], [], 1)
    show(name_of(REAL_TRACE), "halves", halves[1], [written(folder, "half of smollm2", flat(halves[0]), 1.0)], 1)


def show(run: str, arm: str, steps: Steps, archives: Sequence[Archive], engines: int) -> None:
    """Print a replay's line."""
    said: list[str] = []
    epochs = replayed(steps, archives, engines, said.append)
    figures = "  ".join(f"{total['tokens'] / total['samples']:6.2f} ({total['drafted']:6,})" for total in epochs)
    print(f"{run:24s} {arm:12s} {figures}", *said, sep="\n    " if said else "", flush=True)


def scan(folder: Path) -> None:
    """Print what a worker needs to find 10,000 prompts of 20 runs, and to choose and read one prompt's responses."""
    keys = [prompt_key(str(number)) for number in range(PROMPTS)]
    chance = np.random.default_rng(1)
    pieces = tuple(Piece([1, 2], chance.integers(0, 50_000, LENGTH), 1.0) for _ in range(SAMPLES))
    # The same responses under each prompt's key, because packing takes most of the time.
    one = encode(Record(keys[0], 1, pieces, (LENGTH,) * SAMPLES))
    archives = [
        written_as(folder, f"run {number}", (one.replace(keys[0].encode(), key.encode(), 1) for key in keys), number)
        for number in range(RUNS)
    ]
    size = sum(sum(archive.sizes.values()) for archive in archives)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    earlier = EarlierRuns(Sources(tuple(archives), vocabulary=VOCABULARY), lambda _: True, MOST_TOKENS, print)
    earlier.refresh()
    found = time.perf_counter() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    started = time.perf_counter()
    again = time.perf_counter()
    earlier.refresh()
    again = time.perf_counter() - again
    started = time.perf_counter()
    known = earlier.known(keys)
    told = time.perf_counter() - started
    shard = HistoryShard()
    started = time.perf_counter()
    for key in keys[:100]:
        shard.build(key, earlier.pieces(earlier.choose(key, 0)))
    built = (time.perf_counter() - started) / 100
    print(
        f"{RUNS} archives, {PROMPTS:,} prompts each, {size / 1e9:.2f} GB: found in {found:.2f} s, {grown / 1e3:.0f} MB "
        f"of memory (its own estimate: {earlier.data_bytes / 1e6:.0f} MB); looked at again in {1000 * again:.1f} ms; "
        f"{len(known)} runs known in {told:.2f} s; a prompt's index from two runs in {1000 * built:.1f} ms"
    )


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rhyme-earlier-runs-") as folder:
        for part, measure in (("replay", replays), ("scan", scan)):
            if part in chosen.parts:
                measure(Path(folder))


if __name__ == "__main__":
    main()
