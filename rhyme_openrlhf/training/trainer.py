"""The synchronous trainer, and the parts that both kinds of training have around OpenRLHF's training step.

`RhymeTraining` is our one subclass of upstream's BasePPOTrainer, and stands below each of upstream's trainer classes:

    class RhymePPOTrainer(PlainPPOTrainer, RhymeTraining)   # method order: ours, PlainPPOTrainer, RhymeTraining, Base

So upstream's own overrides (the async trainer's lock around a weight broadcast) stay outside, and only the innermost
steps change. `RhymeTraining` has parts: the source of its samples, the weight sync and its check, the checkpoints, the
experience maker. Checked against OpenRLHF 0.11.2 `trainer/ppo_trainer.py`.

Invariants: the samples trained, their order and the losses are upstream's. The weights after training step n are
version n.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from rhyme_openrlhf.garbage import kept_for_good
from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

with kept_for_good():
    import openrlhf.trainer.ppo_trainer as upstream
import ray
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.telemetry.events import (
    REWARD_METRIC,
    ROLLOUT_PART,
    Evaluation,
    Note,
    Stage,
    StageStarted,
    TrainStep,
)
from rhyme_openrlhf.telemetry.services import RunServices, leave_out
from rhyme_openrlhf.training.checkpoint import CheckpointError, RunCheckpoints
from rhyme_openrlhf.training.checkpoint_directory import BEST, tag_of
from rhyme_openrlhf.training.engines import install_profiles, wait_for_engines
from rhyme_openrlhf.training.experience import RhymeExperienceMaker
from rhyme_openrlhf.training.failure import FAULTS, STOPPED_ON_REQUEST, StopRequested, one_sentence
from rhyme_openrlhf.training.learning import Learning
from rhyme_openrlhf.training.reproducible import seed_controller
from rhyme_openrlhf.training.samples_generator import LOADER_FINISHED, GeneratorState, RhymeSamplesGenerator
from rhyme_openrlhf.training.updates import POLICY, UpdateCount
from rhyme_openrlhf.weights.check import CheckedTokens, WeightCheck
from rhyme_openrlhf.weights.offers import OfferedWeightCheck, WeightOffers
from rhyme_openrlhf.weights.sync import WeightSync

SOURCE = "trainer"
# Upstream's names for the parts of a step, and ours.
PARTS = {"timing/make_experience": "experience", "timing/ppo_train": "train", "timing/broadcast": "sync"}


class SampleSource(Protocol):
    """The source of a trainer's samples, as far as a training step asks."""

    @property
    def seconds(self) -> float | None:
        """Seconds of the step's rollout stage, where the stage does not overlap with training; else None."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that the source adds to the step's."""

    def state_after(self, client_states: dict[str, Any]) -> GeneratorState:
        """Return where the samples generator stood when it had given out the step's samples."""


