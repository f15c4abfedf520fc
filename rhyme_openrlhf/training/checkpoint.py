"""A run's checkpoints as its trainer sees them: OpenRLHF's own, plus what it does not save.

Ours, in `_rhyme/<tag>/` (training/checkpoint_directory.py): the samples generator's state, the random states of
trainer, policy and critic ranks, the KL coefficient, and the history up to the step.

Invariants:
- A checkpoint holds the state right after one completed training step, and nothing of a step begun later.
- Our part is written before OpenRLHF's, and the tag is marked complete after both; a kill at any point leaves the
  checkpoint of before.
- Weights that are not finite are never saved.
- The small states that a checkpoint of the last completed step needs are kept from the end of that step on. So the
  checkpoint can also be written later, as long as the policy was not trained on.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

from rhyme_openrlhf.engine_errors import last_line
from rhyme_openrlhf.history.workers import checkpoint_file
from rhyme_openrlhf.telemetry.events import CheckpointSaved, Note, StageStarted
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.training.checkpoint_directory import CheckpointDirectory, tag_of, write_atomically, write_json
from rhyme_openrlhf.training.reproducible import random_state, set_random_state
from rhyme_openrlhf.training.resume import STATE_FILE, STATE_VERSION
from rhyme_openrlhf.training.samples_generator import GeneratorState

SOURCE = "trainer"
STATES_FILE = "states.pickle"
# A worker with tens of GB of history writes them to a shared file system in minutes.
HISTORY_TIMEOUT_SECONDS = 600
# Model states and optimizer states of hundreds of GB; only limits a checkpoint that a fault made necessary.
MODEL_TIMEOUT_SECONDS = 3600
# A rank only answers with a few kilobytes, but it may still be busy with what it was last told.
RANK_TIMEOUT_SECONDS = 300


class CheckpointError(RuntimeError):
    """A checkpoint does not hold what a run needs to go on from it."""


@dataclass(frozen=True)
class CompletedStep:
    """The state at the end of training step `step`. `client_states` are OpenRLHF's, data loader included."""

    step: int
    client_states: dict[str, Any]
    generator: GeneratorState
    random: dict[str, Any]
    kl_coefficient: float


