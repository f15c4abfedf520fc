"""Points OpenRLHF's own launcher at our actor classes.

`openrlhf.cli.train_ppo_ray.train(args)` names its actor classes as globals of its module (and the trainers when it
runs). `install` sets those names in this process, the driver; nothing of OpenRLHF is edited. Reference and reward
model actors are upstream's own: nothing of ours changes what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import openrlhf.cli.train_ppo_ray as launcher
import openrlhf.trainer.ppo_trainer as sync_module
import openrlhf.trainer.ppo_trainer_async as async_module
import openrlhf.trainer.ray.vllm_engine as engine_module

from rhyme_openrlhf.engine.factory import EngineFactory
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.redaction import hide_when_printed
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.training.engines import with_tail_layouts
from rhyme_openrlhf.training.model_actors import CriticModelActor, PolicyModelActor
from rhyme_openrlhf.training.trainer import PPOTrainer
from rhyme_openrlhf.training.trainer_async import PPOTrainerAsync


def strategy_of(args: SimpleNamespace, upstream_strategy: Callable[[SimpleNamespace], Any], on_gpus: bool) -> Any:
    """Upstream's strategy; without a GPU the platform's."""
    if on_gpus:
        return upstream_strategy(args)
    from rhyme_openrlhf.platform.cpu_strategy import cpu_strategy

    return cpu_strategy(args)


def asynchronous_trainer(settings: RhymeSettings) -> Any:
    """Return what stands for the Ray actor class of OpenRLHF's asynchronous trainer."""
    if not settings.histopipe.enable:
        return PPOTrainerAsync
    from rhyme_openrlhf.pipeline.trainer import PipelineParts

    return SimpleNamespace(remote=partial(PPOTrainerAsync.remote, parts=PipelineParts))


def install(services: RunServices, seed: int, engine_started: Callable[[int, Any], None]) -> None:
    """Make OpenRLHF's launcher use our actors in this process; each engine's number and handle are told."""
    upstream_strategy = launcher.get_strategy

    def get_strategy(args: SimpleNamespace) -> Any:
        strategy = strategy_of(args, upstream_strategy, services.on_gpus)
        # Upstream hands its strategy to every actor; what they need of the run travels along.
        strategy.services = services
        return strategy

    factory = EngineFactory(
        services.settings, services.history_workers, seed, started=engine_started, on_gpus=services.on_gpus
    )
    engine_module.RolloutRayActor = factory
    if services.layouts is not None:
        launcher.create_vllm_engines = with_tail_layouts(launcher.create_vllm_engines, factory, services)
    launcher.get_strategy = get_strategy
    launcher.PolicyModelActor = PolicyModelActor
    launcher.CriticModelActor = CriticModelActor
    sync_module.PPOTrainer = PPOTrainer
    async_module.PPOTrainerAsync = asynchronous_trainer(services.settings)


def train(args: SimpleNamespace) -> None:
    """Run OpenRLHF's own training function on the actors that `install` chose."""
    hide_when_printed(args)
    launcher.train(args)
