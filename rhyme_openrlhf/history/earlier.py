"""Responses of earlier runs to the prompts of one history worker: which are drafted from, and which runs still help.

A prompt's n-th visit in this run drafts from its n-th and (n + 1)-th rollout in an earlier run, or from the last ones
where that run ended before. So the policies are about as far as this run's. Of several runs, the two are chosen whose
responses predict this run's best.

A run is judged by this run's own responses: how many tokens of drafts from it alone would have been right (`judge`).
That needs no engine, and is the same in every repetition. A run of which too few are right is left out.

Invariants:
- Tokens stay on the disk until a prompt's index is built. In memory a record takes about 40 bytes.
- A damaged or impossible record counts as absent, so a hostile archive costs drafts at most.
- An archive may grow, and may be deleted, while it is read.

One caller at a time.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from rhyme_openrlhf.history.archive import Archive, ArchiveReader, Stored, in_store
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.history.record import read_head, read_pieces

# Runs that one prompt drafts from, and rollouts of each. In replays of three recorded runs, two runs give 1.1 to 1.2
# times the tokens a step of one in the first epoch, and less later.
RUNS_DRAFTED, ROLLOUTS_OF_EACH = 2, 2
# Archives in a store that are looked at, the newest first.
MOST_RUNS = 20
# A run is judged by prompts of a step, responses of each and tokens of each, at most: a few milliseconds a prompt.
JUDGED_PROMPTS, JUDGED_RESPONSES, JUDGED_TOKENS = 8, 2, 256
# Lookups as the drafts' own: at least two tokens match (--histospec.prefix_min); a draft has at most eight.
LONGEST_MATCH, SHORTEST_MATCH, DRAFTED = 16, 2, 8
# Of drafts from another run of the same task, 12 to 64 of 100 tokens were right (four recorded runs). From responses to
# other prompts, or with exchanged tokens, 0 to 7 were.
LEAST_RIGHT = 1 / 12
# The estimate for a run before it is judged, and the tokens that the estimate counts as. Beyond MOST_JUDGED half are
# forgotten, because the policy changes.
LIKELY_RIGHT, PRIOR_TOKENS, MOST_JUDGED = 0.25, 100.0, 4000.0
# Responses of a record that are read: far more than samples of a prompt.
MOST_PIECES = 4096
FIELDS = len(Stored._fields)
# Of memory, for a record and for a prompt of a run.
RECORD_BYTES, KEY_BYTES = 8 * FIELDS, 250


@dataclass(frozen=True)
class Sources:
    """The places that a run drafts from: archives that are chosen at the start, and stores that others still write to.

    - `limits`: bytes to read of each file, by the archive's directory; an archive that is not in it is read as it
      grows.
    - `own`: this run's own archive, which is no earlier run's.
    - `tokenizer`, `vocabulary`: the tokenizer's fingerprint, and its number of tokens.
    """

    archives: tuple[Archive, ...] = ()
    stores: tuple[Path, ...] = ()
    tokenizer: str = ""
    vocabulary: int = 0
    own: Path | None = None
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """Prompts of this run that an earlier run has: how many, and the most rollouts of one.

    `archive`: its directory, because two runs may have one name.
    """

    archive: str
    run: str
    prompts: int
    rollouts: int


@dataclass
class _Run:
    """One earlier run: its records by prompt (flat rows of `Stored`), and how its drafts would have fared."""

    reader: ArchiveReader
    records: dict[str, array[int]] = field(default_factory=dict)
    drafted: float = 0.0
    right: float = 0.0
    said: bool = False

    @property
    def rate(self) -> float:
        """Return the share of drafted tokens that were right, LIKELY_RIGHT before anything was judged."""
        return (self.right + LIKELY_RIGHT * PRIOR_TOKENS) / (self.drafted + PRIOR_TOKENS)

    @property
    def helps(self) -> bool:
        return not self.reader.refused and self.rate >= LEAST_RIGHT

    def rollouts(self, key: str) -> list[list[Stored]]:
        """Return the records of each of a prompt's rollouts, oldest first."""
        flat = self.records.get(key, ())
        rows = (Stored(*flat[at : at + FIELDS]) for at in range(0, len(flat), FIELDS))
        by_rollout = sorted(rows, key=lambda stored: stored.rollout_id)
        return [list(records) for _, records in groupby(by_rollout, key=lambda stored: stored.rollout_id)]


