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

from rhyme_openrlhf.engine.calls import EngineHandle
from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import ray
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from rhyme_openrlhf.engine_errors import leave_out_lost
from rhyme_openrlhf.telemetry.events import REWARD_METRIC, ROLLOUT_PART, Note, Stage, StageStarted, TrainStep
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.training.checkpoint import CheckpointError, RunCheckpoints
from rhyme_openrlhf.training.checkpoint_directory import BEST, tag_of
from rhyme_openrlhf.training.dispatch import in_prompt_order
from rhyme_openrlhf.training.experience import RhymeExperienceMaker
from rhyme_openrlhf.training.failure import STOPPED_ON_REQUEST, StopRequested
from rhyme_openrlhf.training.samples_generator import LOADER_FINISHED, GeneratorState
from rhyme_openrlhf.weights.check import WeightCheck
from rhyme_openrlhf.weights.sync import WeightSync

SOURCE = "trainer"
# Upstream's names for the parts of a step, and ours.
PARTS = {"timing/make_experience": "experience", "timing/ppo_train": "train", "timing/broadcast": "sync"}


def wait_for_engines(engines: list[EngineHandle], services: RunServices) -> None:
    """Wait until every engine has started (upstream lets the first rollout wait), so that no stage starts too early.

    Raises the error of an engine that could not start, or RuntimeError when one takes too long.
    """
    started = time.time()
    limit = services.settings.limits.stage_s
    try:
        ray.get([engine.ready.remote() for engine in engines], timeout=limit)
    except ray.exceptions.GetTimeoutError:
        raise RuntimeError(f"waited {limit:g} s (--limits.stage_s) for {len(engines)} engines to start") from None
    services.record(Note("info", f"all engines are ready ({time.time() - started:.0f} s after the trainer)"), SOURCE)


