"""The experiences of a streamed step are those that upstream makes of the whole step: KL, values, advantages, order."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace as NS
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rhyme_openrlhf.pipeline.trainer import StreamingExperienceMaker  # first: installs the shims where needed

from openrlhf.trainer.ppo_utils import experience_maker as upstream  # isort: skip
from openrlhf.trainer.ppo_utils.experience import Experience  # isort: skip

SAMPLES, MICRO_BATCH = 2, 4


class Model:
    """A group of ranks whose model gives each token a number, by the tokens up to it."""

    duplicate_actors = 1

    def __init__(self, ranks: int, scale: float) -> None:
        self._actor_handlers = [0] * ranks
        self.scale = scale

    def async_run_method_batch(self, method_name: str, **given: Any) -> list[list[torch.Tensor]]:
        assert method_name == "forward" and len(given["sequences"]) >= len(self._actor_handlers), "not enough for all"
        return [
            [torch.sin(self.scale * sequences.cumsum(dim=1)[:, :-1].double()) * mask]
            for sequences, mask in zip(given["sequences"], given["action_mask"], strict=True)
        ]


def a_sample(number: int, chance: random.Random) -> Any:
    prompt, response = chance.randint(1, 4), chance.randint(1, 6)
    length = prompt + response
    reward = torch.tensor([chance.random()])
    return Experience(
        sequences=torch.tensor([[chance.randint(1, 9) for _ in range(length)]]),
        attention_mask=torch.ones(1, length, dtype=torch.long),
        action_mask=torch.tensor([[0] * (prompt - 1) + [1] * response]),
        prompts=[f"{number // SAMPLES}"],
        labels=[""],
        images=[None],
        mm_train_inputs=[None],
        rewards=reward,
        scores=reward,
        response_length=torch.tensor([response]),
        truncated=torch.tensor([False]),
        total_length=torch.tensor([float(length)]),
        info={"reward": reward},
    )


def a_maker(kind: Callable[..., Any], estimator: str, ranks: int) -> Any:
    advantage = NS(estimator=estimator, gamma=1.0, lambd=0.9, no_std_norm=False)
    args = NS(
        train=NS(dynamic_batch_enable=False, colocate_all=False, micro_batch_size=1),
        rollout=NS(micro_batch_size=MICRO_BATCH, n_samples_per_prompt=SAMPLES),
        algo=NS(advantage=advantage, kl=NS(use_loss=False, estimator="k1", init_coef=0.1)),
        ds=NS(ring_attn_size=1, tensor_parallel_size=1),
        reward=NS(clip_range=(-10, 10), overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    args.train.colocate_actor_ref = args.train.colocate_critic_reward = False
    critic = Model(ranks, 0.7) if estimator == "gae" else None
    return kind(
        Model(ranks, 0.3), critic, None, Model(2 * ranks, 0.4), NS(value=0.1), NS(args=args), NS(pad_token_id=0)
    )


@pytest.mark.parametrize("estimator", ["gae", "group_norm", "rloo"])
@pytest.mark.parametrize("came", [24, 22, 20, 18])
def test_a_streamed_step_is_upstreams(monkeypatch: pytest.MonkeyPatch, estimator: str, came: int) -> None:
    """24 samples are awaited; a partial step has fewer, also so few behind the last unit that ranks could not share."""
    monkeypatch.setattr(upstream, "ray", NS(put=lambda value: value, get=lambda value: value))
    chance = random.Random(3)
    samples = [a_sample(number, chance) for number in range(came)]
    whole = a_maker(upstream.RemoteExperienceMaker, estimator, 1).make_experience_batch(copy.deepcopy(samples))
    maker = a_maker(StreamingExperienceMaker, estimator, 1)
    for first in range(0, came, SAMPLES):
        maker.take(samples[first : first + SAMPLES], of=24)
    assert maker._made, "nothing was computed before the step was whole"
    streamed = upstream.RemoteExperienceMaker.make_experience_batch(maker, samples)
    assert len(streamed) == len(whole)
    for one, other in zip(streamed, whole, strict=True):
        assert list(one.index) == list(other.index)
        values = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in fields(Experience)}
        for name, (ours, theirs) in {**values, **{key: (one.info[key], other.info[key]) for key in other.info}}.items():
            assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else name == "info" or ours == theirs
    assert one.info.keys() == other.info.keys() >= {"kl", "return"}
