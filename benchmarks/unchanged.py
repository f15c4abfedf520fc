"""OpenRLHF unchanged, as far as this machine allows: the peer that our runs are compared with.

    python benchmarks/unchanged.py STATUS_FILE [options of rhyme train; of ours only --run.* and --cpu.*]

Runs OpenRLHF's own actors. Added are only:

- the seeding shim, so that both sides sample the same tokens;
- one JSON line of upstream's own status per step in STATUS_FILE;
- without a GPU, the platform's shims with the gloo weight sync.

There is no history, no speculation, no weight buffer and no run record.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import openrlhf.cli.train_ppo_ray as launcher
import openrlhf.trainer.ppo_trainer as sync_module
import openrlhf.trainer.ray.ppo_actor as policy_module
import openrlhf.trainer.ray.vllm_engine as engine_module
import ray

from rhyme_openrlhf.engine.actor import PlainRolloutActor
from rhyme_openrlhf.engine.arguments import WORKER_EXTENSION
from rhyme_openrlhf.engine.requests import Seeds
from rhyme_openrlhf.run.placement import strategy_of
from rhyme_openrlhf.run.resources import SPARE_CPUS, required_gpus
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.training.model_actors import PlainPolicyModelActor
from rhyme_openrlhf.training.reproducible import in_prompt_order, seed_controller
from rhyme_openrlhf.training.trainer import PlainPPOTrainer


class UnchangedPolicyModelActor(PlainPolicyModelActor):
    """Upstream's policy; without a GPU its broadcast runs on gloo."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Load the policy, as upstream."""
        if not gpu_present():
            from rhyme_openrlhf.platform.gloo_sync import GlooActorPPOTrainer

            policy_module.ActorPPOTrainer = GlooActorPPOTrainer
        super().init_model_from_pretrained(*args, **kwargs)


class UnchangedPPOTrainer(PlainPPOTrainer):
    """Upstream's trainer, seeded, which writes its own status of each step down."""

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self._reproducible = strategy.args.run.reproducible
        self._status_file = strategy.status_file
        if self._reproducible:
            seed_controller(strategy.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        """Train one step, as upstream, on samples in an order that does not depend on timing."""
        if self._reproducible:
            rollout_samples = in_prompt_order(rollout_samples, self.args.rollout.n_samples_per_prompt)
        tokens = sum(int(sample.response_length.item()) for sample in rollout_samples)
        status, step = super().train_step(rollout_samples, global_step)
        self._written = {"step": step, "response_tokens": tokens}
        return status, step

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: dict[str, Any] | None = None
    ) -> None:
        """Save, as upstream; by now the status also holds the generation's time."""
        numbers = {key: value for key, value in (logs_dict or {}).items() if isinstance(value, (int, float))}
        with open(self._status_file, "a") as file:
            file.write(json.dumps(numbers | self._written) + "\n")
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)


class UnchangedRolloutActor(PlainRolloutActor):
    """Upstream's engine, seeded; without a GPU with what it needs there."""

    # Ray awaits an actor's constructor; upstream's is one too.
    async def __init__(self, *args: Any, rhyme: RhymeSettings, run_seed: int, **kwargs: Any) -> None:  # type: ignore[misc]
        self.seeds = Seeds(run_seed, rhyme.run.reproducible)
        if not gpu_present():
            from rhyme_openrlhf.platform.cpu_arguments import cpu_engine_arguments

            kwargs = cpu_engine_arguments(kwargs, rhyme.cpu)
        kwargs["worker_extension_cls"] = WORKER_EXTENSION
        await super().__init__(*args, **kwargs)

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """Return the responses to one prompt, as upstream; each knows which sample it is."""
        ask = super().generate_responses
        return await self.seeds.answers(
            prompt, num_samples, lambda plain: ask(plain, label, sampling_params, max_length, hf_tokenizer, 1, images)
        )

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Return vLLM's output of one request, as upstream; seeded if the run is reproducible."""
        self.seeds.seed(sampling_params, len(prompt_token_ids))
        return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)


RolloutActor = ray.remote(UnchangedRolloutActor)


class UnchangedEngineFactory:
    """Upstream's engine actor with the keyword arguments that the seeding shim needs."""

    def __init__(self, settings: RhymeSettings, seed: int) -> None:
        self._ours = {"rhyme": settings, "run_seed": seed}

    def options(self, **options: Any) -> SimpleNamespace:
        """Ray's options, as upstream passes them."""
        actor = RolloutActor.options(**options)
        return SimpleNamespace(remote=lambda **arguments: actor.remote(**self._ours, **arguments))


def run(args: SimpleNamespace, status_file: str) -> None:
    """Train with OpenRLHF's own classes; `args` are parsed and checked."""
    settings = RhymeSettings.from_namespace(args)
    upstream_strategy = launcher.get_strategy

    def get_strategy(args: SimpleNamespace) -> Any:
        strategy = strategy_of(args, upstream_strategy, gpu_present())
        strategy.status_file = os.path.abspath(status_file)
        return strategy

    if not gpu_present():
        from rhyme_openrlhf.platform.cpu_arguments import adapt_arguments
        from rhyme_openrlhf.platform.local_ray import start_local_ray

        adapt_arguments(args)
        gpus = required_gpus(args)
        start_local_ray(gpus, gpus + SPARE_CPUS, {}, log_to_driver=False)
    launcher.get_strategy = get_strategy
    launcher.PolicyModelActor = ray.remote(num_gpus=1)(UnchangedPolicyModelActor)
    sync_module.PPOTrainer = ray.remote(UnchangedPPOTrainer)
    engine_module.RolloutRayActor = UnchangedEngineFactory(settings, args.train.seed)
    launcher.train(args)
    ray.shutdown()


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit()
    # The classes above must be those of the importable module, not of __main__: Ray's workers import them by name.
    import unchanged

    from rhyme_openrlhf.cli import upstream

    unchanged.run(upstream.parse(sys.argv[2:]), sys.argv[1])
