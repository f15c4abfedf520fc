"""The history worker: a Ray actor on CPU that owns some of the prompts (RhymeRL, section 4.2).

Thin: everything it knows is a `HistoryShard`. Invariants: one prompt belongs to one worker (`keys.owner`); a call
never blocks a rollout, because engines ask while their samples already run; a dead worker is restarted by Ray, empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import ray

from rhyme_openrlhf.config import HistorySettings
from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.shard import HistoryShard


@dataclass(frozen=True)
class PromptRollout:
    """The responses of one prompt in one training step: what drafts may come from, and the samples' lengths."""

    prompt_key: str
    pieces: tuple[Piece, ...]
    lengths: tuple[int, ...]


class PlainHistoryWorker:
    """The worker's methods; `HistoryWorker` is the Ray actor class."""

    def __init__(self) -> None:
        self._shard = HistoryShard()

    def record(self, rollout_id: int, rollouts: list[PromptRollout]) -> None:
        """Keep the responses of training step `rollout_id` and index them, off every critical path."""
        for rollout in rollouts:
            self._shard.record(rollout.prompt_key, rollout_id, rollout.pieces, rollout.lengths)
        for rollout in rollouts:
            self._shard.index(rollout.prompt_key)

    def index(self, prompt_key: str) -> np.ndarray | None:
        """The prompt's draft index (history/index.py), or None if nothing is known of it."""
        return self._shard.index(prompt_key)

    def prompts(self) -> int:
        """How many prompts this worker knows."""
        return self._shard.prompts


HistoryWorker = ray.remote(PlainHistoryWorker)


def start_history_workers(settings: HistorySettings) -> list[ray.actor.ActorHandle]:
    """Start the run's history workers; Ray restarts one that dies, as often as it takes."""
    threads = str(max(1, int(settings.cpus_per_worker)))
    caps = {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
    return [
        HistoryWorker.options(
            num_cpus=settings.cpus_per_worker,
            max_restarts=-1,
            runtime_env={"env_vars": caps},
        ).remote()
        for _ in range(settings.workers)
    ]
