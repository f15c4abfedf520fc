"""Replays a recorded run offline: which drafts would have been accepted, had this drafter proposed them?

What a sample says does not depend on drafts, so a recorded run tells for any drafter how many tokens each decode step
would have yielded. Samples of one engine decode in step with each other, as they do in a run, so a sample sees of its
siblings what it would see there.

A trace is xz-compressed JSON lines, one for each prompt and training step, in order: {"step", "prompt" (its key),
"context" (the prompt's last tokens), "rewards": [...], "responses": [[token, ...], ...]}. TRACE is the run of
`benchmarks/rollout.py` (arm "on", seed 1): 12 prompts, 16 samples each, two steps an epoch, two engines. Beside it are
one of seed 3, not reproducible and with drafts from all sources, and one of four epochs. REAL_TRACE is a real model's:
SmolLM2-135M-Instruct answers 16 problems of reasoning-gym in steps, 4 samples each, three epochs of four steps, on one
engine.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES, HistoryDrafter, Verified
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.history.journal import HEADER, NO_RUN, read_entries
from rhyme_openrlhf.history.record import Record, decode
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

TRACE = Path(__file__).parent / "data" / "embedded-6-epochs.jsonl.xz"
# All of the embedded model, whose runs had this many engines and steps an epoch.
TRACES = tuple(sorted(TRACE.parent.glob("embedded-*.jsonl.xz")))
ENGINES = 2
STEPS_PER_EPOCH = 2
REAL_TRACE = TRACE.with_name("smollm2-3-epochs.jsonl.xz")


def name_of(path: Path) -> str:
    """Return the name of a trace in tables."""
    return path.name.removesuffix(".jsonl.xz")


def read_trace(path: Path) -> list[list[Record]]:
    """Return the records of each training step, in order."""
    by_step: dict[int, list[Record]] = defaultdict(list)
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        row = json.loads(line)
        both = zip(row["responses"], row["rewards"], strict=True)
        pieces = tuple(Piece(row["context"], tokens, reward) for tokens, reward in both)
        by_step[row["step"]].append(Record(row["prompt"], row["step"], pieces))
    return [by_step[number] for number in sorted(by_step)]


def read_journal(path: Path) -> list[Record]:
    """Return all records of a run's `history/worker-N.journal`, for any run. Raises JournalError, OSError."""
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    owner = HEADER.unpack(header)[-1] if len(header) == HEADER.size else NO_RUN
    return [decode(encoded) for encoded, _ in read_entries(path, owner)]


def write_trace(records: list[Record], path: Path) -> None:
    """Make a trace of the records of a run's journal (history/journal.py), whose prompts have one turn each."""
    lines = []
    for record in records:
        pieces = record.pieces
        row = {"step": record.rollout_id, "prompt": record.prompt_key, "context": _ints(pieces[0].context)}
        row |= {"rewards": [piece.reward for piece in pieces], "responses": [_ints(piece.tokens) for piece in pieces]}
        lines.append(json.dumps(row, separators=(",", ":")) + "\n")
    path.write_bytes(lzma.compress("".join(lines).encode(), preset=9))


def epochs_of(steps: Iterable[list[Record]]) -> Iterator[int]:
    """Yield the epoch of each training step, from 1 on. An epoch begins where a prompt of the last one comes again."""
    epoch, seen = 1, set[str]()
    for records in steps:
        prompts = {record.prompt_key for record in records}
        if seen & prompts:
            epoch, seen = epoch + 1, set()
        seen |= prompts
        yield epoch


@dataclass
class Sample:
    """One response as it is decoded: `text` so far (from the context on), `response`, and how much of it there is."""

    name: str
    prompt_key: str
    context: list[int]
    response: list[int]
    text: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def room(self) -> int:
        """A draft of n tokens yields up to n + 1."""
        return len(self.response) - self.done - 1


class Drafter(Protocol):
    """A drafter that can be replayed."""

    def begin(self, samples: list[Sample]) -> None:
        """Begin these samples of one engine (their first token is there)."""

    def draft(self, running: list[Sample]) -> list[list[int]]:
        """Return a draft for each."""

    def verified(self, sample: Sample, drafted: int, accepted: int) -> str:
        """Learn the verdict on the sample's draft; return its source, if it is known."""

    def finished(self, sample: Sample) -> None:
        """End the sample, which is complete."""

    def learn(self, records: list[Record]) -> None:
        """End the training step, whose rollouts these are."""


