"""The critic actor: OpenRLHF's, plus its random state (it shuffles what it trains on), which a checkpoint needs.

Checked against OpenRLHF 0.11.2 `trainer/ray/ppo_critic.py`.
"""

from __future__ import annotations

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import openrlhf.trainer.ray.ppo_critic as upstream
import ray

from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.training.random_state import RankRandomState

PlainCriticModelActor = plain_class(upstream.CriticModelActor, __name__, "PlainCriticModelActor")


class RhymeCriticModelActor(RankRandomState, PlainCriticModelActor):  # type: ignore[misc, valid-type]
    """One data-parallel rank of the critic."""


CriticModelActor = ray.remote(num_gpus=1)(RhymeCriticModelActor)