# The records that a prompt's index is built from: numbers of runs with their records, oldest first.
Choice = tuple[tuple[int, tuple[Stored, ...]], ...]


class EarlierRuns:
    """The earlier runs of one history worker, whose prompts are `mine`.

    `say` is called with one sentence for each run that is left out. A prompt drafts from at most `most_tokens` tokens
    of them.
    """

    def __init__(
        self, sources: Sources, mine: Callable[[str], bool], most_tokens: int, say: Callable[[str], None]
    ) -> None:
        self._sources, self._mine, self._most_tokens, self._say = sources, mine, most_tokens, say
        self._runs: list[_Run] = []
        self._count = 0
        self._directories: set[Path] = {sources.own} if sources.own else set()
        for archive in sources.archives:
            self._take(archive)

    @property
    def data_bytes(self) -> int:
        """Bytes of memory for the places of all records, roughly."""
        return sum(KEY_BYTES * len(run.records) for run in self._runs) + RECORD_BYTES * self._count

    @property
    def fixed(self) -> bool:
        """Return whether the run drafts from the same responses to its end, as a reproducible one does."""
        return bool(self._sources.limits)

    @property
    def waits_for_more(self) -> bool:
        """Return whether other runs may still add to what is drafted from."""
        return bool(self._sources.stores) or (bool(self._runs) and not self.fixed)

    def refresh(self) -> None:
        """Note what was added to the archives since the last call."""
        for store in self._sources.stores:
            found = [one for one in in_store(store) if one.about.tokenizer == self._sources.tokenizer]
            # The oldest first, as in `_runs`.
            for archive in reversed(found[:MOST_RUNS]):
                self._take(archive)
        for run in self._runs:
            for key, stored in run.reader.new():
                if self._mine(key):
                    self._count += 1
                    run.records.setdefault(key, array("q")).extend(stored)
            if run.reader.refused and not run.said:
                run.said = True
                self._say(run.reader.refused)

    def _take(self, archive: Archive) -> None:
        if archive.directory not in self._directories:
            self._directories.add(archive.directory)
            limits = self._sources.limits.get(str(archive.directory)) if self._sources.limits else None
            self._runs.append(_Run(ArchiveReader(archive, limits)))

    def has(self, key: str) -> bool:
        """Return whether an earlier run that helps has responses to this prompt."""
        return any(key in run.records for run in self._runs if run.helps)

    def known(self, keys: Sequence[str]) -> list[Known]:
        """Return for each run with some of these prompts how many it has."""
        found = []
        for run in self._runs:
            rollouts = [len(set(run.records[key][::FIELDS])) for key in keys if key in run.records]
            if rollouts:
                archive = run.reader.archive
                found.append(Known(str(archive.directory), archive.about.run, len(rollouts), max(rollouts)))
        return found

    def choose(self, key: str, visit: int) -> Choice:
        """Return the records that a prompt's `visit`-th index (from 0) is built from, those of most use last."""
        helping = [number for number, run in enumerate(self._runs) if run.helps and key in run.records]
        # The best first; of two that are not judged, the newer one.
        helping.sort(key=lambda number: (self._runs[number].rate, self._runs[number].reader.archive.about.started))
        chosen: list[tuple[int, tuple[Stored, ...]]] = []
        room = self._most_tokens
        for number in reversed(helping[-RUNS_DRAFTED:]):
            records: list[Stored] = []
            for rollout in around(self._runs[number].rollouts(key), visit):
                tokens = sum(stored.tokens for stored in rollout)
                if tokens <= room:
                    room -= tokens
                    records += rollout
            if records:
                chosen.append((number, tuple(records)))
        return tuple(reversed(chosen))

    def pieces(self, choice: Choice) -> list[Piece]:
        """Return the responses of a choice in their order; those that cannot be read are left out.

        Their rewards are 0: another run may have had another reward, and where this run's own responses were rewarded
        they choose the branch.
        """
        found = (piece for number, records in choice for piece in self._pieces(number, records))
        return [replace(piece, reward=0.0) for piece in found]

    def _pieces(self, number: int, records: Sequence[Stored]) -> Iterator[Piece]:
        for stored in records:
            encoded = self._runs[number].reader.read(stored)
            if encoded is None:
                continue
            try:
                pieces = islice(read_pieces(encoded), MOST_PIECES)
                yield from (piece for piece in pieces if self._possible(piece))
            except (ValueError, struct.error) as error:
                # The checksum fits, so it was written like this.
                self._runs[number].reader.refused = f"an archive of earlier runs has an impossible record: {error}"

    def _possible(self, piece: Piece) -> bool:
        """Return whether all tokens are in the vocabulary: an engine must not verify others."""
        tokens = np.concatenate([piece.context, piece.tokens])
        return bool(tokens.min(initial=0) >= 0 and tokens.max(initial=0) < self._sources.vocabulary)

    def lengths(self, key: str, visit: int) -> tuple[int, ...]:
        """Return the response lengths of the prompt's `visit`-th rollout in the earlier run of most use."""
        for number, records in reversed(self.choose(key, visit)):
            # The rollout of this very visit comes first.
            first = [stored for stored in records if stored.rollout_id == records[0].rollout_id]
            encoded = [self._runs[number].reader.read(stored) for stored in first]
            try:
                found = [length for one in encoded if one is not None for length in read_head(one).lengths]
            except (ValueError, OverflowError):
                continue
            if found and min(found) >= 0:
                return tuple(found)
        return ()

    def judge(self, key: str, visit: int, said: Sequence[Piece]) -> None:
        """Judge each earlier run by this run's own responses (`said`) to a prompt's `visit`-th appearance.

        Not in a reproducible run: a resumed one would not know what was judged.
        """
        if self.fixed:
            return
        for number, run in enumerate(self._runs):
            if key not in run.records or run.reader.refused:
                continue
            records = [stored for rollout in around(run.rollouts(key), visit) for stored in rollout]
            if sum(stored.tokens for stored in records) > self._most_tokens:
                continue
            pieces = list(self._pieces(number, records))
            if not pieces:
                continue
            helped = run.helps
            right, drafted = agreement(pieces, said)
            run.right, run.drafted = run.right + right, run.drafted + drafted
            if run.drafted > MOST_JUDGED:
                run.right, run.drafted = run.right / 2, run.drafted / 2
            if helped and not run.helps:
                self._say(
                    f"no longer drafts from run {run.reader.archive.about.run}: only {run.rate:.0%} of the tokens "
                    "drafted from it would have been right"
                )


