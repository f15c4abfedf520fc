"""The asynchronous trainer: generation of the next step beside training of this one, in two actors, as OpenRLHF does.

`RhymePPOTrainerAsync` starts a generator and a trainer with a queue between them, and waits for both. The parts
decide what goes through the queue: whole batches, as upstream (`AsyncParts`), or prompt groups one by one in the
streaming pipeline (`pipeline/trainer.py`). Checked against OpenRLHF 0.11.2 `trainer/ppo_trainer_async.py`, whose
coordinator names the two actors' classes as module globals.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from rhyme_openrlhf.training.trainer import RhymeTraining, record_evaluation, with_record  # first: installs the shims

import openrlhf.trainer.ppo_trainer_async as upstream  # isort: skip
import ray
from ray.util.queue import Full

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.telemetry.events import StageStarted
from rhyme_openrlhf.telemetry.services import leave_out
from rhyme_openrlhf.training.engines import install_profiles, wait_for_engines
from rhyme_openrlhf.training.experience import RhymeExperienceMaker
from rhyme_openrlhf.training.failure import FAULTS, is_stop_request, one_sentence
from rhyme_openrlhf.training.reproducible import seed_controller
from rhyme_openrlhf.training.samples_generator import GeneratorState, RhymeSamplesGenerator
from rhyme_openrlhf.training.trainer import SOURCE
from rhyme_openrlhf.weights.offers import WeightOffers

PlainTrainingActor = plain_class(upstream.TrainingActor, __name__, "PlainTrainingActor")
PlainGenerateSamplesActor = plain_class(upstream.GenerateSamplesActor, __name__, "PlainGenerateSamplesActor")
PlainPPOTrainerAsync = plain_class(upstream.PPOTrainerAsync, __name__, "PlainPPOTrainerAsync")


logger = logging.getLogger(__name__)

# The queue is full only while the trainer is busy with the batch before.
DONE_TIMEOUT_SECONDS = 10
# What is left of the step that the trainer is in, and the checkpoint itself.
SAVE_TIMEOUT_SECONDS = 600

# Where our generator's state travels beside upstream's: with each batch, and back to the generator at a resume.
GENERATOR = "rhyme_generator"
LOADER = "loader"


class QueuedBatches:
    """The source of a trainer to which the generator queues whole batches, each with the generator's state in it.

    `queue` and `slots` are what upstream's training loop takes batches from, and gives their slots back to.
    """

    seconds: float | None = None
    metrics: dict[str, float]

    def __init__(self, queue: Any, slots: Any, trainer: RhymeTrainingActor) -> None:
        self.queue = queue
        self.slots = slots
        self.metrics = {}

    def state_after(self, client_states: dict[str, Any]) -> GeneratorState:
        """Return what the generator queued with the samples: by now the generator is ahead of them."""
        state: GeneratorState = client_states.pop(GENERATOR)
        return state

    def trained(self, seconds: float) -> None:
        """Note how long the trainer has trained on the last batch."""


class Generation(Protocol):
    """The way in which the generator's actor generates."""

    evaluated_step: int
    """The training step that made the weights which are evaluated."""

    def run(self, profile: Profile | None, episode: int, consumed: int) -> None:
        """Generate from `episode` (from 0) to the end of the last epoch; `consumed` prompts were drawn before."""


class QueuedGeneration:
    """Generates batches ahead of the trainer, as upstream, as many as the queue holds."""

    def __init__(self, actor: RhymeGenerateSamplesActor) -> None:
        self._actor = actor
        actor.rollout_queue = StateQueue(actor.rollout_queue, actor.samples_generator)

    @property
    def evaluated_step(self) -> int:
        """The last step that samples were generated for."""
        return self._actor.samples_generator.step

    def run(self, profile: Profile | None, episode: int, consumed: int) -> None:
        """Generate as upstream."""
        PlainGenerateSamplesActor.fit(self._actor, episode, consumed)


class StateQueue:
    """The queue to the trainer as the generator sees it: puts the generator's state into each batch."""

    def __init__(self, queue: Any, generator: RhymeSamplesGenerator) -> None:
        self._queue = queue
        self._generator = generator

    def put(self, item: Any, block: bool) -> None:
        """Queue a batch (samples, client states, pass rate, seconds), an evaluation or "done", as upstream."""
        if item != "done" and item[0] != "eval":
            item[1][GENERATOR] = self._generator.state()
        self._queue.put(item, block=block)


class AsyncParts:
    """The parts of an asynchronous run's actors: upstream's way. A class, because Ray brings a class by its name."""

    experience_maker: type[RhymeExperienceMaker] = RhymeExperienceMaker
    samples_generator: type[RhymeSamplesGenerator] = RhymeSamplesGenerator
    source: Any = QueuedBatches
    generation: Any = QueuedGeneration

    @staticmethod
    def prepare(args: SimpleNamespace) -> None:
        """Change what upstream's coordinator reads of the arguments."""


