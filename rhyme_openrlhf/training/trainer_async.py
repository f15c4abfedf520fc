"""The asynchronous trainer: generation of the next step beside training of this one, as OpenRLHF does it.

Checked against OpenRLHF 0.11.2 `trainer/ppo_trainer_async.py`, whose coordinator names the other two classes as
module globals.
"""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.training.base_trainer import (  # first: installs the shims where needed
    RhymeTraining,
    wait_for_engines,
)

import openrlhf.trainer.ppo_trainer_async as upstream  # isort: skip
import ray

from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.rollout.samples_generator import RhymeSamplesGenerator
from rhyme_openrlhf.telemetry.events import Evaluation
from rhyme_openrlhf.training.seeding import seed_controller
from rhyme_openrlhf.training.trainer import with_record

PlainTrainingActor = plain_class(upstream.TrainingActor, __name__, "PlainTrainingActor")
PlainGenerateSamplesActor = plain_class(upstream.GenerateSamplesActor, __name__, "PlainGenerateSamplesActor")
PlainPPOTrainerAsync = plain_class(upstream.PPOTrainerAsync, __name__, "PlainPPOTrainerAsync")


class RhymeTrainingActor(PlainTrainingActor, RhymeTraining):  # type: ignore[misc, valid-type]
    """Trains on the batches that the generator queues."""

    def fit(self, global_step: int = 0) -> None:
        """Train until the generator is done."""
        try:
            super().fit(global_step)
        finally:
            self.close()


class RhymeGenerateSamplesActor(PlainGenerateSamplesActor):  # type: ignore[misc, valid-type]
    """Generates batches ahead of the trainer, as many as the queue holds."""

    samples_generator: RhymeSamplesGenerator

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if strategy.services.settings.run.reproducible:
            seed_controller(strategy.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.samples_generator = with_record(self.samples_generator, strategy.services)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Generate to the end of the last epoch."""
        wait_for_engines(self.samples_generator.vllm_engines, self.samples_generator.services)
        super().fit(*args, **kwargs)

    def _run_eval(self) -> dict[str, float]:
        logs = super()._run_eval()
        values = {key: float(value) for key, value in logs.items()}
        generator = self.samples_generator
        generator.services.record(Evaluation(generator.step, values), "trainer")
        return logs


TrainingActor = ray.remote(RhymeTrainingActor)
GenerateSamplesActor = ray.remote(RhymeGenerateSamplesActor)


class RhymePPOTrainerAsync(PlainPPOTrainerAsync):  # type: ignore[misc, valid-type]
    """Starts generator and trainer and waits for both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        upstream.TrainingActor = TrainingActor
        upstream.GenerateSamplesActor = GenerateSamplesActor
        super().__init__(*args, **kwargs)


PPOTrainerAsync = ray.remote(RhymePPOTrainerAsync)
