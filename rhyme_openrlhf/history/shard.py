"""The history that one worker keeps of its prompts: responses of their last rollouts, and lengths of earlier ones.

Invariants (RhymeRL, section 5.3: a prompt's index covers its last rollout):
- A prompt has the newest `rollouts` rollouts that were recorded (1 in the paper), and no others. Parts of the same
  rollout add up. An older rollout that arrives late changes nothing.
- The rollout that the newest one replaced is kept until a yet newer one begins. So a checkpoint (`encoded(up_to)`) can
  leave out a training step that is never completed, and still hold its prompts' rollouts before it.
- The median response length of each rollout stays after the rollout is dropped: the prompt's length history.
- Responses are kept encoded in memory (history/record.py), about a byte a token. They are never on a disk alone, so a
  failing disk never loses them.

One caller at a time: nothing here locks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

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
from rhyme_openrlhf.prompt_keys import is_evaluation

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
    """One prompt: `rollouts` oldest first, and `earlier` as a flat row of (rollout id, median length) pairs."""

    rollouts: list[_Rollout] = field(default_factory=list)
    earlier: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class EpochLengths:
    """Response lengths of p prompts: each one's median in its last rollout before an epoch, and all in the epoch.

    `before` is float64[p], `counts` int64[p], and `lengths` int64[sum of counts], prompt after prompt.
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
        # Prompts that still have one rollout more than the limit: the one that the newest has replaced.
        self._replaced: set[str] = set()
        self._data_bytes = 0

    def record(self, prompt_key: str, rollout_id: int, pieces: Sequence[Piece], lengths: Sequence[int]) -> bool:
        """Keep responses of a prompt; return False for a rollout older than the newest kept, which is ignored.

        See history/record.py. Raises ValueError for token ids out of range or a negative length, and then changes
        nothing.
        """
        return self.add(encode(Record(prompt_key, rollout_id, tuple(pieces), tuple(lengths))))

    def add(self, encoded: bytes) -> bool:
        """Keep a record that is already encoded, as `record` does."""
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

    def build(self, prompt_key: str, earlier: Sequence[Piece] = ()) -> NDArray[np.uint8] | None:
        """Build a prompt's draft index buffer (history/index.py), read-only; None if there is nothing to draft from.

        `earlier`: responses of earlier runs to draft from too. Rewards count in the newest rollout only, so newer
        responses win over older ones where they disagree.
        """
        pieces = list(earlier)
        prompt = self._prompts.get(prompt_key)
        kept = prompt.rollouts[-self._kept_rollouts :] if prompt is not None else []
        for rollout in kept:
            found = [piece for part in rollout.parts for piece in read_pieces(part)]
            pieces += found if rollout is kept[-1] else [replace(piece, reward=0.0) for piece in found]
        if not pieces:
            return None
        index = build_index(pieces, len(earlier))
        index.flags.writeable = False
        return index

    def visits(self, prompt_key: str) -> int:
        """Return how many rollouts of a prompt were recorded, as far as their lengths are kept."""
        prompt = self._prompts.get(prompt_key)
        return 0 if prompt is None else len(prompt.rollouts) + len(prompt.earlier) // 2

    def has_drafts(self, prompt_key: str) -> bool:
        """Return whether `build` would return an index."""
        prompt = self._prompts.get(prompt_key)
        return prompt is not None and any(rollout.pieces for rollout in prompt.rollouts[-self._kept_rollouts :])

    def median_lengths(self, prompt_key: str) -> Earlier:
        """Return pairs (rollout id, median response length in tokens), oldest first (RhymeRL, section 6.2)."""
        prompt = self._prompts.get(prompt_key)
        return () if prompt is None else (*_pairs(prompt.earlier), *_medians(prompt.rollouts))

    def last_lengths(self, prompt_key: str) -> tuple[int, ...]:
        """Return the response lengths, in tokens, of the prompt's last rollout (RhymeRL, section 6.2); () if unseen."""
        prompt = self._prompts.get(prompt_key)
        rollouts = prompt.rollouts if prompt is not None else []
        return next((tuple(rollout.lengths) for rollout in reversed(rollouts) if rollout.lengths), ())

    def epoch_lengths(self, first: int, last: int) -> EpochLengths:
        """Return the lengths of training prompts with a rollout in the steps `first` to `last`, and one before."""
        before, counts, lengths = array("d"), array("q"), array("q")
        for key, prompt in self._prompts.items():
            if is_evaluation(key):
                continue
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
        """Number of prompts that have a recorded rollout."""
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
        """Yield the whole shard as encoded records; added in this order, they make an equal shard.

        With `up_to`, yield each prompt's last rollouts among those up to that rollout id. A checkpoint of that training
        step holds these.
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
                # The newest rollouts come last, because adding one drops the rollouts that older ones replaced.
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