class RhymeTrainingActor(PlainTrainingActor, RhymeTraining):  # type: ignore[misc, valid-type]
    """Trains on what the generator queues."""

    source: QueuedBatches

    def __init__(self, *args: Any, parts: type[AsyncParts] = AsyncParts, **kwargs: Any) -> None:
        self.experience_maker_class = parts.experience_maker
        super().__init__(*args, **kwargs)
        self.source = parts.source(kwargs["rollout_queue"], kwargs["rollout_slots"], self)
        self.rollout_queue, self.rollout_slots = self.source.queue, self.source.slots

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Return upstream's states to resume from; upstream hands the loader's to the generator, and ours go along."""
        states = super().init_checkpoint_states()
        states["data_loader_state_dict"] = {
            LOADER: states["data_loader_state_dict"],
            GENERATOR: self._restored_generator,
        }
        return states

    def broadcast_to_vllm(self) -> None:
        """Bring weights to the engines as upstream, which keeps that out of an evaluation by a lock.

        Engines that load by themselves, between two turns, need no lock.
        """
        if isinstance(self._weights, WeightOffers):
            RhymeTraining.broadcast_to_vllm(self)
            return
        # Only those that are there can be paused.
        leave_out(self.vllm_engines, self.services)
        super().broadcast_to_vllm()

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        """Do one training step, and tell the source how long it took."""
        status, step = super().train_step(rollout_samples, global_step)
        self.source.trained(status["timing/ppo_train"])
        return status, step

    def fit(self, global_step: int = 0) -> None:
        """Train until the generator is done, or the run is asked to end."""
        try:
            self.stop_if_requested()
            super().fit(global_step)
            self.finish_training()
        finally:
            self.close()
        if isinstance(self._weights, WeightOffers):
            self._weights.collect()


class RhymeGenerateSamplesActor(PlainGenerateSamplesActor):  # type: ignore[misc, valid-type]
    """Generates ahead of the trainer."""

    samples_generator: RhymeSamplesGenerator

    def __init__(
        self, pretrain: str, strategy: Any, *args: Any, parts: type[AsyncParts] = AsyncParts, **kwargs: Any
    ) -> None:
        if strategy.services.settings.run.reproducible:
            seed_controller(strategy.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.services = strategy.services
        self.samples_generator = with_record(self.samples_generator, self.services, parts.samples_generator)
        self._generation: Generation = parts.generation(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint: the data loader's state, and where the generator stood."""
        super().load_state_dict(state_dict[LOADER])
        self.samples_generator.restore(state_dict[GENERATOR])

    def fit(self, episode: int, total_consumed_prompts: int) -> None:
        """Generate to the end of the last epoch."""
        engines = self.samples_generator.vllm_engines
        wait_for_engines(engines, self.services)
        self.samples_generator.prepare()
        # Upstream lets no engine of an asynchronous run sleep.
        profile = install_profiles(engines, self.services, nullcontext)
        self._generation.run(profile, episode, total_consumed_prompts)

    def _run_eval(self) -> dict[str, float]:
        step = self._generation.evaluated_step
        self.services.record(StageStarted(step, "evaluate"), SOURCE)
        logs: dict[str, float] = super()._run_eval()
        record_evaluation(self.services, step, logs)
        return logs


TrainingActor = ray.remote(RhymeTrainingActor)
GenerateSamplesActor = ray.remote(RhymeGenerateSamplesActor)


class RhymePPOTrainerAsync(PlainPPOTrainerAsync):  # type: ignore[misc, valid-type]
    """Starts generator and trainer and waits for both."""

    def __init__(
        self, pretrain: str, strategy: Any, *args: Any, parts: type[AsyncParts] = AsyncParts, **kwargs: Any
    ) -> None:
        parts.prepare(strategy.args)
        upstream.TrainingActor = SimpleNamespace(remote=partial(TrainingActor.remote, parts=parts))
        upstream.GenerateSamplesActor = SimpleNamespace(remote=partial(GenerateSamplesActor.remote, parts=parts))
        super().__init__(pretrain, strategy, *args, **kwargs)

    def fit(self) -> None:
        """Train to the end; after a fault, with a checkpoint of the last completed step where one can be made."""
        try:
            super().fit()
        except FAULTS as error:
            if is_stop_request(error):  # the trainer saved what can be saved
                raise
            self._save(f"the run failed ({one_sentence(error)})")
            raise

    def _save(self, reason: str) -> None:
        try:
            # The trainer may be waiting for a batch that will not come.
            self.rollout_queue.put("done", timeout=DONE_TIMEOUT_SECONDS)
            ray.get(self.trainer_actor.save_now.remote(reason), timeout=SAVE_TIMEOUT_SECONDS)
        except (Full, ray.exceptions.RayError):
            # Nothing can be saved: the fault that led here is what the user needs to hear of.
            logger.warning("no checkpoint could be saved after the fault")


PPOTrainerAsync = ray.remote(RhymePPOTrainerAsync)
