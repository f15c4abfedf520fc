"""Every number of OpenRLHF's has a range that its own default is in; batch sizes and ranks that do not divide."""

from __future__ import annotations

import math
from types import SimpleNamespace as NS

import pytest

pytest.importorskip("fastapi")

from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.settings.upstream_ranges import (
    UPSTREAM_CHOICES,
    UPSTREAM_RANGES,
    Range,
    indivisible,
    misplaced,
    not_a_choice,
    out_of_range,
)


def test_every_number_of_openrlhfs_is_in_the_table_and_nothing_else() -> None:
    theirs = [one for one in options().values() if one.source == "openrlhf"]
    numbers = {one.flag for one in theirs if one.type in ("int", "float") and not one.choices}
    assert set(UPSTREAM_RANGES) - {"--local_rank"} == numbers - {"--local_rank"}
    # JSON has no infinity.
    defaults = {one.flag: math.inf if one.default == "inf" else one.default for one in theirs}
    assert not out_of_range(defaults)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--train.micro_batch_size", 0, "must be at least 1, got 0"),
        ("--rollout.micro_batch_size", 0, "must be at least 1, got 0"),
        ("--rollout.top_p", 0.0, "must be above 0 and at most 1, got 0"),
        ("--rollout.top_p", 1.5, "must be above 0 and at most 1, got 1.5"),
        ("--rollout.temperature", 0.0, "must be above 0, got 0"),
        ("--rollout.temperature", math.nan, "must be above 0, got nan"),
        ("--vllm.num_engines", -1, "must be at least 1, got -1"),
        ("--actor.num_gpus_per_node", 0, "must be at least 1, got 0"),
        ("--ckpt.save_steps", 0, "must be -1 or at least 1, got 0"),
        ("--eval.steps", -2, "must be -1 or at least 1, got -2"),
        ("--actor.adam.betas", [0.9, 1.0], "must be at least 0 and below 1, got 1"),
        ("--actor.adam.lr", math.inf, "must be at least 0, got inf"),
        ("--actor.entropy_coef", math.nan, "must be a finite number, got nan"),
        ("--train.seed", -1, "must be at least 0 and at most 4294967295, got -1"),
    ],
)
def test_a_number_out_of_its_range_is_named_with_it(flag: str, value: object, said: str) -> None:
    assert out_of_range({flag: value}) == f"{flag} {said}"


def test_what_is_not_given_is_not_judged() -> None:
    assert out_of_range(dict.fromkeys(UPSTREAM_RANGES)) == "" and not Range().holds(math.nan)


def sizes(batch: int, micro: int, gpus: int = 1, ring: int = 1, dynamic: bool = False, critic: str = "") -> NS:
    return NS(
        ds=NS(ring_attn_size=ring, tensor_parallel_size=1),
        train=NS(batch_size=batch, micro_batch_size=micro, dynamic_batch_enable=dynamic),
        actor=NS(num_nodes=1, num_gpus_per_node=gpus),
        critic=NS(num_nodes=1, num_gpus_per_node=3, model_name_or_path=critic),
    )


def test_batches_and_ranks_that_do_not_divide_are_named() -> None:
    assert "--train.batch_size 12 is no multiple of 8" in indivisible(sizes(12, 8))
    assert "4 ranks of the actor" in indivisible(sizes(12, 2, gpus=4))
    assert "--ds.ring_attn_size" in indivisible(sizes(16, 8, gpus=3, ring=2))
    assert "3 ranks of the critic" in indivisible(sizes(16, 8, critic="a critic"))
    assert not indivisible(sizes(16, 8)) and not indivisible(sizes(12, 8, dynamic=True))
    # Ring attention shares a sample among ranks.
    assert not indivisible(sizes(8, 2, gpus=8, ring=2))


def test_a_trained_model_without_gpus_is_named() -> None:
    none = sizes(16, 8, critic="a critic")
    none.critic.num_gpus_per_node = 0
    assert "because the run has a critic" in indivisible(none)


def test_a_word_that_openrlhf_cannot_use_is_named_with_those_it_can() -> None:
    theirs = [one for one in options().values() if one.source == "openrlhf"]
    assert not not_a_choice({one.flag: one.default for one in theirs})
    assert set(UPSTREAM_CHOICES) <= {one.flag for one in theirs}
    said = not_a_choice({"--actor.lr_scheduler": "cosin"})
    assert said.startswith("--actor.lr_scheduler must be one of linear, cosine, ") and said.endswith("got 'cosin'")
    assert "--ds.grad_accum_dtype" in not_a_choice({"--ds.grad_accum_dtype": "fp8"})


def placed(kl: float = 0.0, reward: str = "r.py", **given: object) -> NS:
    """Return arguments of a run with one GPU for each model and two engines, with some of `train` changed."""
    one = {"num_nodes": 1, "num_gpus_per_node": 1}
    train = {"colocate_all": False, "colocate_actor_ref": False, "colocate_critic_reward": False, "async_enable": False}
    return NS(
        ds=NS(ring_attn_size=1, tensor_parallel_size=1), algo=NS(kl=NS(init_coef=kl)), train=NS(**{**train, **given}),
        actor=NS(**one), ref=NS(**one), critic=NS(**one, model_name_or_path="c"), reward=NS(**one, remote_url=reward),
        vllm=NS(num_engines=2, tensor_parallel_size=1),
    )  # fmt: skip


def test_models_that_cannot_be_placed_are_named() -> None:
    assert not misplaced(placed()) and not misplaced(placed(colocate_all=True, async_enable=True))
    assert "--train.colocate_all needs as many GPUs for engines" in misplaced(placed(colocate_all=True))
    args = placed(kl=0.1, colocate_actor_ref=True)
    assert not misplaced(args)
    args.ref.num_gpus_per_node = 2
    assert "--ref.num_nodes and --ref.num_gpus_per_node to be those of --actor.*" in misplaced(args)
    args.ref.num_gpus_per_node = 0
    assert "--ref.num_nodes times --ref.num_gpus_per_node is 0" in misplaced(args)
    args = placed(colocate_critic_reward=True)
    args.reward.num_gpus_per_node = 0
    assert "--train.colocate_critic_reward needs --reward.num_nodes" in misplaced(args)
    # As OpenRLHF's scripts do for a reward that needs no GPU.
    args.train.colocate_critic_reward = False
    assert not misplaced(args)
    args.reward.remote_url = ""
    assert "--reward.num_gpus_per_node is 0" in misplaced(args)
