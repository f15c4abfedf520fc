"""The asynchronous trainer: generation of the next step beside training of this one, as OpenRLHF does it.

Checked against OpenRLHF 0.11.2 `trainer/ppo_trainer_async.py`, whose coordinator names the other two classes as
module globals.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

from rhyme_openrlhf.training.base_trainer import (  # first: installs the shims where needed
    RhymeTraining,
    wait_for_engines,
)

import openrlhf.trainer.ppo_trainer_async as upstream  # isort: skip
import ray
from ray.util.queue import Full

from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.telemetry.events import Evaluation, StageStarted
from rhyme_openrlhf.training.dispatch import seed_controller
from rhyme_openrlhf.training.engine_profiles import install_step_times
from rhyme_openrlhf.training.failure import FAULTS, is_stop_request, one_sentence
from rhyme_openrlhf.training.samples_generator import GeneratorState, RhymeSamplesGenerator
from rhyme_openrlhf.training.trainer import with_record

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


class RhymeTrainingActor(PlainTrainingActor, RhymeTraining):  # type: ignore[misc, valid-type]
    """Trains on the batches that the generator queues."""

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Upstream's states to resume from; upstream hands the loader's state to the generator, and ours goes along."""
        states = super().init_checkpoint_states()
        states["data_loader_state_dict"] = {
            LOADER: states["data_loader_state_dict"],
            GENERATOR: self._restored_generator,
        }
        return states

    def broadcast_to_vllm(self) -> None:
        """As upstream, which first pauses engines for partial rollout: those that are there."""
        self.leave_out_lost()
        super().broadcast_to_vllm()

    def generator_state(self, client_states: dict[str, Any]) -> GeneratorState:
        """Taken from what the generator queued with the samples: by now it is ahead of them."""
        return client_states.pop(GENERATOR)

    def fit(self, global_step: int = 0) -> None:
        """Train until the generator is done, or the run is asked to end."""
        try:
            self.stop_if_requested()
            super().fit(global_step)
        finally:
            self.close()


class RhymeGenerateSamplesActor(PlainGenerateSamplesActor):  # type: ignore[misc, valid-type]
    """Generates batches ahead of the trainer, as many as the queue holds."""

    samples_generator: RhymeSamplesGenerator
    samples_generator_class: type[RhymeSamplesGenerator] = RhymeSamplesGenerator

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if strategy.services.settings.run.reproducible:
            seed_controller(strategy.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.samples_generator = with_record(self.samples_generator, strategy.services, self.samples_generator_class)
        self.rollout_queue: StateQueue = StateQueue(kwargs["rollout_queue"], self.samples_generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint: the data loader's state, and where the generator stood."""
        super().load_state_dict(state_dict[LOADER])
        self.samples_generator.restore(state_dict[GENERATOR])

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Generate to the end of the last epoch."""
        engines, services = self.samples_generator.vllm_engines, self.samples_generator.services
        wait_for_engines(engines, services)
        # Upstream lets no engine of an asynchronous run sleep.
        install_step_times(engines, services, nullcontext)
        super().fit(*args, **kwargs)

    def _run_eval(self) -> dict[str, float]:
        step, services = self.evaluated_step(), self.samples_generator.services
        services.record(StageStarted(step, "evaluate"), "trainer")
        logs = super()._run_eval()
        services.record(Evaluation(step, {key: float(value) for key, value in logs.items()}), "trainer")
        return logs

    def evaluated_step(self) -> int:
        """The step that an evaluation now belongs to."""
        return self.samples_generator.step


TrainingActor = ray.remote(RhymeTrainingActor)
GenerateSamplesActor = ray.remote(RhymeGenerateSamplesActor)


class RhymePPOTrainerAsync(PlainPPOTrainerAsync):  # type: ignore[misc, valid-type]
    """Starts generator and trainer and waits for both."""

    training_actor: Any = TrainingActor
    generator_actor_class: Any = GenerateSamplesActor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        upstream.TrainingActor = self.training_actor
        upstream.GenerateSamplesActor = self.generator_actor_class
        super().__init__(*args, **kwargs)

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
