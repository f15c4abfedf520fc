"""The policy's and the critic's model actors: OpenRLHF's, plus their random states, which a checkpoint needs.

The policy also publishes its weights to the weight buffer (`weights/publisher.py`). Checked against OpenRLHF 0.11.2
`trainer/ray/ppo_actor.py` and `trainer/ray/ppo_critic.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rhyme_openrlhf.garbage import kept_for_good
from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

with kept_for_good():
    import openrlhf.trainer.ray.ppo_actor as upstream
    import openrlhf.trainer.ray.ppo_critic as upstream_critic
import ray
import torch

from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.events import POLICY, ProcessReady
from rhyme_openrlhf.training.reproducible import RankRandomState
from rhyme_openrlhf.training.updates import Updates
from rhyme_openrlhf.weights.buckets import Bucket, Segment
from rhyme_openrlhf.weights.publisher import WeightPublisher, fixed_sequence_log_probs

SOURCE = "policy"

PlainPolicyModelActor = plain_class(upstream.PolicyModelActor, __name__, "PlainPolicyModelActor")
PlainCriticModelActor = plain_class(upstream_critic.CriticModelActor, __name__, "PlainCriticModelActor")


class BufferedActorPPOTrainer(upstream.ActorPPOTrainer):
    """Upstream's PPO update without a process group that links trainer and engines: weights go by the buffer."""

    def _init_vllm_sync_group(self, backend: str) -> None:
        """Do nothing: the weight buffer needs no group."""


def ppo_trainer_class(settings: RhymeSettings) -> type[upstream.ActorPPOTrainer]:
    """Return the PPO update class for a weight transport, on this machine."""
    if settings.weights_by_buffer:
        return BufferedActorPPOTrainer
    if gpu_present():
        return upstream.ActorPPOTrainer
    from rhyme_openrlhf.platform.gloo_sync import GlooActorPPOTrainer

    return GlooActorPPOTrainer


@contextmanager
def emptied_cache() -> Iterator[None]:
    """Leave no cached GPU memory to an engine on the same device, as upstream does around its broadcast."""
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        torch.cuda.empty_cache()


def not_finite(model: torch.nn.Module) -> str:
    """Return the name of the first weight that holds NaN or an infinity, "" if none does; under ZeRO-3 of its shard."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(getattr(parameter, "ds_tensor", parameter)).all():
            return name
    return ""


def sums(model: torch.nn.Module) -> list[float]:
    """Return the sum of each weight, under ZeRO-3 of its shard; all are equal where nothing has changed."""
    weights = (getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters())
    # One by one: with offloading some are on the host, and others are not.
    return [weight.detach().sum(dtype=torch.float64).item() for weight in weights]


class RhymePolicyModelActor(RankRandomState, PlainPolicyModelActor):  # type: ignore[misc, valid-type]
    """One data-parallel rank of the policy."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Load the policy, as upstream; then plan the weight buckets."""
        settings = RhymeSettings.from_namespace(strategy.args)
        # Upstream names the class as a module global (ppo_actor.py, end of init_model_from_pretrained).
        upstream.ActorPPOTrainer = ppo_trainer_class(settings)
        super().init_model_from_pretrained(strategy, *args, **kwargs)
        if self._rank == 0:
            strategy.services.record(ProcessReady(POLICY), SOURCE)
        self._publisher = WeightPublisher(
            self.actor.model.module,
            strategy.args.ds.zero_stage,
            self._world_size,
            settings.weights.bucket_mb,
        )
        self._mine: frozenset[int] = frozenset()
        self._first_sums = sums(self.actor.model)

    def weight_node(self) -> str:
        """Return Ray's id of this rank's node."""
        return ray.get_runtime_context().get_node_id()

    def weight_buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets that the weights are published in, which are the same on every rank."""
        return self._publisher.buckets

    def write_buckets(self, mine: list[int]) -> None:
        """Take these buckets, by number, as this rank's share of every version from now on."""
        self._mine = frozenset(mine)

    def publish_weights(self, segment: Segment | None) -> None:
        """Write this rank's share of a version into its node's segment. Call it on all ranks at once.

        `segment` is None on a node without one, whose ranks only help to gather.
        """
        with emptied_cache():
            self._publisher.publish(segment, self._mine)

    def not_finite(self) -> str:
        """Return the name of a weight of this rank's that is not finite, or ""."""
        return not_finite(self.actor.model)

    def unchanged(self) -> bool:
        """Return whether all weights of this rank are those that the run began with."""
        return sums(self.actor.model) == self._first_sums

    def updates(self) -> Updates:
        """Return what this rank has trained so far."""
        return Updates.of(self.actor.model)

    def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability of each token after the first, by the weights being trained."""
        with emptied_cache():
            return fixed_sequence_log_probs(self.actor, token_ids, self.strategy.ring_attn_group)


class RhymeCriticModelActor(RankRandomState, PlainCriticModelActor):  # type: ignore[misc, valid-type]
    """One data-parallel rank of the critic."""

    def not_finite(self) -> str:
        """Return the name of a weight of this rank's that is not finite, or ""."""
        return not_finite(self.critic)

    def updates(self) -> Updates:
        """Return what this rank has trained so far."""
        return Updates.of(self.critic)


PolicyModelActor = ray.remote(num_gpus=1)(RhymePolicyModelActor)
CriticModelActor = ray.remote(num_gpus=1)(RhymeCriticModelActor)
