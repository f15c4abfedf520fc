"""The streaming pipeline's trainer (RhymeRL 4.2 and 6), beside OpenRLHF's synchronous and asynchronous ones.

Generator and trainer are two actors, as in OpenRLHF's asynchronous training, whose loops and checkpoints they keep.
Between them prompt groups go one by one instead of whole batches. Checked against OpenRLHF 0.11.2
`trainer/ppo_trainer_async.py`.

Invariants: what is trained in a step is the step's own prompts, each with all its samples, at most one step off policy
(`pipeline/step_buffer.py`, also for what --histopipe.defer and dynamic filtering exchange with the next step); a
checkpoint holds the data loader's state right after the step's prompts were drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.training.base_trainer import (  # first: installs the shims where needed
    RhymeTraining,
    wait_for_engines,
)

import ray  # isort: skip
from ray.util.queue import Empty

from rhyme_openrlhf.pipeline.controller import SOURCE, STEPS_AHEAD, Pipeline
from rhyme_openrlhf.pipeline.experience import StreamingExperienceMaker
from rhyme_openrlhf.pipeline.generator import PipelineSamplesGenerator
from rhyme_openrlhf.pipeline.step_buffer import EXCHANGED, OWN_ALONE, TAKEN_AHEAD, PromptGroup, StepBuffer
from rhyme_openrlhf.pipeline.step_in_flight import StepEnd
from rhyme_openrlhf.pipeline.step_planner import StepPlanner
from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.training.engine_profiles import install_step_times
from rhyme_openrlhf.training.trainer_async import (
    RhymeGenerateSamplesActor,
    RhymePPOTrainerAsync,
    RhymeTrainingActor,
)
from rhyme_openrlhf.weights.check import WeightCheck
from rhyme_openrlhf.weights.offers import OfferedWeightCheck, WeightOffers
from rhyme_openrlhf.weights.sync import WeightSync

# Engines answer from their actor; only their start takes long, and that is waited for before.
LIMITS_TIMEOUT_SECONDS = 60.0
# Among a step's metrics: prompt groups left out of the run so far, because a reward did not come.
EXCLUDED_METRIC = "pipeline/excluded_prompt_groups"
# And those of the step that train in the next.
DEFERRED_METRIC = "pipeline/deferred_prompt_groups"
# The percentage of the step's prompts that was not filtered out; OpenRLHF adds it when the step has been recorded.
PASSED_METRIC = "dynamic_filtering_pass_rate"


@dataclass(frozen=True)
class Boxed:
    """What travels through a queue unopened: its actor would import OpenRLHF to read a prompt group, which takes
    seconds at the first one."""

    content: Any

    @classmethod
    def of(cls, item: Any) -> Boxed:
        """`item` in a box."""
        return cls(ray.put(item))

    def open(self) -> Any:
        """What was boxed."""
        return ray.get(self.content)


class StepStream:
    """The queue from the generator as OpenRLHF's training loop sees it: gives whole steps, after their prompt groups
    have gone to `maker` one by one. `begun()` is called when the first one comes."""

    def __init__(
        self,
        queue: Any,
        maker: StreamingExperienceMaker,
        samples_per_prompt: int,
        late: tuple[int, ...] = OWN_ALONE,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._maker = maker
        self._samples_per_prompt = samples_per_prompt
        self._buffer: StepBuffer | None = None
        self._late = late
        self._begun = begun
        self.metrics: dict[str, float] = {}
        """Of the last step that was given."""

    def get(self, block: bool) -> Any:
        """The next step (samples, client states, pass rate, seconds), evaluation or "done". Raises StepBufferError."""
        while True:
            item = self._queue.get(block=block)
            if isinstance(item, Boxed):
                item = item.open()
            if isinstance(item, PromptGroup):
                if self._buffer is None:
                    self._begun()
                    self._buffer = StepBuffer(item.trained_in, self._samples_per_prompt, self._late)
                self._buffer.add(item)
                self._maker.take(list(item.samples), item.batch * self._samples_per_prompt)
            elif isinstance(item, StepEnd):
                assert self._buffer is not None, "a step ended before any of its prompt groups came"
                self.metrics = {EXCLUDED_METRIC: float(item.excluded)} if item.excluded else {}
                if self._late == EXCHANGED:
                    self.metrics[DEFERRED_METRIC] = float(item.deferred)
                if item.pass_rate is not None:
                    self.metrics[PASSED_METRIC] = item.pass_rate
                samples = self._buffer.complete(item.step, item.prompts)
                return samples, item.client_states, item.pass_rate, item.seconds
            else:
                return item


class TrainerNews:
    """Stands where OpenRLHF's trainer gives a slot back for each batch it takes: says how long it trained before."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.training_seconds: float | None = None

    def put(self, step: int, block: bool) -> None:
        """The trainer takes the next batch, after `step` completed steps."""
        if self.training_seconds is not None:
            self._queue.put(self.training_seconds, block=block)


