"""Points OpenRLHF's own launcher at our actor classes.

`openrlhf.cli.train_ppo_ray.train(args)` names its actor classes as globals of its module (and the trainers when it
runs). `install` sets those names in this process, the driver; nothing of OpenRLHF is edited. Reference and reward
model actors are upstream's own: nothing of ours changes what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import openrlhf.cli.train_ppo_ray as launcher
import openrlhf.trainer.ppo_trainer as sync_module
import openrlhf.trainer.ppo_trainer_async as async_module
import openrlhf.trainer.ray.vllm_engine as engine_module
import ray

from rhyme_openrlhf.rollout.engine import RhymeRolloutActor
from rhyme_openrlhf.training.critic import CriticModelActor
from rhyme_openrlhf.training.policy import PolicyModelActor
from rhyme_openrlhf.training.recorder import RunServices
from rhyme_openrlhf.training.trainer import PPOTrainer
from rhyme_openrlhf.training.trainer_async import PPOTrainerAsync

RolloutActor = ray.remote(RhymeRolloutActor)


class EngineFactory:
    """Stands where upstream creates its engine actors, and adds our keyword arguments to each.

    Upstream writes `RolloutRayActor.options(...).remote(**arguments)` and leaves no way to pass more.
    """

    def __init__(self, services: RunServices, seed: int, started: Callable[[int, Any], None]) -> None:
        self._services = services
        self._seed = seed
        self._started = started
        self._made = 0
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> EngineFactory:
        """Remember Ray's options for the next engine."""
        self._options = options
        return self

    def remote(self, **arguments: Any) -> Any:
        """Start the next engine."""
        index, self._made = self._made, self._made + 1
        engine = RolloutActor.options(**self._options).remote(
            rhyme=self._services.settings,
            run_seed=self._seed,
            index=index,
            history_workers=list(self._services.history_workers),
            **arguments,
        )
        self._started(index, engine)
        return engine


def install(services: RunServices, seed: int, engine_started: Callable[[int, Any], None]) -> None:
    """Make OpenRLHF's launcher use our actors in this process; each engine's number and handle are told."""
    upstream_strategy = launcher.get_strategy

    def get_strategy(args: SimpleNamespace) -> Any:
        if services.on_gpus:
            strategy = upstream_strategy(args)
        else:
            from rhyme_openrlhf.platform.cpu_strategy import cpu_strategy

            strategy = cpu_strategy(args)
        # Upstream hands its strategy to every actor; what they need of the run travels along.
        strategy.services = services
        return strategy

    engine_module.RolloutRayActor = EngineFactory(services, seed, engine_started)
    launcher.get_strategy = get_strategy
    launcher.PolicyModelActor = PolicyModelActor
    launcher.CriticModelActor = CriticModelActor
    sync_module.PPOTrainer = PPOTrainer
    async_module.PPOTrainerAsync = PPOTrainerAsync


def train(args: SimpleNamespace) -> None:
    """Run OpenRLHF's own training function on the actors that `install` chose."""
    launcher.train(args)