def around(rollouts: Sequence[list[Stored]], visit: int) -> Sequence[list[Stored]]:
    """Return a prompt's rollout of this visit and the next one; the last one where the run has no more."""
    first = min(visit, len(rollouts) - 1)
    return rollouts[first : first + ROLLOUTS_OF_EACH]


def agreement(earlier: Sequence[Piece], said: Sequence[Piece]) -> tuple[int, int]:
    """Return how many tokens of drafts from `earlier` would have been right in responses, and how many were drafted.

    Only the beginnings of the first responses are drafted.
    """
    index = DraftIndex.from_buffer(build_index(earlier))
    right = drafted = 0
    for piece in said[:JUDGED_RESPONSES]:
        text = [*map(int, piece.context), *map(int, piece.tokens[:JUDGED_TOKENS])]
        # The first token comes from prefill.
        at = len(piece.context) + 1
        while at < len(text):
            draft = index.draft(text[max(0, at - LONGEST_MATCH) : at], LONGEST_MATCH, SHORTEST_MATCH, DRAFTED).tokens
            good = 0
            while good < len(draft) and at + good < len(text) and draft[good] == text[at + good]:
                good += 1
            right, drafted = right + good, drafted + min(len(draft), len(text) - at)
            at += good + 1
    return right, drafted
