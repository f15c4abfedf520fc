"""What one history worker keeps: the last rollout of each of its prompts, and the draft index made from it.

Invariants (RhymeRL, section 5.3: a prompt's index covers its last rollout):
- A prompt has exactly one rollout: the newest that was recorded. Parts of the same rollout add up, a newer one
  replaces it whole, an older one that arrives late changes nothing.
- The index always covers all that was recorded; it is built when it is asked for and kept until the next record.
- What the newest rollout replaced is kept until a yet newer one begins: a training step that is never completed can
  be left out of a checkpoint (`records(up_to)`) without losing what its prompts had before.
- Nothing handed in is referenced afterwards: tokens are copied, so a shared-memory buffer they came in can be freed.

One caller at a time: nothing here locks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.history.index import Piece, build_index, token_array


@dataclass(frozen=True)
class Record:
    """All that is kept of one prompt's rollout, as it is written to files: what `HistoryShard.record` takes."""

    prompt_key: str
    rollout_id: int
    pieces: tuple[Piece, ...]
    lengths: tuple[int, ...]


@dataclass
class _Rollout:
    """All recorded responses of one prompt in one rollout; `index` is None while it has to be built."""

    rollout_id: int
    pieces: list[Piece] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    token_bytes: int = 0
    index: NDArray[np.uint8] | None = None


class HistoryShard:
    """The prompts that one history worker owns (RhymeRL, section 4.2)."""

    def __init__(self) -> None:
        self._rollouts: dict[str, _Rollout] = {}
        self._newest_id = -1
        self._replaced: dict[str, _Rollout] = {}

    def record(self, prompt_key: str, rollout_id: int, pieces: Sequence[Piece], lengths: Sequence[int]) -> bool:
        """Keep responses of a prompt; False if they are of an older rollout than the kept one, and were ignored.

        `rollout_id`: the training step the responses were generated in. `pieces`: what drafts may come from.
        `lengths`: response lengths in tokens, of all the samples, also of those without a piece. Raises ValueError
        for token ids out of range or a negative length, and then keeps what was kept before.
        """
        kept = self._rollouts.get(prompt_key)
        if kept is not None and rollout_id < kept.rollout_id:
            return False
        if min(lengths, default=0) < 0:
            raise ValueError(f"response lengths must not be negative, got {min(lengths)}")
        own = [_copy(piece) for piece in pieces]
        if rollout_id > self._newest_id:
            self._newest_id = rollout_id
            self._replaced.clear()
        if kept is None or rollout_id > kept.rollout_id:
            if kept is not None and rollout_id == self._newest_id:
                kept.index = None
                self._replaced[prompt_key] = kept
            kept = self._rollouts[prompt_key] = _Rollout(rollout_id)
        kept.pieces += own
        kept.token_bytes += sum(np.asarray(piece.context).nbytes + np.asarray(piece.tokens).nbytes for piece in own)
        kept.lengths += [int(length) for length in lengths]
        kept.index = None
        return True

    def index(self, prompt_key: str) -> NDArray[np.uint8] | None:
        """The draft index buffer of a prompt, read-only; None if there is nothing to draft from."""
        kept = self._rollouts.get(prompt_key)
        if kept is None or not kept.pieces:
            return None
        if kept.index is None:
            kept.index = build_index(kept.pieces)
            kept.index.flags.writeable = False
        return kept.index

    def median_length(self, prompt_key: str) -> float | None:
        """Median response length in tokens of the prompt's last rollout (RhymeRL, section 6.2); None if unknown."""
        kept = self._rollouts.get(prompt_key)
        return float(statistics.median(kept.lengths)) if kept is not None and kept.lengths else None

    @property
    def prompts(self) -> int:
        """How many prompts have a recorded rollout."""
        return len(self._rollouts)

    def memory_bytes(self) -> int:
        """Bytes of the kept tokens and of the indexes built from them."""
        total = 0
        for kept in (*self._rollouts.values(), *self._replaced.values()):
            total += kept.token_bytes + (kept.index.nbytes if kept.index is not None else 0)
        return total

    def records(self, up_to: int | None = None) -> Iterator[Record]:
        """Everything that is kept; recorded again in this order, it makes an equal shard.

        With `up_to`, each prompt's last rollout among those up to that rollout id: what a checkpoint of that training
        step holds.
        """
        if up_to is None:
            yield from (_as_record(key, kept) for key, kept in self._replaced.items())
        for key, kept in self._rollouts.items():
            replaced = self._replaced.get(key)
            if up_to is None or kept.rollout_id <= up_to:
                yield _as_record(key, kept)
            elif replaced is not None and replaced.rollout_id <= up_to:
                yield _as_record(key, replaced)


def _as_record(prompt_key: str, kept: _Rollout) -> Record:
    return Record(prompt_key, kept.rollout_id, tuple(kept.pieces), tuple(kept.lengths))


def _copy(piece: Piece) -> Piece:
    """The piece with int32 arrays of its own."""
    return Piece(token_array(piece.context).copy(), token_array(piece.tokens).copy(), float(piece.reward))
