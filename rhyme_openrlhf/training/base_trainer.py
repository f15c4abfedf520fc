"""What our sync and async trainers share, placed between upstream's trainer class and upstream's BasePPOTrainer.

    class RhymePPOTrainer(PlainPPOTrainer, RhymeTraining)   # method order: ours, PlainPPOTrainer, RhymeTraining, Base

So upstream's own overrides (the async trainer's lock around a weight broadcast) stay outside, and only the innermost
steps change. Invariants: the samples trained, their order and the losses are upstream's; the weights after training
step n are version n. Checked against OpenRLHF 0.11.2 `trainer/ppo_trainer.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import ray
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from rhyme_openrlhf.telemetry.events import REWARD_METRIC, ROLLOUT_PART, CheckpointSaved, Note, TrainStep
from rhyme_openrlhf.training.experience import RhymeExperienceMaker
from rhyme_openrlhf.training.recorder import RunServices
from rhyme_openrlhf.training.seeding import in_prompt_order
from rhyme_openrlhf.training.weight_check import WeightCheck
from rhyme_openrlhf.training.weight_sync import WeightSync

SOURCE = "trainer"
# Loading a model of hundreds of GB from a shared file system and capturing CUDA graphs can take half an hour.
ENGINE_START_SECONDS = 3600
# Upstream's names for the parts of a step, and ours.
PARTS = {"timing/make_experience": "experience", "timing/ppo_train": "train", "timing/broadcast": "sync"}


def wait_for_engines(engines: list[Any], services: RunServices) -> None:
    """Wait until every engine has started (upstream lets the first rollout wait), so that no stage starts too early.

    Raises the error of an engine that could not start, or RuntimeError when one takes too long.
    """
    started = time.time()
    try:
        ray.get([engine.ready.remote() for engine in engines], timeout=ENGINE_START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise RuntimeError(f"waited {ENGINE_START_SECONDS} s for {len(engines)} engines to start") from None
    services.record(Note("info", f"all engines are ready ({time.time() - started:.0f} s after the trainer)"), SOURCE)


class RhymeTraining(BasePPOTrainer):
    """Weight buffer, history and run record around upstream's training step."""

    experience_maker: RhymeExperienceMaker

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        self.services: RunServices = strategy.services
        self._version = 0
        upstream_maker: Any = self.experience_maker
        self.experience_maker = RhymeExperienceMaker(
            upstream_maker.actor_model_group,
            upstream_maker.critic_model_group,
            upstream_maker.reward_model_group,
            upstream_maker.initial_model_group,
            upstream_maker.kl_ctl,
            strategy,
            self.tokenizer,
        )
        self.experience_maker.services = self.services
        self._weights = None
        self._check = WeightCheck(self.actor_model_group, self.vllm_engines or [], self.services)
        if self.services.settings.weights.transport == "buffer" and self.vllm_engines:
            self._weights = WeightSync(self.actor_model_group, self.vllm_engines, self.services)

    def rollout_seconds(self) -> float | None:
        """Seconds of this step's rollout stage, where it does not overlap with training; else None."""
        return None

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        """One training step on `rollout_samples`, as upstream."""
        if self.services.settings.run.reproducible:
            rollout_samples = in_prompt_order(rollout_samples)
        self._version = global_step + 1
        self.experience_maker.step = global_step + 1
        # Around upstream's step, not inside it: there, partial rollout has the engines paused.
        if self._check.needs_scores:
            with self._engines_awake():
                self._check.before_step()
        status, step = super().train_step(rollout_samples, global_step)
        if self._check.is_due:
            with self._engines_awake():
                self._check.after_sync(self._version)
        parts = {name: status[key] for key, name in PARTS.items()}
        rollout = self.rollout_seconds()
        if rollout is not None:
            parts[ROLLOUT_PART] = rollout
        metrics = {
            key: float(value)
            for key, value in status.items()
            if isinstance(value, (int, float)) and not key.startswith("timing/")
        }
        metrics.setdefault(REWARD_METRIC, metrics.get("rollout/reward_mean", float("nan")))
        self.services.record(TrainStep(step, self.services.epoch_of(step), parts, metrics), SOURCE)
        return status, step

    @contextmanager
    def _engines_awake(self) -> Iterator[None]:
        """Engines that sleep between rollouts (--vllm.enable_sleep) have neither weights nor KV cache to score with.

        Not run on a GPU yet; without one there is no sleep mode.
        """
        if not self.args.vllm.enable_sleep:
            yield
            return
        batch_vllm_engine_call(self.vllm_engines, "wake_up")
        try:
            yield
        finally:
            batch_vllm_engine_call(self.vllm_engines, "sleep")

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Upstream's states to resume from; the weights they belong to keep their version number."""
        states = super().init_checkpoint_states()
        self._version = states["global_step"]
        return states

    def broadcast_to_vllm(self) -> None:
        """Bring the policy's weights to every engine, as the version after the current step."""
        if self._weights is None:
            super().broadcast_to_vllm()
            ray.get([engine.set_weight_version.remote(self._version) for engine in self.vllm_engines])
            return
        if self.args.vllm.enable_sleep:
            # As upstream: the weights' memory is needed now, the KV cache's only when generation starts.
            batch_vllm_engine_call(self.vllm_engines, "wake_up", tags=["weights"])
        self._weights.sync(self._version)

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: dict[str, Any] | None = None
    ) -> None:
        """Upstream's logs and checkpoints; a checkpoint is noted in the record."""
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        if global_step % self.args.ckpt.save_steps == 0:
            self.services.record(CheckpointSaved(global_step, self.services.checkpoint_path), SOURCE)

    def close(self) -> None:
        """Give back what outlives this process: the weight copies in shared memory."""
        if self._weights is not None:
            self._weights.close()
