"""What one history worker keeps of its prompts: the responses of their last rollouts, and how long earlier ones were.

Invariants (RhymeRL, section 5.3: a prompt's index covers its last rollout):
- A prompt has the newest `rollouts` rollouts that were recorded (1 in the paper), and nothing else. Parts of the same
  rollout add up, an older one that arrives late changes nothing.
- What the newest rollout replaced is kept until a yet newer one begins: a training step that is never completed can
  be left out of a checkpoint (`encoded(up_to)`) without losing what its prompts had before.
- Of rollouts that are not kept, the median response length stays: the prompt's length history.
- Responses are kept encoded (history/record.py), about a byte a token: never on a disk alone, so never lost to one.

One caller at a time: nothing here locks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.history.record import (
    NO_ROLLOUT,
    Earlier,
    Record,
    RecordHead,
    encode,
    median_length,
    read_head,
    read_pieces,
)

# RhymeRL (section 6.2): training spans 50 to 100 epochs. 16 bytes each.
EARLIER_KEPT = 100


@dataclass(slots=True)
class _Rollout:
    """All recorded responses of one prompt in one rollout: `parts` are encoded records."""

    rollout_id: int
    parts: list[bytes] = field(default_factory=list)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    pieces: int = 0


@dataclass(slots=True)
class _Prompt:
    """`rollouts` oldest first; `earlier` as a flat row of (rollout id, median length) pairs."""

    rollouts: list[_Rollout] = field(default_factory=list)
    earlier: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class EpochLengths:
    """Of each of p prompts: its median length in its last rollout before an epoch, and its lengths in the epoch.

    `before` float64[p], `counts` int64[p], `lengths` int64[sum of counts]: prompt after prompt.
    """

    before: NDArray[np.float64]
    counts: NDArray[np.int64]
    lengths: NDArray[np.int64]


class HistoryShard:
    """The prompts that one history worker owns (RhymeRL, section 4.2)."""

    def __init__(self, rollouts: int = 1) -> None:
        self._kept_rollouts = rollouts
        self._prompts: dict[str, _Prompt] = {}
        self._newest_id = NO_ROLLOUT
        # Prompts that have one rollout more than is kept: the one that the newest has replaced.
        self._replaced: set[str] = set()
        self._data_bytes = 0

    def record(self, prompt_key: str, rollout_id: int, pieces: Sequence[Piece], lengths: Sequence[int]) -> bool:
        """Keep responses of a prompt; False if they are of an older rollout than the newest kept, and were ignored.

        See history/record.py. Raises ValueError for token ids out of range or a negative length, and then keeps what
        was kept before.
        """
        return self.add(encode(Record(prompt_key, rollout_id, tuple(pieces), tuple(lengths))))

    def add(self, encoded: bytes) -> bool:
        """`record` for a record that is encoded already."""
        head = read_head(encoded)
        if head.rollout_id == NO_ROLLOUT:
            return self._add_earlier(head)
        prompt = self._prompts.get(head.prompt_key)
        if prompt is not None and prompt.rollouts and head.rollout_id < prompt.rollouts[-1].rollout_id:
            return False
        if head.rollout_id > self._newest_id:
            self._newest_id = head.rollout_id
            self._forget_replaced()
        if prompt is None:
            prompt = self._prompts[head.prompt_key] = _Prompt()
        if not prompt.rollouts or head.rollout_id > prompt.rollouts[-1].rollout_id:
            prompt.rollouts.append(_Rollout(head.rollout_id))
            is_newest = head.rollout_id == self._newest_id
            self._trim(prompt, self._kept_rollouts + is_newest)
            if len(prompt.rollouts) > self._kept_rollouts:
                self._replaced.add(head.prompt_key)
        rollout = prompt.rollouts[-1]
        rollout.parts.append(encoded)
        rollout.lengths.extend(head.lengths)
        rollout.pieces += head.pieces
        self._data_bytes += len(encoded)
        return True

    def _add_earlier(self, head: RecordHead) -> bool:
        prompt = self._prompts.setdefault(head.prompt_key, _Prompt())
        if prompt.rollouts or prompt.earlier:
            return False
        for pair in head.earlier:
            prompt.earlier.extend(pair)
        return True

    def _forget_replaced(self) -> None:
        for key in self._replaced:
            self._trim(self._prompts[key], self._kept_rollouts)
        self._replaced.clear()

    def _trim(self, prompt: _Prompt, limit: int) -> None:
        while len(prompt.rollouts) > limit:
            dropped = prompt.rollouts.pop(0)
            self._data_bytes -= sum(map(len, dropped.parts))
            if dropped.lengths:
                prompt.earlier.extend((dropped.rollout_id, median_length(dropped.lengths)))
                del prompt.earlier[: -2 * EARLIER_KEPT]

    def build(self, prompt_key: str) -> NDArray[np.uint8] | None:
        """The draft index buffer (history/index.py) of a prompt, read-only; None if there is nothing to draft from."""
        if not self.has_drafts(prompt_key):
            return None
        kept = self._prompts[prompt_key].rollouts[-self._kept_rollouts :]
        pieces = [piece for rollout in kept for part in rollout.parts for piece in read_pieces(part)]
        index = build_index(pieces)
        index.flags.writeable = False
        return index

    def has_drafts(self, prompt_key: str) -> bool:
        """Whether `build` would give an index."""
        prompt = self._prompts.get(prompt_key)
        return prompt is not None and any(rollout.pieces for rollout in prompt.rollouts[-self._kept_rollouts :])

    def median_lengths(self, prompt_key: str) -> Earlier:
        """The prompt's rollouts with their median response length in tokens (RhymeRL, section 6.2), oldest first."""
        prompt = self._prompts.get(prompt_key)
        return () if prompt is None else (*_pairs(prompt.earlier), *_medians(prompt.rollouts))

    def last_lengths(self, prompt_key: str) -> tuple[int, ...]:
        """Response lengths of the prompt's newest rollout in tokens; empty if it has none."""
        prompt = self._prompts.get(prompt_key)
        rollouts = () if prompt is None else prompt.rollouts
        return next((tuple(rollout.lengths) for rollout in reversed(rollouts) if rollout.lengths), ())

    def epoch_lengths(self, first: int, last: int) -> EpochLengths:
        """Lengths of the prompts that have a rollout in the steps `first` to `last`, and one before them."""
        before, counts, lengths = array("d"), array("q"), array("q")
        for prompt in self._prompts.values():
            inside = [rollout for rollout in prompt.rollouts if first <= rollout.rollout_id <= last and rollout.lengths]
            known = [*_pairs(prompt.earlier), *_medians(prompt.rollouts)]
            median = next((median for rollout, median in reversed(known) if rollout < first), None)
            if inside and median is not None:
                before.append(median)
                counts.append(len(inside[-1].lengths))
                lengths.extend(inside[-1].lengths)
        return EpochLengths(np.array(before), np.array(counts, dtype=np.int64), np.array(lengths, dtype=np.int64))

    @property
    def prompts(self) -> int:
        """How many prompts have a recorded rollout."""
        return len(self._prompts)

    @property
    def keys(self) -> list[str]:
        """The prompts that have something to draft from, least recently recorded rollout first."""
        newest = {key: prompt.rollouts[-1].rollout_id for key, prompt in self._prompts.items() if prompt.rollouts}
        return sorted((key for key in newest if self.has_drafts(key)), key=newest.__getitem__)

    @property
    def data_bytes(self) -> int:
        """Bytes of the encoded records."""
        return self._data_bytes

    def encoded(self, up_to: int | None = None) -> Iterator[bytes]:
        """Everything that is kept, as encoded records; added in this order, they make an equal shard.

        With `up_to`, each prompt's last rollouts among those up to that rollout id: what a checkpoint of that training
        step holds.
        """
        newest = []
        for key, prompt in self._prompts.items():
            kept = prompt.rollouts
            if up_to is not None:
                kept = [rollout for rollout in kept if rollout.rollout_id <= up_to]
                if not kept:
                    continue
                dropped, kept = kept[: -self._kept_rollouts], kept[-self._kept_rollouts :]
            else:
                dropped = []
            earlier = (*_pairs(prompt.earlier), *_medians(dropped))
            if earlier:
                yield encode(Record(key, NO_ROLLOUT, earlier=earlier))
            for rollout in kept:
                # Last of all: as soon as one of them is added, what older rollouts replaced is dropped.
                if rollout.rollout_id == self._newest_id:
                    newest.append(rollout)
                else:
                    yield from rollout.parts
        for rollout in newest:
            yield from rollout.parts


def _pairs(earlier: array[float]) -> Earlier:
    return tuple((int(rollout), median) for rollout, median in zip(earlier[::2], earlier[1::2], strict=True))


def _medians(rollouts: Sequence[_Rollout]) -> Earlier:
    return tuple((rollout.rollout_id, median_length(rollout.lengths)) for rollout in rollouts if rollout.lengths)