class RhymeTraining(BasePPOTrainer):
    """Weight buffer, history and run record around upstream's training step."""

    experience_maker: RhymeExperienceMaker
    experience_maker_class: type[RhymeExperienceMaker] = RhymeExperienceMaker

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        self.services: RunServices = strategy.services
        self._version = 0
        self._checkpoints = RunCheckpoints(self.services, self.args, self.actor_model_group, self.critic_model_group)
        self._restored_generator = GeneratorState(0)
        upstream_maker: Any = self.experience_maker
        self.experience_maker = self.experience_maker_class(
            upstream_maker.actor_model_group,
            upstream_maker.critic_model_group,
            upstream_maker.reward_model_group,
            upstream_maker.initial_model_group,
            upstream_maker.kl_ctl,
            strategy,
            self.tokenizer,
        )
        self.experience_maker.services = self.services
        self._check = self.make_weight_check()
        self._weights = self.make_weight_sync()

    def make_weight_check(self) -> WeightCheck:
        """What compares engines with the policy after the first syncs."""
        return WeightCheck(self.actor_model_group, self.vllm_engines or [], self.services)

    def make_weight_sync(self) -> WeightSync | None:
        """The weight buffer; None where weights go by OpenRLHF's own broadcast."""
        if not self.services.settings.weights_by_buffer or not self.vllm_engines:
            return None
        return WeightSync(self.actor_model_group, self.vllm_engines, self.services)

    def _stage(self, stage: Stage, step: int) -> None:
        self.services.record(StageStarted(step, stage), SOURCE)

    def rollout_seconds(self) -> float | None:
        """Seconds of this step's rollout stage, where it does not overlap with training; else None."""
        return None

    def step_metrics(self) -> dict[str, float]:
        """What a kind of trainer adds to a step's metrics."""
        return {}

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        """One training step on `rollout_samples`, as upstream."""
        if self.services.settings.run.reproducible:
            rollout_samples = in_prompt_order(rollout_samples)
        self.leave_out_lost()
        self._version = global_step + 1
        self.experience_maker.step = global_step + 1
        # Around upstream's step, not inside it: there, partial rollout has the engines paused.
        if self._check.needs_scores:
            self._stage("check", global_step + 1)
            with self.engines_awake():
                self._check.before_step()
        self._stage("experience", global_step + 1)
        status, step = super().train_step(rollout_samples, global_step)
        if self._check.is_due:
            self._stage("check", step)
            with self.engines_awake():
                self._check.after_sync(self._version)
        if self.services.settings.run.reproducible:
            self.experience_maker.wait_for_history()
        parts = {name: status[key] for key, name in PARTS.items()}
        rollout = self.rollout_seconds()
        if rollout is not None:
            parts[ROLLOUT_PART] = rollout
        metrics = {
            key: float(value)
            for key, value in status.items()
            if isinstance(value, (int, float)) and not key.startswith("timing/")
        }
        metrics |= self.step_metrics()
        metrics.setdefault(REWARD_METRIC, metrics.get("rollout/reward_mean", float("nan")))
        self.services.record(TrainStep(step, self.services.epoch_of(step), parts, metrics), SOURCE)
        return status, step

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """Upstream's update of policy and critic."""
        self._checkpoints.training_begins()
        self._stage("train", global_steps + 1)
        started = time.monotonic()
        status: dict[str, Any] = super().ppo_train(global_steps)
        # Of an emulated machine: 0 without --emulate.train_s.
        time.sleep(max(started + self.services.settings.emulate.train_s - time.monotonic(), 0))
        return status

    def leave_out_lost(self) -> None:
        """Go on without engines that are gone, in a run that can."""
        if self.services.settings.outlives_engines and self.vllm_engines:
            leave_out_lost(self.vllm_engines)

    @contextmanager
    def engines_awake(self) -> Iterator[None]:
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
        """Upstream's states to resume from, and everything else that a checkpoint holds.

        Raises CheckpointError if the policy has loaded another checkpoint than the run resumes from, or none.
        """
        states = super().init_checkpoint_states()
        if "global_step" not in states:
            raise CheckpointError(
                f"the policy found no checkpoint to load in {self.args.ckpt.path}: it must be on a file system that "
                "all nodes share"
            )
        self._version = states["global_step"]
        self._restored_generator = self._checkpoints.restore(states["global_step"], self.kl_ctl)
        if states["data_loader_state_dict"].get(LOADER_FINISHED) and not self._restored_generator.pending:
            # Upstream resumes in the epoch whose last prompts were drawn for this step, and would draw all of its
            # prompts again (OpenRLHF issue 1103).
            states["episode"] += 1
        return states

    def generator_state(self, client_states: dict[str, Any]) -> GeneratorState:
        """Where the samples generator stood when it had given out the step's samples."""
        raise NotImplementedError

    def broadcast_to_vllm(self) -> None:
        """Bring the policy's weights to every engine, as the version after the current step."""
        self._stage("sync", self._version)
        self.leave_out_lost()
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
        """Upstream's logs and checkpoints, after every step; with a checkpoint goes what upstream does not save.

        Here, between two steps, the run ends if it is asked to. Raises StopRequested.
        """
        states = client_states if client_states is not None else {}
        generator = self.generator_state(states)
        self._checkpoints.step_completed(global_step, states, generator, self.kl_ctl.value)
        if global_step % self.args.ckpt.save_steps:
            super().save_logs_and_checkpoints(global_step, logs_dict, states)
        else:
            self._stage("checkpoint", global_step)
            with self._checkpoints.saving(tag_of(global_step)):
                super().save_logs_and_checkpoints(global_step, logs_dict, states)
        self.stop_if_requested()

    def stop_if_requested(self) -> None:
        """Between two steps: raise StopRequested if the run is asked to end; what can be saved is."""
        if self.services.stop_requested():
            self.save_now(STOPPED_ON_REQUEST)
            # As upstream at its end: what trackers hold back is written.
            for tracker in filter(None, (self.wandb_logger, self.tensorboard_logger)):
                tracker.close()
            raise StopRequested(STOPPED_ON_REQUEST)

    def save_best_checkpoint(
        self, eval_metrics: dict[str, float], global_step: int, client_states: dict[str, Any] | None = None
    ) -> None:
        """Upstream's checkpoint of the best evaluation so far, as safe as the others."""
        key = self._detect_eval_metric_key(eval_metrics) if eval_metrics else None
        if key is None or key not in eval_metrics or eval_metrics[key] <= self.best_eval_metric_value:
            super().save_best_checkpoint(eval_metrics, global_step, client_states)
            return
        self._stage("checkpoint", global_step)
        with self._checkpoints.saving(BEST + tag_of(global_step)):
            super().save_best_checkpoint(eval_metrics, global_step, client_states)

    def save_now(self, reason: str) -> bool:
        """Save a checkpoint of the last completed training step, for when what came after it failed.

        True if it is there now, or was already. False if it cannot be made: no step was completed since the start,
        the policy has been trained on since, DeepSpeed checkpoints are off, or saving failed (a Note says why).
        """
        best = {
            "best_eval_metric_key": self.best_eval_metric_key,
            "best_eval_metric_value": self.best_eval_metric_value,
            "latest_eval_metric_value": self._latest_eval_metric_value,
        }
        return self._checkpoints.save_now(best, reason)

    def close(self) -> None:
        """Give back what outlives this process: the weight copies in shared memory."""
        if self._weights is not None:
            self._weights.close()