class RhymeTraining(upstream.BasePPOTrainer):
    """Weight buffer, history and run record around upstream's training step."""

    experience_maker: RhymeExperienceMaker
    experience_maker_class: type[RhymeExperienceMaker] = RhymeExperienceMaker
    source: SampleSource

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        self.services: RunServices = strategy.services
        self._version = 0
        self._checkpoints = RunCheckpoints(self.services, self.args, self.actor_model_group, self.critic_model_group)
        self._updates = UpdateCount(
            self.services,
            {POLICY: self.actor_model_group} | ({"critic": self.critic_model_group} if self.critic_model_group else {}),
            self.args.train.batch_size,
            self.args.train.dynamic_batch_enable,
        )
        self._restored_generator = GeneratorState(0)
        self._learning = Learning(self.args)
        maker: Any = self.experience_maker
        self.experience_maker = self.experience_maker_class(
            maker.actor_model_group,
            maker.critic_model_group,
            maker.reward_model_group,
            maker.initial_model_group,
            maker.kl_ctl,
            strategy,
            self.tokenizer,
        )
        self.experience_maker.services = self.services
        self._check, self._weights = self._weight_parts()

    def _weight_parts(self) -> tuple[WeightCheck, WeightSync | None]:
        """Return the check of engines against the policy after the first syncs, and the weight buffer.

        The buffer is None where weights go by OpenRLHF's own broadcast. In a pipelined run engines load when they are
        ready, and are asked then.
        """
        policy, engines, services = self.actor_model_group, self.vllm_engines or [], self.services
        tokens = CheckedTokens.of(self.tokenizer, self.args.train.seed, self.args.data.max_len)
        if services.settings.histopipe.enable:
            offered = OfferedWeightCheck(policy, engines, services, tokens)
            return offered, WeightOffers(offered, policy, engines, services)
        by_buffer = services.settings.weights_by_buffer and engines
        check = WeightCheck(policy, engines, services, tokens)
        return check, WeightSync(policy, engines, services) if by_buffer else None

    def _stage(self, stage: Stage, step: int) -> None:
        self.services.record(StageStarted(step, stage), SOURCE)

    def _warn(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.services.record(Note("warning", text), SOURCE)

    # --- a training step

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        """Do one training step on `rollout_samples`, as upstream, with what belongs before and after it."""
        step = global_step + 1
        leave_out(self.vllm_engines, self.services)
        self._version = self.experience_maker.step = step
        self._score_before(step)
        self._stage("experience", step)
        status, step = super().train_step(rollout_samples, global_step)
        self._score_after(step)
        if self.services.settings.run.reproducible:
            self.experience_maker.wait_for_history()
        self._record(step, status)
        return status, step

    # The checks are around upstream's step, not inside it: there, partial rollout has the engines paused.

    def _score_before(self, step: int) -> None:
        if self._check.needs_scores:
            self._stage("check", step)
            with self.engines_awake():
                self._check.before_step()

    def _score_after(self, step: int) -> None:
        if self._check.is_due:
            self._stage("check", step)
            with self.engines_awake():
                self._check.after_sync(self._version)

    def _record(self, step: int, status: dict[str, Any]) -> None:
        parts = {name: status[key] for key, name in PARTS.items()}
        if self.source.seconds is not None:
            parts[ROLLOUT_PART] = self.source.seconds
        metrics = {
            key: float(value)
            for key, value in status.items()
            if isinstance(value, (int, float)) and not key.startswith("timing/")
        }
        metrics |= self.source.metrics
        metrics.setdefault(REWARD_METRIC, metrics.get("rollout/reward_mean", float("nan")))
        self.services.record(TrainStep(step, self.services.epoch_of(step), parts, metrics), SOURCE)

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """Upstream's update of policy and critic."""
        self._checkpoints.training_begins()
        self._stage("train", global_steps + 1)
        started, before = time.monotonic(), self._updates.now()
        status: dict[str, Any] = super().ppo_train(global_steps)
        status |= self._updates.check(global_steps + 1, self.experience_maker.samples, before)
        self._warn(self._learning.updated(global_steps + 1, status))
        # Of an emulated machine: 0 without --emulate.train_s.
        time.sleep(max(started + self.services.settings.emulate.train_s - time.monotonic(), 0))
        return status

    def broadcast_to_vllm(self) -> None:
        """Bring the policy's weights to every engine, as the version after the current step."""
        self._stage("sync", self._version)
        leave_out(self.vllm_engines, self.services)
        if self._weights is None:
            super().broadcast_to_vllm()
            ray.get([engine.set_weight_version.remote(self._version) for engine in self.vllm_engines])
            return
        if self.args.vllm.enable_sleep:
            # As upstream: the weights' memory is needed now, the KV cache's only when generation starts.
            batch_vllm_engine_call(self.vllm_engines, "wake_up", tags=["weights"])
        self._weights.sync(self._version)

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

    # --- after a step

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: dict[str, Any] | None = None
    ) -> None:
        """Upstream's logs and checkpoints, after every step; with a checkpoint goes what upstream does not save.

        Here, between two steps, the run ends if it is asked to. Raises StopRequested.
        """
        states = client_states if client_states is not None else {}
        self._checkpoints.step_completed(global_step, states, self.source.state_after(states), self.kl_ctl.value)
        if states and logs_dict:
            samples = int(logs_dict["rollout/num_samples"])
            self._warn(self._learning.step_completed(states["episode"] + 1, states["total_consumed_prompts"], samples))
        if global_step % self.args.ckpt.save_steps:
            super().save_logs_and_checkpoints(global_step, logs_dict, states)
        else:
            self._stage("checkpoint", global_step)
            with self._checkpoints.saving(tag_of(global_step)):
                super().save_logs_and_checkpoints(global_step, logs_dict, states)
        self.stop_if_requested()

    def save_best_checkpoint(
        self, eval_metrics: dict[str, float], global_step: int, client_states: dict[str, Any] | None = None
    ) -> None:
        """Upstream's checkpoint of the best evaluation so far, as safe as the others."""
        key = self._detect_eval_metric_key(eval_metrics) if eval_metrics else None
        # As upstream asks it: a metric that is not a number is not the best.
        if key is None or key not in eval_metrics or not eval_metrics[key] > self.best_eval_metric_value:
            super().save_best_checkpoint(eval_metrics, global_step, client_states)
            return
        self._stage("checkpoint", global_step)
        with self._checkpoints.saving(BEST + tag_of(global_step)):
            super().save_best_checkpoint(eval_metrics, global_step, client_states)

    def stop_if_requested(self) -> None:
        """Between two steps: raise StopRequested if the run is asked to end; what can be saved is."""
        if self.services.stop_requested():
            self.save_now(STOPPED_ON_REQUEST)
            # As upstream at its end: what trackers hold back is written.
            for tracker in filter(None, (self.wandb_logger, self.tensorboard_logger)):
                tracker.close()
            raise StopRequested(STOPPED_ON_REQUEST)

    def save_now(self, reason: str) -> bool:
        """Save a checkpoint of the last completed training step, for when what came after it failed.

        Return True if it is there now, or was already, and False if it cannot be made. That is so before the first
        step is completed, while the policy is trained on, with DeepSpeed checkpoints off, and where saving fails (a
        Note says why).
        """
        best = {
            "best_eval_metric_key": self.best_eval_metric_key,
            "best_eval_metric_value": self.best_eval_metric_value,
            "latest_eval_metric_value": self._latest_eval_metric_value,
        }
        return self._checkpoints.save_now(best, reason)

    # --- the run's begin and end

    def finish_training(self) -> None:
        """Judge the whole run before its model is saved. Raises LearningError or CheckpointError."""
        self._warn(self._learning.epoch_ended())
        # A run that resumes where nothing is left has done what it was told.
        if not self._restored_generator.step:
            self._learning.run_ended()
            self._warn(self._learning.weights_compared(self._updates.changed_nothing()))
        self._checkpoints.check_weights()

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Return upstream's states to resume from, and restore everything else that a checkpoint holds.

        Raises CheckpointError if the policy has loaded another checkpoint than the run resumes from, or none.
        """
        states: dict[str, Any] = super().init_checkpoint_states()
        if "global_step" not in states:
            raise CheckpointError(
                f"the policy found no checkpoint to load in {self.args.ckpt.path}: it must be on a file system that "
                "all nodes share"
            )
        self._version = states["global_step"]
        self._restored_generator = self._checkpoints.restore(states["global_step"], self.kl_ctl)
        self._learning.resumed(states.get("total_consumed_prompts", 0))
        if states["data_loader_state_dict"].get(LOADER_FINISHED) and not self._restored_generator.pending:
            # Upstream resumes in the epoch whose last prompts were drawn for this step, and would draw all of its
            # prompts again (OpenRLHF issue 1103).
            states["episode"] += 1
        return states

    def close(self) -> None:
        """Give back what outlives this process: the weight copies in shared memory."""
        if self._weights is not None:
            self._weights.close()


Generator = TypeVar("Generator", bound=RhymeSamplesGenerator)


def with_record(generator: Any, services: Any, ours_class: type[Generator]) -> Generator:
    """Return a samples generator of ours in place of upstream's, on the same data loaders, tokenizer and engines."""
    ours = ours_class(
        strategy=generator.strategy,
        prompts_dataloader=generator.prompts_dataloader,
        eval_dataloader=generator.eval_dataloader,
        tokenizer=generator.tokenizer,
        vllm_engines=generator.vllm_engines,
        services=services,
    )
    ours.start_home()
    ours.tell_known()
    return ours


