"""The synchronous trainer: OpenRLHF's controller with our training step and samples generator."""

from __future__ import annotations

from typing import Any, TypeVar

from rhyme_openrlhf.training.base_trainer import (  # first: installs the shims where needed
    RhymeTraining,
    wait_for_engines,
)

import openrlhf.trainer.ppo_trainer as upstream  # isort: skip
import ray

from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.telemetry.events import Evaluation, StageStarted
from rhyme_openrlhf.training.dispatch import seed_controller
from rhyme_openrlhf.training.engine_profiles import install_step_times
from rhyme_openrlhf.training.failure import FAULTS, one_sentence
from rhyme_openrlhf.training.samples_generator import GeneratorState, RhymeSamplesGenerator

PlainPPOTrainer = plain_class(upstream.PPOTrainer, __name__, "PlainPPOTrainer")


Generator = TypeVar("Generator", bound=RhymeSamplesGenerator)


def with_record(generator: Any, services: Any, ours_class: type[Generator]) -> Generator:
    """A samples generator of ours in place of upstream's, on the same data loaders, tokenizer and engines."""
    ours = ours_class(
        strategy=generator.strategy,
        prompts_dataloader=generator.prompts_dataloader,
        eval_dataloader=generator.eval_dataloader,
        tokenizer=generator.tokenizer,
        vllm_engines=generator.vllm_engines,
        services=services,
    )
    ours.start_home()
    return ours


class RhymePPOTrainer(PlainPPOTrainer, RhymeTraining):  # type: ignore[misc, valid-type]
    """Generate, reward, train, sync: one after the other."""

    samples_generator: RhymeSamplesGenerator

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if strategy.services.settings.run.reproducible:
            seed_controller(strategy.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.samples_generator = with_record(self.samples_generator, self.services, RhymeSamplesGenerator)

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Upstream's states to resume from; rollouts go on where they stopped."""
        states = super().init_checkpoint_states()
        self.samples_generator.restore(self._restored_generator)
        return states

    def generator_state(self, client_states: dict[str, Any]) -> GeneratorState:
        """Where this trainer's own samples generator stands."""
        return self.samples_generator.state()

    def rollout_seconds(self) -> float:
        """Seconds the last rollout stage took."""
        return self.samples_generator.seconds

    def fit(self, global_step: int = 0) -> None:
        """Train to the end."""
        try:
            wait_for_engines(self.vllm_engines, self.services)
            install_step_times(self.vllm_engines, self.services, self.engines_awake)
            self.stop_if_requested()
            super().fit(global_step)
        except FAULTS as error:
            self.save_now(f"the run failed ({one_sentence(error)})")
            raise
        finally:
            self.close()

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        """Upstream's evaluation, noted in the record."""
        self.services.record(StageStarted(global_step, "evaluate"), "trainer")
        logs = super().evaluate(global_step, **generate_kwargs)
        self.services.record(Evaluation(global_step, {key: float(value) for key, value in logs.items()}), "trainer")
        return logs


PPOTrainer = ray.remote(RhymePPOTrainer)