class RhymePipelineTrainingActor(RhymeTrainingActor):
    """Trains on steps as they come together; offers weights instead of loading them into engines."""

    experience_maker_class = StreamingExperienceMaker
    experience_maker: StreamingExperienceMaker
    _weights: WeightOffers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        samples = self.args.rollout.n_samples_per_prompt
        late = TAKEN_AHEAD if self.args.algo.dynamic_filtering_enable else OWN_ALONE
        if self.services.settings.histopipe.defer:
            late = EXCHANGED
        self.rollout_queue = StepStream(
            kwargs["rollout_queue"], self.experience_maker, samples, late, self._weights.prepare
        )
        self.rollout_slots = TrainerNews(kwargs["rollout_slots"])

    def make_weight_check(self) -> WeightCheck:
        """Engines are asked when they load."""
        return OfferedWeightCheck(self.actor_model_group, self.vllm_engines, self.services)

    def make_weight_sync(self) -> WeightSync:
        """Engines load when they are ready."""
        assert isinstance(self._check, OfferedWeightCheck)
        return WeightOffers(self._check, self.actor_model_group, self.vllm_engines, self.services)

    def broadcast_to_vllm(self) -> None:
        """Without upstream's lock, which keeps a broadcast out of an evaluation: engines load between two turns."""
        RhymeTraining.broadcast_to_vllm(self)

    def step_metrics(self) -> dict[str, float]:
        """The prompt groups that were left out, once there are any; those deferred, where that is allowed; and how many
        passed the filter, where there is one."""
        return self.rollout_queue.metrics

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        """One training step, as the asynchronous trainer's."""
        status, step = super().train_step(rollout_samples, global_step)
        self.rollout_slots.training_seconds = status["timing/ppo_train"]
        return status, step

    def fit(self, global_step: int = 0) -> None:
        """Train until the generator is done, or the run is asked to end."""
        super().fit(global_step)
        self._weights.collect()


class RhymePipelineGenerateSamplesActor(RhymeGenerateSamplesActor):
    """Has engines generate ahead of the trainer, and sends it prompt groups as they end."""

    samples_generator: PipelineSamplesGenerator
    samples_generator_class = PipelineSamplesGenerator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollout_queue = kwargs["rollout_queue"]
        self._evaluated = 0

    def fit(self, episode: int, total_consumed_prompts: int) -> None:
        """Generate to the end of the last epoch."""
        generator = self.samples_generator
        engines, services = generator.vllm_engines, generator.services
        wait_for_engines(engines, services)
        profile = install_step_times(engines, services, nullcontext)
        self._training_seconds()  # upstream's free slots
        self._say_how_far_ahead()
        limits = ray.get(engines[0].limits.remote(), timeout=LIMITS_TIMEOUT_SECONDS)
        samples = self.args.rollout.n_samples_per_prompt
        planner = StepPlanner(services, samples, profile, limits.running)
        evaluates = self.eval_dataloader is not None and self.args.eval.steps != float("inf")
        pipeline = Pipeline(
            generator,
            services,
            planner,
            self._put,
            self._evaluate if evaluates else None,
            self._training_seconds,
            self.generate_kwargs,
        )
        pipeline.run(generator.draw(episode, total_consumed_prompts))
        self._put("done")

    def _say_how_far_ahead(self) -> None:
        prompts, asked = self.args.rollout.batch_size, self.args.rollout.vllm_generate_batch_size
        if asked > prompts:
            text = (
                f"engines always have the prompts of {STEPS_AHEAD} steps, {STEPS_AHEAD * prompts}: "
                f"--rollout.vllm_generate_batch_size {asked} changes nothing"
            )
            self.samples_generator.services.record(Note("info", text), SOURCE)

    def _put(self, item: Any) -> None:
        self.rollout_queue.put(Boxed.of(item) if isinstance(item, PromptGroup | StepEnd) else item, block=True)

    def _training_seconds(self) -> list[float]:
        found = []
        while True:
            try:
                found.append(self.rollout_slots.get(block=False))
            except Empty:
                return found

    def _evaluate(self, version: int) -> None:
        """Evaluate the weights of `version`, if it is due; engines do it between two of their turns."""
        if version % self.args.eval.steps:
            return
        self._evaluated = version
        with self.samples_generator.evaluation(version):
            metrics = self._run_eval()
        self._put(("eval", version, metrics))

    def evaluated_step(self) -> int:
        """The training step that made the weights which are evaluated."""
        return self._evaluated


PipelineTrainingActor = ray.remote(RhymePipelineTrainingActor)
PipelineGenerateSamplesActor = ray.remote(RhymePipelineGenerateSamplesActor)


class RhymePPOTrainerPipeline(RhymePPOTrainerAsync):
    """Starts generator and trainer of a pipelined run and waits for both."""

    training_actor = PipelineTrainingActor
    generator_actor_class = PipelineGenerateSamplesActor

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # What may be in the queue: the prompt groups of the steps ahead, their ends and evaluations. It must never
        # be full, for who waits to put something into it hands out no step.
        strategy.args.train.async_queue_size = STEPS_AHEAD * (strategy.args.rollout.batch_size + 2) + 1
        super().__init__(pretrain, strategy, *args, **kwargs)


PPOTrainerPipeline = ray.remote(RhymePPOTrainerPipeline)
