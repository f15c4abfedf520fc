"""Responses of earlier runs to the prompts of one history worker: which are drafted from, and which runs still help.

A prompt's n-th visit in this run drafts from its n-th and (n + 1)-th rollout in an earlier run, or from the last ones
where that run ended before. So the policies are about as far as this run's. Of several runs, the two are chosen whose
responses predict this run's best.

A run is judged by this run's own responses: how many tokens of drafts from it alone would have been right (`judge`).
That needs no engine, and is the same in every repetition. A run of which too few are right is left out, until more are
right again.

Invariants:
- Tokens stay on the disk until a prompt's index is built. In memory a record takes about 40 bytes.
- A damaged or impossible record counts as absent, so a hostile archive costs drafts at most.
- What judging reads is bounded, however many runs there are and however long their responses.
- An archive may grow, and may be deleted, while it is read.

One caller at a time; only `has` and `judges` may be called by another thread meanwhile.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from rhyme_openrlhf.history.archive import Archive, ArchiveReader, Stored
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.history.record import read_head, read_pieces
from rhyme_openrlhf.history.store import MOST_RUNS, in_store
from rhyme_openrlhf.telemetry.events import EarlierRun

# Runs that one prompt drafts from, and rollouts of each. In replays of three recorded runs, two runs give 1.1 to 1.2
# times the tokens a step of one in the first epoch, and less later.
RUNS_DRAFTED, ROLLOUTS_OF_EACH = 2, 2
# A run is judged by prompts of a step, responses of each and tokens of each, at most: a few milliseconds a prompt.
JUDGED_PROMPTS, JUDGED_RESPONSES, JUDGED_TOKENS = 8, 2, 256
# Beside the runs that a prompt drafts from, this many others are judged by it, in turn. Of each rollout of a run,
# drafts come from this many responses, and tokens of each.
JUDGED_OTHERS, JUDGED_SAMPLES, JUDGED_LENGTH = 2, 8, 512
# A prompt drafts from at most this many tokens of earlier runs: 32 MB of index.
MOST_TOKENS = 2**21
# Lookups as the drafts' own: at least two tokens match (--histospec.prefix_min); a draft has at most eight.
LONGEST_MATCH, SHORTEST_MATCH, DRAFTED = 16, 2, 8
# Of drafts from another run of the same task, 12 to 64 of 100 tokens were right (four recorded runs). From responses to
# other prompts, or with exchanged tokens, 0 to 7 were.
LEAST_RIGHT = 1 / 12
# One bad step must not leave a run out for good: from this share on it drafts again.
AGAIN_RIGHT = 2 * LEAST_RIGHT
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


@dataclass(eq=False)
class _Run:
    """One earlier run: its records by prompt (flat rows of `Stored`), and how its drafts would have fared.

    `turn`: when it was judged last, as a number that counts up. `left_out`: its drafts are too often wrong.
    """

    reader: ArchiveReader
    records: dict[str, array[int]] = field(default_factory=dict)
    prompts: int = 0
    of: int = 0
    epochs: int = 0
    drafted_from: int = 0
    judged: float = 0.0
    right: float = 0.0
    turn: int = 0
    left_out: bool = False
    said: bool = False

    @property
    def rate(self) -> float:
        """Return the share of drafted tokens that were right, LIKELY_RIGHT before anything was judged."""
        return (self.right + LIKELY_RIGHT * PRIOR_TOKENS) / (self.judged + PRIOR_TOKENS)

    @property
    def helps(self) -> bool:
        return not self.reader.refused and not self.left_out

    def rollouts(self, key: str) -> list[list[Stored]]:
        """Return the records of each of a prompt's rollouts, oldest first."""
        flat = self.records.get(key, ())
        rows = (Stored(*flat[at : at + FIELDS]) for at in range(0, len(flat), FIELDS))
        by_rollout = sorted(rows, key=lambda stored: stored.rollout_id)
        return [list(records) for _, records in groupby(by_rollout, key=lambda stored: stored.rollout_id)]

    def drafted_of(self, key: str, visit: int, room: int) -> list[list[Stored]]:
        """Return the rollouts that a prompt's visit drafts from, of at most `room` tokens."""
        found = []
        for rollout in around(self.rollouts(key), visit):
            tokens = sum(stored.tokens for stored in rollout)
            if tokens <= room:
                room -= tokens
                found.append(rollout)
        return found