PlainPPOTrainer = plain_class(upstream.PPOTrainer, __name__, "PlainPPOTrainer")


class RhymePPOTrainer(PlainPPOTrainer, RhymeTraining):  # type: ignore[misc, valid-type]
    """Generate, reward, train, sync: one after the other. Its own samples generator is the source of its samples."""

    samples_generator: RhymeSamplesGenerator

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if strategy.services.settings.run.reproducible:
            seed_controller(strategy.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.source = self.samples_generator = with_record(self.samples_generator, self.services, RhymeSamplesGenerator)

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Return upstream's states to resume from; rollouts go on where they stopped."""
        states = super().init_checkpoint_states()
        self.samples_generator.restore(self._restored_generator)
        return states

    def fit(self, global_step: int = 0) -> None:
        """Train to the end."""
        try:
            wait_for_engines(self.vllm_engines, self.services)
            self.samples_generator.prepare()
            install_profiles(self.vllm_engines, self.services, self.engines_awake)
            self.stop_if_requested()
            super().fit(global_step)
            self.finish_training()
        except FAULTS as error:
            self.save_now(f"the run failed ({one_sentence(error)})")
            raise
        finally:
            self.close()

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        """Upstream's evaluation, noted in the record."""
        self._stage("evaluate", global_step)
        logs: dict[str, float] = super().evaluate(global_step, **generate_kwargs)
        record_evaluation(self.services, global_step, logs)
        return logs


def record_evaluation(services: RunServices, step: int, logs: dict[str, float]) -> None:
    """Send the results of an evaluation after `step` training steps to the record."""
    services.record(Evaluation(step, {key: float(value) for key, value in logs.items()}), SOURCE)


PPOTrainer = ray.remote(RhymePPOTrainer)
