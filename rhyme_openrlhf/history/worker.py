"""The history worker: a Ray actor on CPU that owns some of the prompts (RhymeRL, section 4.2).

- Its history is a `HistoryShard`, which `history/journal.py` also keeps in a file.
- The indexes built from the shard are in an `IndexStore`.
- One thread does all the work, the most urgent first, and equally urgent work in the order it was given.

Invariants:
- One prompt belongs to one worker (`prompt_keys.owner`).
- A call never blocks a rollout, because engines ask while their samples already run.
- An index in memory is returned at once, even while the worker does other work.
- The caller that gave work awaits its result or gets its exception. Cancelling the wait does not stop the work.
- Ray restarts a dead worker, elsewhere if its node is gone. It has its history again where it can read its journal:
  on the journal's node, or anywhere in a run directory that all nodes share. Elsewhere it begins with the checkpoint's
  part and says so.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import ray

from rhyme_openrlhf.history.archive import ArchiveWriter
from rhyme_openrlhf.history.earlier import JUDGED_PROMPTS, Choice, EarlierRuns, Known, Sources
from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.index_store import IndexStore
from rhyme_openrlhf.history.journal import (
    NO_RUN,
    JournaledShard,
    JournalError,
    read_entries,
    write_entries,
)
from rhyme_openrlhf.history.lineage import Lineage
from rhyme_openrlhf.history.ranks import rank_change, rank_correlation, together
from rhyme_openrlhf.history.record import Earlier, Record, encode, read_head
from rhyme_openrlhf.history.shard import EpochLengths, HistoryShard
from rhyme_openrlhf.history.work_queue import Urgency, WorkQueue
from rhyme_openrlhf.platform.cpu_share import limit_cpus
from rhyme_openrlhf.prompt_keys import first_round, is_evaluation, owner, rounds, training_key
from rhyme_openrlhf.settings.history import HistorySettings
from rhyme_openrlhf.telemetry.events import Event, HistoryState, Note, RankStability

SOURCE = "history"
GB = 10**9
# Of a draft index, a token; and the fewest prompts that the share of memory is for: no prompt's index takes more of it
# for earlier runs.
INDEX_BYTES, LEAST_PROMPTS = 16, 8
# The hash of no responses of earlier runs.
NOTHING = hash(())
T = TypeVar("T")


@dataclass(frozen=True)
class PromptRollout:
    """The responses of one prompt in one training step: the pieces for drafts, and the samples' lengths.

    `prompt_key` is that of a round (prompt_keys.py). Lengths are of whole samples, and given with the first round.
    """

    prompt_key: str
    pieces: tuple[Piece, ...]
    lengths: tuple[int, ...]


# Niceness, as for the command nice. 19 is the lowest priority: other processes go first, because no rollout waits for
# a worker.
NICE = 19


@dataclass(frozen=True)
class WorkerPlace:
    """One history worker's number among the run's `workers`, its journal, and the checkpoint's files it begins with.

    - `memory_bytes`: its share of its node's memory.
    - `spill`: the directory for indexes beyond that share, of all workers of a node; None: in the node's temporary
      directory.
    - `lineage`: the archive that it leaves, and the earlier runs that it drafts from; None: neither.
    - `recorder`: the name of the run's recorder, an actor, or "". A name, because Ray warns of an argument in its
      store, as a handle would be, for an actor that it may have to restart.
    """

    number: int
    workers: int
    journal: Path
    token: bytes
    checkpoint: tuple[Path, ...]
    memory_bytes: int
    spill: Path | None
    settings: HistorySettings
    recorder: str = ""
    lineage: Lineage | None = None


class PlainHistoryWorker:
    """The worker's methods; `HistoryWorker` is the Ray actor class."""

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self._log(f"runs with {limit_cpus(place.settings.cpus_per_worker, NICE)}")
        self._journal: JournaledShard | None = None
        rollouts = place.settings.rollouts
        try:
            self._journal = JournaledShard(place.journal, place.token, self._of_checkpoint, rollouts)
            self._shard = self._journal.shard
        except OSError as error:
            self._give_up_journal(error)
            self._shard = HistoryShard(rollouts)
            for encoded in self._of_checkpoint():
                self._shard.add(encoded)
        self._say_if_lost()
        self._spill = place.spill or Path(tempfile.gettempdir()) / f"rhyme-{place.token.hex()}"
        self._store = IndexStore(self._spill / f"worker-{place.number}", place.memory_bytes, self._warn)
        self._archive = self._begin_archive()
        self._earlier = EarlierRuns(
            place.lineage.sources if place.lineage is not None else Sources(),
            lambda key: owner(key, place.workers) == place.number,
            place.memory_bytes // INDEX_BYTES // LEAST_PROMPTS,
            self._warn,
        )
        # By prompt, the hash of what its index was built from of earlier runs.
        self._chosen: dict[str, int] = {}
        self._queue = WorkQueue(f"history-{place.number}")
        # Prompts whose index has to be built. Indexes of the history read at the start are built in the background.
        self._unbuilt = set(self._shard.keys)
        self._restored = self._shard.keys
        # The training step in which what earlier runs have added was last looked for, and that work.
        self._refreshed = 0
        self._refresh: asyncio.Future[None] | None = None
        self._said_full = False
        self._hits = self._late = self._misses = 0

    def _of_checkpoint(self) -> Iterator[bytes]:
        """Yield the checkpoint's encoded records of the prompts that this worker owns."""
        for path in self._place.checkpoint:
            try:
                for encoded, _ in read_entries(path, NO_RUN):
                    if owner(read_head(encoded).prompt_key, self._place.workers) == self._place.number:
                        yield encoded
            except (OSError, JournalError) as error:
                # The file may be deleted by the time a worker restarts away from its journal. Only drafts are lost.
                self._warn(f"begins without {path}: {error}")

    def _say_if_lost(self) -> None:
        """Say what a worker lost with its node, which was started again where its journal is not."""
        context = ray.get_runtime_context() if ray.is_initialized() else None
        if context is None or context.get_actor_id() is None or not context.was_current_actor_reconstructed:
            return
        if self._journal is None or not self._journal.replayed:
            known = self._shard.prompts
            what = f"the checkpoint's {known} prompts" if known else "no prompt"
            self._warn(
                f"was started again without its journal {self._place.journal}, which went with its node: it knows "
                f"{what}, and all others when they are answered again"
            )

    def _give_up_journal(self, error: OSError) -> None:
        """Continue in memory alone: without a journal, the history ends with this process."""
        self._warn(f"keeps no journal {self._place.journal}: {error}")
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _begin_archive(self) -> ArchiveWriter | None:
        place = self._place
        if place.lineage is None:
            return None
        try:
            return ArchiveWriter(place.lineage.archive, place.lineage.about, place.number, place.memory_bytes)
        except (OSError, JournalError) as error:
            self._warn(f"leaves no responses for later runs in {place.lineage.archive}: {error}")
            return None

    def _leave(self, encoded: bytes) -> None:
        """Append a record to the archive, as long as that works and there is room."""
        # An ended archive stays open, and so locked, until the run ends.
        if self._archive is None or self._archive.ended:
            return
        try:
            if self._archive.add(encoded):
                return
            reason = "they have reached its share of --history.memory_gb"
        except OSError as error:
            reason = str(error)
        self._warn(f"leaves no more responses for later runs: {reason}")

    def _log(self, what: str) -> None:
        print(f"history worker {self._place.number} {what}", file=sys.stderr)

    def _warn(self, what: str) -> None:
        self._log(what)
        self._record(Note("warning", f"history worker {self._place.number} {what}"))

    def _record(self, event: Event) -> None:
        if self._place.recorder:
            # Ray raises ValueError if the recorder is gone: that loses the event, never the run.
            with suppress(ValueError):
                ray.get_actor(self._place.recorder).write.remote(event, SOURCE, time.time())

    def _give(self, urgency: Urgency, work: Callable[[], T]) -> asyncio.Future[T]:
        if self._refresh is None:
            self._look_for_more(Urgency.ASKED)
        restored, self._restored = self._restored, []
        for key in restored:
            self._queue.give(Urgency.LATER, partial(self._build_later, key))
        return self._queue.give(urgency, work)

    def _look_for_more(self, urgency: Urgency) -> None:
        self._refresh = self._queue.give(urgency, self._earlier.refresh)

    # --- what the trainer calls

    async def record(self, rollout_id: int, rollouts: list[PromptRollout], evaluation: bool = False) -> None:
        """Keep the responses of training step `rollout_id` and index them, off every critical path.

        Or of an `evaluation` after that step. Returns when they are indexed.
        """
        work = []
        judged = [one for one in rollouts if one.pieces and self._earlier.judges(one.prompt_key)][:JUDGED_PROMPTS]
        for one in judged:
            work.append(self._give(Urgency.KEPT, partial(self._judge, one.prompt_key, one.pieces)))
        for one in rollouts:
            record = Record(one.prompt_key, rollout_id, one.pieces, one.lengths)
            work.append(self._give(Urgency.KEPT, partial(self._keep, record)))
            work.append(self._give(Urgency.LATER, partial(self._build_later, one.prompt_key)))
        await asyncio.gather(*work)
        if not evaluation:
            self._record_state(rollout_id)
            await self._record_earlier(rollout_id)

    def _judge(self, key: str, said: tuple[Piece, ...]) -> None:
        """Judge earlier runs by what this run said to a prompt, before that counts as a visit."""
        self._earlier.judge(key, self._visit(key), said)

    def _visit(self, key: str) -> int:
        """Return how often a prompt was answered so far; a round of it as often as the first one."""
        return self._shard.visits(first_round(key))

    def _keep(self, record: Record) -> None:
        encoded = encode(record)
        if self._journal is None:
            kept = self._shard.add(encoded)
        else:
            try:
                kept = self._journal.add(encoded)
            except OSError as error:
                # The shard has it.
                kept = True
                self._give_up_journal(error)
        if kept:
            self._leave(encoded)
        self._store.drop(record.prompt_key)
        self._unbuilt.add(record.prompt_key)
        room = self._place.memory_bytes - self._shard.data_bytes - self._earlier.data_bytes
        if room < 0 and not self._said_full:
            self._said_full = True
            self._warn(
                f"holds {self._shard.data_bytes / GB:.1f} GB of responses alone, above its share of "
                f"--history.memory_gb, {self._place.memory_bytes / GB:.1f} GB: every index is on the disk, so drafts "
                "come later; raise it, or --history.workers on more nodes"
            )
        self._store.set_limit(max(0, room))

    def _build_later(self, key: str) -> None:
        """Build a prompt's index for the next epoch, if it was not asked for since."""
        if key in self._unbuilt:
            self._build(key, soon=False)

    def _choose(self, key: str) -> Choice:
        """Return what a prompt drafts from of earlier runs."""
        # Where memory is short, this run's own responses come first.
        if self._store.overflows and not self._earlier.fixed and self._shard.has_drafts(key):
            return ()
        return self._earlier.choose(key, self._visit(key))

    def _build(self, key: str, *, soon: bool) -> np.ndarray | None:
        self._unbuilt.discard(key)
        choice = self._choose(key)
        if choice:
            self._chosen[key] = hash(choice)
        else:
            self._chosen.pop(key, None)
        index = self._shard.build(key, self._earlier.pieces(choice))
        if index is not None:
            self._store.put(key, index, soon=soon)
        return index

    def _record_state(self, step: int) -> None:
        state = self._store.state()
        self._record(
            HistoryState(
                step=step,
                worker=self._place.number,
                prompts=self._shard.prompts,
                resident=state.resident,
                spilled=state.spilled,
                memory_bytes=self._shard.data_bytes + state.resident_bytes,
                disk_bytes=state.spilled_bytes,
                hits=self._hits,
                late=self._late,
                misses=self._misses,
            )
        )
        self._hits = self._late = self._misses = 0

    async def _record_earlier(self, step: int) -> None:
        for event in await self._give(Urgency.KEPT, partial(self._earlier.reports, step, self._place.number)):
            self._record(event)

    async def save(self, path: Path, up_to: int) -> None:
        """Write the history of the rollouts up to training step `up_to` to a checkpoint's file. Raises OSError."""
        await self._give(Urgency.KEPT, lambda: write_entries(path, NO_RUN, self._shard.encoded(up_to)))

    async def epoch_lengths(self, first: int, last: int) -> EpochLengths:
        """Return the lengths of training steps `first` to `last`, with those before, for `report_ranks`."""
        return await self._give(Urgency.KEPT, lambda: self._shard.epoch_lengths(first, last))

    async def report_ranks(self, epoch: int, *shares: EpochLengths) -> None:
        """Record how well the previous epoch ranked this epoch's prompts, from all workers' `epoch_lengths`."""

        def compare() -> None:
            lengths = together(list(shares))
            change, correlation = rank_change(lengths), rank_correlation(lengths)
            if change is not None and correlation is not None:
                self._record(
                    RankStability(
                        epoch=epoch,
                        correlation=correlation,
                        prompts=lengths.before.size,
                        groups=change.groups,
                        responses=change.responses,
                        accurate=change.accurate,
                        near_boundary=change.near_boundary,
                        not_last=change.not_last,
                        within_reach=change.within_reach,
                        migrated=change.migrated,
                    )
                )

        await self._give(Urgency.LATER, compare)

    # --- what the rollout asks

    async def prepare(self, prompt_keys: list[str], step: int) -> None:
        """Bring these prompts' indexes, of all rounds, into memory: the engines that got the prompts will need them.

        What other runs have added is looked for once in each training step (`step`): a step's prompts may be announced
        one by one.
        """
        if self._refresh is None or (self._earlier.waits_for_more and step > self._refreshed):
            self._refreshed = step
            self._look_for_more(Urgency.COMING)
        if self._refresh is not None:
            await asyncio.shield(self._refresh)
        keys = [self._source(key) for prompt in prompt_keys for key in rounds(prompt, self._has_source)]
        # Indexes already in memory come first, so that none of them has to make room for another.
        keys.sort(key=lambda key: self._store.resident(key) is None)
        await asyncio.gather(*(self._give(Urgency.COMING, partial(self._prepare, key)) for key in keys))

    def _source(self, key: str) -> str:
        """Return whose history a prompt drafts from: that of training before an evaluation's prompt has its own."""
        return training_key(key) if is_evaluation(key) and not self._has_drafts(key) else key

    def _has_source(self, key: str) -> bool:
        return self._has_drafts(self._source(key))

    def _has_drafts(self, key: str) -> bool:
        # Also one whose earlier run was left out meanwhile.
        return self._shard.has_drafts(key) or self._earlier.has(key) or key in self._chosen

    def _prepare(self, key: str) -> None:
        # Since the index was built, earlier runs may have been judged, or other runs have got further.
        if self._chosen.get(key, NOTHING) != hash(self._choose(key)):
            self._store.drop(key)
        self._ready(key)

    async def index(self, prompt_key: str) -> np.ndarray | None:
        """Return the prompt's draft index (history/index.py), or None if there is nothing to draft from."""
        prompt_key = self._source(prompt_key)
        index = self._store.resident(prompt_key)
        if index is not None:
            self._hits += 1
            return index
        index = await self._give(Urgency.ASKED, partial(self._ready, prompt_key))
        if index is None:
            self._misses += 1
        else:
            self._late += 1
        return index

    def _ready(self, key: str) -> np.ndarray | None:
        """Return a prompt's index from memory or disk, or build it; keep it in memory before others."""
        index = self._store.bring(key)
        return self._build(key, soon=True) if index is None else index

    async def median_lengths(self, prompt_keys: list[str]) -> list[Earlier]:
        """Return each prompt's rollouts with their median response length (RhymeRL, section 6.2), oldest first."""
        return await self._give(Urgency.ASKED, lambda: [self._shard.median_lengths(key) for key in prompt_keys])

    async def last_lengths(self, prompt_keys: list[str]) -> list[tuple[int, ...]]:
        """Return each prompt's response lengths in its last rollout, in tokens; else an earlier run's, or none."""
        return await self._give(Urgency.ASKED, lambda: [self._last_lengths(key) for key in prompt_keys])

    def _last_lengths(self, key: str) -> tuple[int, ...]:
        return self._shard.last_lengths(key) or self._earlier.lengths(key, self._visit(key))

    async def known_earlier(self, prompt_keys: list[str]) -> list[Known]:
        """Return for each earlier run how many of these prompts, all of this worker, it has responses to."""
        found = await self._give(Urgency.ASKED, lambda: self._earlier.known(prompt_keys))
        await self._record_earlier(0)
        return found

    async def prompts(self) -> int:
        """Return the number of prompts that this worker knows; each round counts as one."""
        return await self._give(Urgency.KEPT, lambda: self._shard.prompts)

    async def close(self) -> None:
        """Delete the indexes spilled to the disk, because the run is over."""
        await self._give(Urgency.ASKED, self._close)

    def _close(self) -> None:
        # No index is built from now on, so nothing is written there again.
        self._unbuilt.clear()
        self._store.close()
        if self._archive is not None:
            self._archive.close()
            self._archive = None
        # Shared with the other workers of this node: the last one removes it.
        with suppress(OSError):
            self._spill.rmdir()


HistoryWorker = ray.remote(PlainHistoryWorker)