# The records that a prompt's index is built from: directories of archives with their records, oldest first.
Choice = tuple[tuple[Path, tuple[Stored, ...]], ...]


class EarlierRuns:
    """The earlier runs of one history worker, whose prompts are `mine`.

    `say` is called with one sentence for each run that is left out, or drafts again. A prompt drafts from at most
    `most_tokens` tokens of them.
    """

    def __init__(
        self, sources: Sources, mine: Callable[[str], bool], most_tokens: int, say: Callable[[str], None]
    ) -> None:
        self._sources, self._mine, self._say = sources, mine, say
        self._most_tokens = min(most_tokens, MOST_TOKENS)
        self._chosen = {one.directory: one for one in sources.archives if one.directory != sources.own}
        # All archives of the stores, so that each is read once.
        self._in_stores: dict[Path, Archive] = {}
        self._runs = {directory: self._run(archive) for directory, archive in self._chosen.items()}
        self._count = 0
        self._turn = 0

    @property
    def data_bytes(self) -> int:
        """Bytes of memory for the places of all records, roughly."""
        return sum(KEY_BYTES * len(run.records) for run in self._runs.values()) + RECORD_BYTES * self._count

    @property
    def fixed(self) -> bool:
        """Return whether the run drafts from the same responses to its end, as a reproducible one does."""
        return bool(self._sources.limits)

    @property
    def waits_for_more(self) -> bool:
        """Return whether other runs may still add to what is drafted from."""
        return bool(self._sources.stores) or (bool(self._runs) and not self.fixed)

    def refresh(self) -> None:
        """Note what was added to the archives since the last call, and which are the newest of the stores."""
        if self._sources.stores:
            self._follow_stores()
        for run in self._runs.values():
            for key, stored in run.reader.new():
                if self._mine(key):
                    self._count += 1
                    run.records.setdefault(key, array("q")).extend(stored)
            if run.reader.refused and not run.said:
                run.said = True
                self._say(run.reader.refused)

    def _follow_stores(self) -> None:
        found = [archive for store in self._sources.stores for archive in in_store(store, self._in_stores)]
        self._in_stores = {archive.directory: archive for archive in found}
        usable = (one for one in found if one.about.tokenizer == self._sources.tokenizer)
        newest = list(islice((one for one in usable if one.directory != self._sources.own), MOST_RUNS))
        wanted = {one.directory for one in newest} | self._chosen.keys()
        gone = [run for directory, run in self._runs.items() if directory not in wanted]
        self._count -= sum(len(flat) // FIELDS for run in gone for flat in run.records.values())
        kept = {directory: run for directory, run in self._runs.items() if directory in wanted}
        new = {one.directory: self._run(one) for one in newest if one.directory not in kept}
        # As a whole: another thread may be looking (`has`, `judges`).
        self._runs = kept | new

    def _run(self, archive: Archive) -> _Run:
        limits = self._sources.limits.get(str(archive.directory)) if self._sources.limits else None
        return _Run(ArchiveReader(archive, limits))

    def has(self, key: str) -> bool:
        """Return whether an earlier run that helps has responses to this prompt."""
        return any(key in run.records for run in self._runs.values() if run.helps)

    def judges(self, key: str) -> bool:
        """Return whether this run's responses to a prompt tell something of an earlier run, also of one left out."""
        return not self.fixed and any(key in one.records for one in self._runs.values() if not one.reader.refused)

    def known(self, keys: Sequence[str]) -> list[Known]:
        """Return for each run with some of these prompts how many it has."""
        found = []
        for directory, run in self._runs.items():
            rollouts = [len(set(run.records[key][::FIELDS])) for key in keys if key in run.records]
            run.prompts, run.of, run.epochs = len(rollouts), len(keys), max(rollouts, default=0)
            if rollouts:
                found.append(Known(str(directory), run.reader.archive.about.run, run.prompts, run.epochs))
        return found

    def reports(self, step: int, worker: int) -> list[EarlierRun]:
        """Return this history worker's event after training step `step` for each run that has some of its prompts."""
        found = []
        for directory, run in self._runs.items():
            about = run.reader.archive.about
            if run.prompts or run.drafted_from or run.turn:
                found.append(
                    EarlierRun(
                        step, worker, about.run, about.uid, str(directory), run.prompts, run.of, run.epochs,
                        run.drafted_from, round(run.judged), round(run.right), not run.helps,
                    )
                )  # fmt: skip
        return found

    def _best(self, key: str) -> list[_Run]:
        """Return the runs that a prompt drafts from, the best last; of two that are not judged, the newer one."""
        helping = [run for run in self._runs.values() if run.helps and key in run.records]
        helping.sort(key=lambda run: (run.rate, run.reader.archive.about.started))
        return helping[-RUNS_DRAFTED:]

    def choose(self, key: str, visit: int) -> Choice:
        """Return the records that a prompt's `visit`-th index (from 0) is built from, those of most use last."""
        chosen: list[tuple[Path, tuple[Stored, ...]]] = []
        room = self._most_tokens
        for run in reversed(self._best(key)):
            records = [stored for rollout in run.drafted_of(key, visit, room) for stored in rollout]
            room -= sum(stored.tokens for stored in records)
            if records:
                chosen.append((run.reader.archive.directory, tuple(records)))
        return tuple(reversed(chosen))

    def pieces(self, choice: Choice) -> list[Piece]:
        """Return the responses of a choice in their order, to draft from them; those that cannot be read are left out.

        Their rewards are 0: another run may have had another reward, and where this run's own responses were rewarded
        they choose the branch.
        """
        for directory, _ in choice:
            self._runs[directory].drafted_from += 1
        found = (piece for directory, records in choice for piece in self._pieces(self._runs[directory], records))
        return [replace(piece, reward=0.0) for piece in found]

    def _pieces(self, run: _Run, records: Sequence[Stored]) -> Iterator[Piece]:
        for stored in records:
            encoded = run.reader.read(stored)
            if encoded is None:
                continue
            try:
                pieces = islice(read_pieces(encoded), MOST_PIECES)
                yield from (piece for piece in pieces if self._possible(piece))
            except (ValueError, struct.error) as error:
                # The checksum fits, so it was written like this.
                run.reader.refused = f"an archive of earlier runs has an impossible record: {error}"

    def _possible(self, piece: Piece) -> bool:
        """Return whether all tokens are in the vocabulary: an engine must not verify others."""
        tokens = np.concatenate([piece.context, piece.tokens])
        return bool(tokens.min(initial=0) >= 0 and tokens.max(initial=0) < self._sources.vocabulary)

    def lengths(self, key: str, visit: int) -> tuple[int, ...]:
        """Return the response lengths of the prompt's `visit`-th rollout in the earlier run of most use."""
        for directory, records in reversed(self.choose(key, visit)):
            # The rollout of this very visit comes first.
            first = [stored for stored in records if stored.rollout_id == records[0].rollout_id]
            encoded = [self._runs[directory].reader.read(stored) for stored in first]
            try:
                found = [length for one in encoded if one is not None for length in read_head(one).lengths]
            except (ValueError, OverflowError):
                continue
            if found and min(found) >= 0:
                return tuple(found)
        return ()

    def judge(self, key: str, visit: int, said: Sequence[Piece]) -> None:
        """Judge earlier runs by this run's own responses (`said`) to a prompt's `visit`-th appearance.

        Those that the prompt drafts from are always judged, the others in turn. None is in a reproducible run: a
        resumed one would not know what was judged.
        """
        if self.fixed:
            return
        best = self._best(key)
        others = [run for run in self._runs.values() if key in run.records and run not in best]
        others.sort(key=lambda run: run.turn)
        for run in (*best, *islice((run for run in others if not run.reader.refused), JUDGED_OTHERS)):
            pieces = [
                replace(piece, tokens=piece.tokens[:JUDGED_LENGTH])
                for rollout in run.drafted_of(key, visit, self._most_tokens)
                for piece in islice(self._pieces(run, rollout[:JUDGED_SAMPLES]), JUDGED_SAMPLES)
            ]
            self._turn += 1
            run.turn = self._turn
            if pieces:
                self._judge(run, *agreement(pieces, said))

    def _judge(self, run: _Run, right: int, judged: int) -> None:
        """Count tokens that the run would have drafted, and those of them that were right."""
        run.right, run.judged = run.right + right, run.judged + judged
        if run.judged > MOST_JUDGED:
            run.right, run.judged = run.right / 2, run.judged / 2
        if run.left_out != (run.rate < (AGAIN_RIGHT if run.left_out else LEAST_RIGHT)):
            run.left_out = not run.left_out
            now, share = ("no longer drafts", "only ") if run.left_out else ("drafts again", "")
            self._say(
                f"{now} from run {run.reader.archive.about.run}: {share}{run.rate:.0%} of the tokens drafted from it "
                "would have been right"
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
