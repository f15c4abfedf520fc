"""The streaming pipeline's trainer (RhymeRL 4.2 and 6): what it puts into OpenRLHF's asynchronous training.

Generator and trainer are two actors, as in OpenRLHF's asynchronous training, whose loops and checkpoints they keep
(`training/trainer_async.py`). Between them prompt groups go one by one instead of whole batches. Engines generate ahead
of the trainer (`StreamedGeneration`), and the trainer takes prompt groups as they end (`StreamedBatches`). Forward
passes (policy, reference, critic, reward model) begin when whole prompt groups are there (`StreamingExperienceMaker`).
Checked against OpenRLHF 0.11.2 `trainer/ppo_trainer_async.py` and `trainer/ppo_utils/experience_maker.py`.

Invariants:
- A step trains on its own prompts, each with all its samples, at most one step off policy. `pipeline/batch.py` holds
  that, also for what --histopipe.defer, dynamic filtering and rewards that do not come exchange with the next step.
- A checkpoint holds the data loader's state right after the step's prompts were drawn.
- The micro-batches are those that upstream would make of the whole step in the same order. Each is computed once, with
  the weights that upstream would use: the policy is not trained in between.
- Upstream shapes rewards and computes advantages, on the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.training.trainer_async import AsyncParts, QueuedBatches  # first: installs the shims where needed

import ray  # isort: skip
from ray.util.queue import Empty

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.pipeline.batch import EXCHANGED, TAKEN_AHEAD, Batches, PromptGroup, StepEnd
from rhyme_openrlhf.pipeline.controller import SOURCE, STEPS_AHEAD, Pipeline
from rhyme_openrlhf.pipeline.generator import PipelineSamplesGenerator
from rhyme_openrlhf.pipeline.step_planner import StepPlanner
from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.training.experience import RhymeExperienceMaker

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
    """An item that travels through a queue unopened.

    The queue's actor would import OpenRLHF to read a prompt group, which takes seconds at the first one.
    """

    content: Any

    @classmethod
    def of(cls, item: Any) -> Boxed:
        """Return `item` in a box."""
        return cls(ray.put(item))

    def open(self) -> Any:
        """Return what was boxed."""
        return ray.get(self.content)


class StreamingExperienceMaker(RhymeExperienceMaker):
    """Upstream's, with `take` beside `make_experience_batch`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._taken: list[Any] = []
        self._made: list[Any] = []

    def take(self, samples: list[Any], of: int) -> None:
        """Take the samples of a prompt group, of a step that has `of` samples; compute what can be computed."""
        self._taken += samples
        # Micro-batches of like length are only known when all samples are.
        if self.args.train.dynamic_batch_enable:
            return
        unit = self._unit()
        while len(self._taken) >= self._done + unit and (of - self._done) // unit > 1:
            self._make(self._taken[self._done : self._done + unit])

    def _ranks(self) -> int:
        groups = (self.actor_model_group, self.critic_model_group, self.reward_model_group, self.initial_model_group)
        return max(len(one._actor_handlers) // one.duplicate_actors for one in groups if one is not None)

    def _unit(self) -> int:
        """Samples that make one micro-batch for every rank: fewer could not be shared among the ranks."""
        return int(self.args.rollout.micro_batch_size) * self._ranks()

    @property
    def _done(self) -> int:
        return sum(len(experience.index) for experience in self._made)

    def _make(self, samples: list[Any]) -> None:
        first = self._done
        experiences = super().make_experience(super().split_rollout_samples(samples))
        for experience in experiences:
            experience.index = [first + number for number in experience.index]
        self._made += experiences

    def split_rollout_samples(self, rollout_samples: list[Any]) -> list[Any]:
        """Return micro-batches of the samples whose passes are still to be made."""
        first = self._done
        if [id(sample) for sample in rollout_samples] != [id(sample) for sample in self._taken]:
            raise ValueError("the samples of the step are not those that came for it, in that order")
        if first == len(rollout_samples):
            # Prompt groups are missing that the last micro-batches were kept for.
            return []
        rest: list[Any] = super().split_rollout_samples(rollout_samples[first:])
        if self._made and len(rest) < self._ranks():
            # Here, too: what is left is not enough for all ranks, so the last unit is computed again together with it.
            del self._made[-self._ranks() :]
            return self.split_rollout_samples(rollout_samples)
        for experience in rest:
            experience.index = [first + number for number in experience.index]
        return rest

    def make_experience(self, samples_list: list[Any]) -> list[Any]:
        """Return all experiences of the step, in order."""
        made, self._made, self._taken = self._made, [], []
        return [*made, *super().make_experience(samples_list)] if samples_list else made


class StreamedBatches(QueuedBatches):
    """The queue from the generator as OpenRLHF's training loop sees it: gives whole steps, after their prompt groups
    have gone to the experience maker one by one. In place of slots, the generator gets the seconds of each training
    step. `metrics` are of the last step that was given."""

    def __init__(self, queue: Any, slots: Any, trainer: Any) -> None:
        super().__init__(self, self, trainer)
        self._from_generator = queue
        self._to_generator = slots
        self._maker: StreamingExperienceMaker = trainer.experience_maker
        self._weights_soon = trainer._weights.prepare
        self._samples_per_prompt: int = trainer.args.rollout.n_samples_per_prompt
        self._late = EXCHANGED if trainer.services.settings.histopipe.defer else TAKEN_AHEAD
        self._batches: Batches | None = None
        self._training_seconds: float | None = None

    def get(self, block: bool) -> Any:
        """Return the next step (samples, states, pass rate, seconds), evaluation or "done". Raises BatchError."""
        while True:
            item = self._from_generator.get(block=block)
            if isinstance(item, Boxed):
                item = item.open()
            if isinstance(item, PromptGroup):
                if self._batches is None:
                    self._weights_soon()
                    self._batches = Batches(item.trained_in, self._samples_per_prompt, self._late)
                self._batches.add(item)
                self._maker.take(list(item.samples), item.batch * self._samples_per_prompt)
            elif isinstance(item, StepEnd):
                assert self._batches is not None, "a step ended before any of its prompt groups came"
                self.metrics = self._metrics(item)
                samples = self._batches.complete(item.step, item.prompts)
                return samples, item.client_states, item.pass_rate, item.seconds
            else:
                return item

    def _metrics(self, end: StepEnd) -> dict[str, float]:
        metrics = {EXCLUDED_METRIC: float(end.excluded)} if end.excluded else {}
        if self._late == EXCHANGED:
            metrics[DEFERRED_METRIC] = float(end.deferred)
        if end.pass_rate is not None:
            metrics[PASSED_METRIC] = end.pass_rate
        return metrics

    def put(self, step: int, block: bool) -> None:
        """Tell the generator, as the trainer takes the next batch, how long it trained on the last one."""
        if self._training_seconds is not None:
            self._to_generator.put(self._training_seconds, block=block)

    def trained(self, seconds: float) -> None:
        """Note how long the trainer has trained on the last batch."""
        self._training_seconds = seconds


class StreamedGeneration:
    """Has engines generate ahead of the trainer, and sends it prompt groups as they end."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._generator: PipelineSamplesGenerator = actor.samples_generator
        self._services = self._generator.services
        self.evaluated_step = 0
        """The training step that made the weights which are evaluated."""

    def run(self, profile: Profile | None, episode: int, consumed: int) -> None:
        """Generate from `episode` (from 0) to the end of the last epoch; `consumed` prompts were drawn before."""
        actor = self._actor
        self._training_seconds()  # upstream's free slots
        self._say_how_far_ahead()
        self._generator.generate_kwargs = actor.generate_kwargs
        limits = ray.get(self._generator.vllm_engines[0].limits.remote(), timeout=LIMITS_TIMEOUT_SECONDS)
        planner = StepPlanner(self._services, actor.args.rollout.n_samples_per_prompt, profile, limits.running)
        evaluates = actor.eval_dataloader is not None and actor.args.eval.steps != float("inf")
        pipeline = Pipeline(
            self._generator,
            self._services,
            planner,
            self._put,
            self._evaluate if evaluates else None,
            self._training_seconds,
        )
        pipeline.run(self._generator.draw(episode, consumed))
        self._put("done")

    def _say_how_far_ahead(self) -> None:
        rollout = self._actor.args.rollout
        if rollout.vllm_generate_batch_size > rollout.batch_size:
            text = (
                f"engines always have the prompts of {STEPS_AHEAD} steps, {STEPS_AHEAD * rollout.batch_size}: "
                f"--rollout.vllm_generate_batch_size {rollout.vllm_generate_batch_size} changes nothing"
            )
            self._services.record(Note("info", text), SOURCE)

    def _put(self, item: Any) -> None:
        self._actor.rollout_queue.put(Boxed.of(item) if isinstance(item, PromptGroup | StepEnd) else item, block=True)

    def _training_seconds(self) -> list[float]:
        found = []
        while True:
            try:
                found.append(self._actor.rollout_slots.get(block=False))
            except Empty:
                return found

    def _evaluate(self, version: int) -> None:
        """Evaluate the weights of `version`, if it is due; engines do it between two of their turns."""
        if version % self._actor.args.eval.steps:
            return
        self.evaluated_step = version
        with self._generator.evaluation(version):
            metrics = self._actor._run_eval()
        self._put(("eval", version, metrics))


class PipelineParts(AsyncParts):
    """The parts of a pipelined run's actors."""

    experience_maker = StreamingExperienceMaker
    samples_generator = PipelineSamplesGenerator
    source = StreamedBatches
    generation = StreamedGeneration

    @staticmethod
    def prepare(args: SimpleNamespace) -> None:
        """Have a queue for the prompt groups of the steps ahead, their ends and evaluations.

        The queue must never be full, for who waits to put something into it hands out no step.
        """
        args.train.async_queue_size = STEPS_AHEAD * (args.rollout.batch_size + 2) + 1