class RunCheckpoints:
    """Writes and reads our part of the checkpoints. `policy` and `critic` (or None) are upstream's actor groups."""

    def __init__(self, services: RunServices, args: Any, policy: Any, critic: Any) -> None:
        self._services = services
        self._args = args
        self._policy = policy
        self._critic = critic
        self._directory = CheckpointDirectory(Path(args.ckpt.path).absolute(), critic is not None)
        self._last: CompletedStep | None = None
        self._saved_step: int | None = None
        self._training = False

    # --- what the trainer tells

    def training_begins(self) -> None:
        """Note that policy and critic are no longer those of the last completed step."""
        self._training = True

    def step_completed(self, step: int, client_states: dict[str, Any], generator: GeneratorState, kl: float) -> None:
        """Training step `step` is done, its weights are in the engines, nothing of the next has begun."""
        # The loader's state may hold what the loader goes on changing.
        self._last = CompletedStep(step, copy.deepcopy(client_states), generator, random_state(), kl)
        self._training = False

    # --- saving

    @contextmanager
    def saving(self, tag: str) -> Iterator[None]:
        """Around OpenRLHF's save of `tag`: our part before it, the mark that it is complete after it."""
        self.check_weights()
        last = self._last
        if self._args.ckpt.disable_ds or last is None:
            yield
            return
        ours = self._directory.begin(tag)
        states = {
            "generator": dataclasses.asdict(last.generator),
            "random": last.random,
            "kl_coefficient": last.kl_coefficient,
            "policy": self._random_states(self._policy),
            "critic": self._random_states(self._critic),
        }
        write_atomically(ours / STATES_FILE, pickle.dumps(states))
        content = {
            **self._services.checkpoints.more,
            "version": STATE_VERSION,
            "step": last.step,
            "saved": time.strftime("%Y-%m-%d %H:%M:%S"),
            "settings": self._services.checkpoints.settings,
            "history": self._save_history(ours, last.step),
        }
        write_json(ours / STATE_FILE, content)
        yield
        if self._directory.commit(tag):
            self._saved_step = last.step
            self._services.record(CheckpointSaved(last.step, self._services.checkpoint_path), SOURCE)
        else:
            text = (
                f"checkpoint {tag} cannot be resumed from: the policy's node wrote it to {self._directory.path}, but "
                f"the trainer's node ({os.uname().nodename}) does not see it there; --ckpt.path must be on a file "
                "system that all nodes share"
            )
            self._services.record(Note("warning", text), SOURCE)

    def check_weights(self) -> None:
        """Raise CheckpointError if a weight of policy or critic is not finite."""
        for name, group in (("policy", self._policy), ("critic", self._critic)):
            if group is None:
                continue
            ranks = self._wait(group.async_run_method("not_finite"), "the ranks to look at their weights")
            if spoilt := next(filter(None, ranks), ""):
                raise CheckpointError(
                    f"the {name}'s weights are not finite ({spoilt}), so they are not saved: the checkpoints of "
                    "earlier steps are as they were; look at the learning rate and the rewards"
                )

    def save_now(self, best: dict[str, Any], reason: str) -> bool:
        """Save a checkpoint of the last completed step, unless there is one; see `RhymeTraining.save_now`."""
        last = self._last
        if last is None or self._training or self._args.ckpt.disable_ds:
            return False
        if self._saved_step == last.step:
            return True
        tag = tag_of(last.step)
        self._services.record(StageStarted(last.step, "checkpoint"), SOURCE)
        try:
            with self.saving(tag):
                states = {**copy.deepcopy(last.client_states), **best}
                saves = self._policy.async_run_method("save_checkpoint", tag=tag, client_states=states)
                if self._critic is not None:
                    saves += self._critic.async_run_method("save_checkpoint", tag=tag)
                ray.get(saves, timeout=MODEL_TIMEOUT_SECONDS)
        except (ray.exceptions.RayError, CheckpointError, OSError) as error:
            text = f"no checkpoint of step {last.step} could be saved ({reason}): {last_line(error)}"
            self._services.record(Note("warning", text), SOURCE)
            return False
        self._services.record(Note("info", f"saved a checkpoint of step {last.step}: {reason}"), SOURCE)
        return self._saved_step == last.step

    def _random_states(self, group: Any) -> list[dict[str, Any]]:
        if group is None:
            return []
        return self._wait(group.async_run_method("random_state"), "the ranks' random states")

    def _wait(self, refs: list[Any], what: str) -> list[Any]:
        try:
            return list(ray.get(refs, timeout=RANK_TIMEOUT_SECONDS))
        except ray.exceptions.GetTimeoutError:
            raise CheckpointError(f"waited {RANK_TIMEOUT_SECONDS} s for {what}") from None

    def _save_history(self, ours: Path, step: int) -> list[str]:
        """Have each history worker write its part; returns the files' names. A part that fails costs drafts only."""
        workers = self._services.history_workers
        names = [checkpoint_file(number, len(workers)) for number in range(len(workers))]
        saves = [worker.save.remote(ours / name, step) for worker, name in zip(workers, names, strict=True)]
        _, late = ray.wait(saves, num_returns=len(saves), timeout=HISTORY_TIMEOUT_SECONDS) if saves else ([], [])
        saved = []
        for number, (name, save) in enumerate(zip(names, saves, strict=True)):
            try:
                if save in late:
                    raise TimeoutError(f"it did not answer within {HISTORY_TIMEOUT_SECONDS} s")
                ray.get(save)
                saved.append(name)
            except (ray.exceptions.RayError, OSError) as error:
                text = f"history worker {number} is not in checkpoint {ours.name}: {last_line(error)}"
                self._services.record(Note("warning", text), SOURCE)
        return saved

    # --- resuming

    def restore(self, step: int, kl_controller: Any) -> GeneratorState:
        """Restore what our part of the checkpoint holds; `step` is what OpenRLHF's part is of.

        Returns the state that the samples generator goes on from. Raises CheckpointError.
        """
        point = self._services.checkpoints.resume
        if point is None or point.ours is None:
            return GeneratorState(step)
        if point.step != step:
            raise CheckpointError(
                f"OpenRLHF loaded the checkpoint of step {step} from {self._directory.path}, but the run resumes from "
                f"{point.tag}, of step {point.step}: something else changed the directory, start the run again"
            )
        states = pickle.loads((point.ours / STATES_FILE).read_bytes())
        ranks = self._policy.async_run_method("set_random_state", states["policy"])
        if self._critic is not None:
            ranks += self._critic.async_run_method("set_random_state", states["critic"])
        self._wait(ranks, "the ranks to restore their random states")
        set_random_state(states["random"])
        # A fixed coefficient is the user's to change.
        if isinstance(kl_controller, AdaptiveKLController):
            kl_controller.value = states["kl_coefficient"]
        self._saved_step = step
        self._wait_for_history()
        return GeneratorState(**states["generator"])

    def _wait_for_history(self) -> None:
        """Wait until every history worker has read its part, so that the first rollout is drafted from it."""
        workers = self._services.history_workers
        try:
            prompts = ray.get([worker.prompts.remote() for worker in workers], timeout=HISTORY_TIMEOUT_SECONDS)
        except ray.exceptions.RayError as error:
            text = f"the checkpoint's history is not all there: {last_line(error)}"
            self._services.record(Note("warning", text), SOURCE)
            return
        if workers:
            self._services.record(Note("info", f"history of {sum(prompts)} prompts restored"), SOURCE)
