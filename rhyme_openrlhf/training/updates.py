"""Counts what a training step did to the models: micro-batches, and the optimizer steps that they were applied in.

DeepSpeed counts micro-batches through the whole run and takes an optimizer step after every --train.batch_size samples.
OpenRLHF 0.11.2 gives it every sample of a step, but does not look whether they divide. Samples that are left wait, as
gradients, for the next step's: from then on each update mixes two steps. Ranks with different numbers of micro-batches
wait for each other without an end.

Invariants: a step that ranks could not share is refused before it is trained on. A step that divides leaves nothing.
Where OpenRLHF itself leaves something (an epoch's smaller last step, filtered prompts), the run goes on and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.telemetry.services import RunServices

SOURCE = "trainer"
POLICY = "policy"
# A rank answers with three numbers, right after it trained.
COUNT_TIMEOUT_SECONDS = 300.0


class UpdateError(RuntimeError):
    """The samples of a training step do not make whole updates; the message says of which step, and the numbers."""


@dataclass(frozen=True)
class Updates:
    """Counts of what a rank of a model has trained so far; `accumulation` micro-batches make one optimizer step."""

    micro_batches: int
    optimizer_steps: int
    accumulation: int

    @property
    def waiting(self) -> int:
        """Micro-batches whose gradients wait for the next optimizer step."""
        return self.micro_batches % self.accumulation

    @classmethod
    def of(cls, engine: Any) -> Updates:
        """Return the counts of a DeepSpeed engine."""
        return cls(engine.micro_steps, engine.global_steps, engine.gradient_accumulation_steps())


def micro_batches_of_ranks(sizes: Sequence[int], ranks: int, micro_batch: int) -> list[int]:
    """Return the micro-batches that each data-parallel rank trains, of experiences with these numbers of samples.

    Upstream gives each rank the same number of experiences, and the last ones what is left (`async_run_method_batch`);
    a rank leaves out what fills no micro-batch (its data loader's `drop_last`).
    """
    share = -(-len(sizes) // ranks)
    return [sum(sizes[rank * share : (rank + 1) * share]) // micro_batch for rank in range(ranks)]


def check_shares(step: int, sizes: Sequence[int], ranks: int, micro_batch: int) -> None:
    """Raise UpdateError if ranks would train different numbers of micro-batches of a step."""
    of_ranks = micro_batches_of_ranks(sizes, ranks, micro_batch)
    if len(set(of_ranks)) > 1:
        raise UpdateError(
            f"step {step} has {sum(sizes)} samples, of which {ranks} ranks would train {max(of_ranks)} and "
            f"{min(of_ranks)} micro-batches and then wait for each other for ever. Choose a number of prompts "
            "(--data.max_samples) that --rollout.batch_size divides"
        )


class UpdateCount:
    """Counts the updates of each training step. `models`: upstream's actor groups by name ("policy", "critic")."""

    def __init__(self, services: RunServices, models: Mapping[str, Any], train_batch: int, dynamic: bool) -> None:
        """`train_batch`: samples of an update; `dynamic`: micro-batches are made by length, each rank's of its own."""
        self._services = services
        self._models = models
        self._train_batch = train_batch
        self._dynamic = dynamic
        self._told = False

    def now(self) -> dict[str, Updates]:
        """Return what the first rank of each model has trained so far."""
        counts = [group.async_run_method(method_name="updates")[0] for group in self._models.values()]
        return dict(zip(self._models, ray.get(counts, timeout=COUNT_TIMEOUT_SECONDS), strict=True))

    def changed_nothing(self) -> bool:
        """Return whether the policy's weights are, on all ranks, those that the run began with."""
        ranks = self._models[POLICY].async_run_method(method_name="unchanged")
        return all(ray.get(ranks, timeout=COUNT_TIMEOUT_SECONDS))

    def check(self, step: int, samples: int, before: Mapping[str, Updates]) -> dict[str, float]:
        """Return a step's updates as metrics. Raises UpdateError if a step that divides left micro-batches behind."""
        metrics = {}
        for name, after in self.now().items():
            metrics[f"{name}/optimizer_steps"] = float(after.optimizer_steps - before[name].optimizer_steps)
            if self._dynamic:
                # Upstream tells DeepSpeed of whole updates alone.
                continue
            metrics[f"{name}/micro_batches"] = float(after.micro_batches - before[name].micro_batches)
            if not after.waiting:
                continue
            left = (
                f"step {step} left {after.waiting} of the {name}'s micro-batches without an optimizer step, which "
                f"takes {after.accumulation} (--train.batch_size {self._train_batch}; the step had {samples} samples)"
            )
            if not before[name].waiting and samples % self._train_batch == 0:
                raise UpdateError(left)
            if not self._told:
                self._told = True
                text = f"{left}: the next step applies them, as in OpenRLHF, and each later update mixes two steps"
                self._services.record(Note("warning", text), SOURCE)
        return metrics