class Ours:
    """Our drafter. `with_rewards` False: all rewards are 0, so that counts choose the branch.

    `rollouts`: how many of a prompt's last ones its index covers (--history.rollouts); 0: no history.
    """

    def __init__(self, settings: HistoSpecSettings, with_rewards: bool = True, rollouts: int = 1) -> None:
        self._drafter = HistoryDrafter(settings)
        self._with_rewards = with_rewards
        self._rollouts = rollouts
        self._kept: dict[str, list[Piece]] = {}
        # How much of each sample's text the drafter has.
        self._told: dict[str, int] = {}

    def begin(self, samples: list[Sample]) -> None:
        for sample in samples:
            most = len(sample.context) + len(sample.response)
            self._drafter.start(sample.name, sample.prompt_key, sample.context, len(sample.context), most)
            self._told[sample.name] = len(sample.context)

    def draft(self, running: list[Sample]) -> list[list[int]]:
        names = [sample.name for sample in running]
        self._drafter.append(names, [sample.text[self._told[sample.name] :] for sample in running])
        self._told.update({sample.name: len(sample.text) for sample in running})
        drafts = self._drafter.draft(names, sum(len(sample.text) for sample in running))
        self._drafter.computing()
        return drafts

    def verified(self, sample: Sample, drafted: int, accepted: int) -> str:
        if not drafted:
            return ""
        return SOURCE_NAMES[self._drafter.verified(Verified.of([sample.name], [drafted], [accepted])).sources[0]]

    def finished(self, sample: Sample) -> None:
        self._drafter.finish(sample.name)
        del self._told[sample.name]

    def learn(self, records: list[Record]) -> None:
        for record in records if self._rollouts else ():
            pieces = [piece if self._with_rewards else replace(piece, reward=0.0) for piece in record.pieces]
            before = self._kept.get(record.prompt_key, [])
            kept = [*before, *pieces][-self._rollouts * len(pieces) :]
            self._kept[record.prompt_key] = kept
            self._drafter.install(record.prompt_key, build_index(kept))


def samples_of(record: Record) -> Iterator[Sample]:
    """Yield the record's samples, each with its first token (which comes from prefill)."""
    for number, piece in enumerate(record.pieces):
        context, response = _ints(piece.context), _ints(piece.tokens)
        if response:
            name = f"{record.rollout_id}-{record.prompt_key}-{number}"
            yield Sample(name, record.prompt_key, context, response, [*context, response[0]], 1)


def _ints(tokens: Piece | object) -> list[int]:
    return [int(token) for token in tokens]  # type: ignore[attr-defined]


def replay(steps: list[list[Record]], drafters: list[Drafter]) -> list[Counter[str]]:
    """Return each epoch's totals, over all engines (one drafter each).

    steps: decode steps; samples: sums of the samples in them; tokens: what came out; drafted, accepted; and the
    accepted tokens by source.
    """
    epochs: list[Counter[str]] = []
    for epoch, records in zip(epochs_of(steps), steps, strict=True):
        if epoch > len(epochs):
            epochs.append(Counter())
        for engine, drafter in enumerate(drafters):
            rollout(drafter, records[engine :: len(drafters)], epochs[-1])
        for drafter in drafters:
            drafter.learn(records)
    return epochs


def rollout(drafter: Drafter, records: list[Record], total: Counter[str]) -> None:
    """Replay what one engine generates in a training step, and add it to the totals."""
    running = [sample for record in records for sample in samples_of(record)]
    drafter.begin(running)
    running = _without_finished(drafter, running)
    while running:
        drafts = drafter.draft(running)
        total["steps"] += 1
        for sample, draft in zip(running, drafts, strict=True):
            kept = draft[: sample.room]
            accepted = 0
            while accepted < len(kept) and kept[accepted] == sample.response[sample.done + accepted]:
                accepted += 1
            source = drafter.verified(sample, len(kept), accepted)
            total.update(samples=1, tokens=accepted + 1, drafted=len(kept), accepted=accepted)
            total[f"from {source}"] += accepted
            sample.text += sample.response[sample.done : sample.done + accepted + 1]
            sample.done += accepted + 1
        running = _without_finished(drafter, running)


def _without_finished(drafter: Drafter, running: list[Sample]) -> list[Sample]:
    for sample in running:
        if sample.done >= len(sample.response):
            drafter.finished(sample)
    return [sample for sample in running if sample.done < len(sample.response)]
