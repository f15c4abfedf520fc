"""The history worker: a Ray actor on CPU that owns some of the prompts (RhymeRL, section 4.2).

Thin: everything it knows is a `HistoryShard`, which `history/journal.py` also keeps in a file. Invariants: one prompt
belongs to one worker (`keys.owner`); a call never blocks a rollout, because engines ask while their samples already
run; a dead worker is restarted by Ray and has its history again, as long as it is restarted where its journal is.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from rhyme_openrlhf.config import HistorySettings
from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.journal import (
    NO_RUN,
    TOKEN_BYTES,
    JournaledShard,
    JournalError,
    read_records,
    write_records,
)
from rhyme_openrlhf.history.keys import owner
from rhyme_openrlhf.history.shard import HistoryShard, Record
from rhyme_openrlhf.ray_classes import WITHOUT_TORCH


@dataclass(frozen=True)
class PromptRollout:
    """The responses of one prompt in one training step: what drafts may come from, and the samples' lengths."""

    prompt_key: str
    pieces: tuple[Piece, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class WorkerPlace:
    """Which of the run's `workers` history workers this is, its journal, and the checkpoint's files it begins with."""

    number: int
    workers: int
    journal: Path
    token: bytes
    checkpoint: tuple[Path, ...]


class PlainHistoryWorker:
    """The worker's methods; `HistoryWorker` is the Ray actor class."""

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self._journal: JournaledShard | None = None
        try:
            self._journal = JournaledShard(place.journal, place.token, self._of_checkpoint)
            self._shard = self._journal.shard
        except OSError as error:
            self._give_up_journal(error)
            self._shard = HistoryShard()
            for record in self._of_checkpoint():
                self._shard.record(record.prompt_key, record.rollout_id, record.pieces, record.lengths)

    def _of_checkpoint(self) -> Iterator[Record]:
        """The checkpoint's records of the prompts that this worker owns."""
        for path in self._place.checkpoint:
            try:
                found = read_records(path, NO_RUN)
            except (OSError, JournalError) as error:
                # Deleted since, for a worker that is restarted late and elsewhere than its journal: only drafts.
                self._say(f"begins without {path}: {error}")
                continue
            for record in found[0] if found is not None else []:
                if owner(record.prompt_key, self._place.workers) == self._place.number:
                    yield record

    def _give_up_journal(self, error: OSError) -> None:
        """History goes on in memory: without its journal, it only does not outlive this process."""
        self._say(f"keeps no journal {self._place.journal}: {error}")
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _say(self, what: str) -> None:
        print(f"history worker {self._place.number} {what}", file=sys.stderr)

    def record(self, rollout_id: int, rollouts: list[PromptRollout]) -> None:
        """Keep the responses of training step `rollout_id` and index them, off every critical path."""
        records = [Record(one.prompt_key, rollout_id, one.pieces, one.lengths) for one in rollouts]
        if self._journal is None:
            for one in records:
                self._shard.record(one.prompt_key, one.rollout_id, one.pieces, one.lengths)
        else:
            try:
                self._journal.record(records)
            except OSError as error:
                self._give_up_journal(error)
        for one in records:
            self._shard.index(one.prompt_key)

    def index(self, prompt_key: str) -> np.ndarray | None:
        """The prompt's draft index (history/index.py), or None if nothing is known of it."""
        return self._shard.index(prompt_key)

    def prompts(self) -> int:
        """How many prompts this worker knows."""
        return self._shard.prompts

    def save(self, path: Path, up_to: int) -> None:
        """Write what is known of the rollouts up to training step `up_to` to a checkpoint's file. Raises OSError."""
        write_records(path, NO_RUN, self._shard.records(up_to))


HistoryWorker = ray.remote(PlainHistoryWorker)


def start_history_workers(
    settings: HistorySettings, journals: Path, checkpoint: Sequence[Path] = ()
) -> list[ray.actor.ActorHandle]:
    """Start the run's history workers; Ray restarts one that dies, as often as it takes.

    `journals` is where they keep them, a directory of this run; `checkpoint` are the files that the workers of the
    resumed run saved, in their order. There may have been another number of them.
    """
    threads = str(max(1, int(settings.cpus_per_worker)))
    variables = {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, **WITHOUT_TORCH}
    token = secrets.token_bytes(TOKEN_BYTES)
    workers = []
    for number in range(settings.workers):
        journal = journals / f"worker-{number}.journal"
        # All of the files: there may be as many as workers, and still be those of another number of workers.
        place = WorkerPlace(number, settings.workers, journal, token, tuple(checkpoint))
        workers.append(
            HistoryWorker.options(
                num_cpus=settings.cpus_per_worker,
                max_restarts=-1,
                runtime_env={"env_vars": variables},
            ).remote(place)
        )
    return workers
