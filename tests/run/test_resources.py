"""How many GPUs a run asks for, against OpenRLHF's placement."""

from types import SimpleNamespace as NS

import pytest

from rhyme_openrlhf.run.resources import required_gpus, shares


def run(**changes: object) -> NS:
    args = NS(
        vllm=NS(num_engines=2, tensor_parallel_size=2),
        actor=NS(num_nodes=1, num_gpus_per_node=4),
        ref=NS(num_nodes=1, num_gpus_per_node=4),
        critic=NS(num_nodes=1, num_gpus_per_node=2, model_name_or_path=None),
        reward=NS(num_nodes=1, num_gpus_per_node=2, remote_url=["reward.py"]),
        algo=NS(kl=NS(init_coef=0.01)),
        tp_switch=NS(enable=False),
        train=NS(colocate_all=False, async_enable=False, colocate_actor_ref=False, colocate_critic_reward=False),
    )
    for path, value in changes.items():
        node, _, leaf = path.rpartition("__")
        target = args
        for name in node.split("__"):
            target = getattr(target, name)
        setattr(target, leaf, value)
    return args


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 4 + 4 + 4),
        # Further layouts are on the same devices.
        ({"tp_switch__enable": True}, 4 + 4 + 4),
        ({"tp_switch__enable": True, "train__colocate_all": True}, 4),
        ({"algo__kl__init_coef": 0}, 4 + 4),
        ({"train__colocate_actor_ref": True}, 4 + 4),
        ({"critic__model_name_or_path": "m"}, 12 + 2),
        ({"critic__model_name_or_path": "m", "reward__remote_url": None}, 12 + 2 + 2),
        (
            {
                "critic__model_name_or_path": "m",
                "reward__remote_url": None,
                "train__colocate_critic_reward": True,
            },
            12 + 2,
        ),
        ({"train__colocate_all": True}, 4),
        ({"train__colocate_all": True, "train__async_enable": True}, 4 + 4),
    ],
)
def test_gpus(changes: dict[str, object], gpus: int) -> None:
    assert required_gpus(run(**changes)) == gpus


def test_who_shares_which_gpus() -> None:
    def named(**changes: object) -> list[tuple[tuple[str, ...], int]]:
        return [(share.models, share.gpus) for share in shares(run(**changes))]

    assert named() == [(("engines",), 4), (("actor",), 4), (("reference",), 4)]
    assert named(train__colocate_actor_ref=True) == [(("engines",), 4), (("actor", "reference"), 4)]
    both = {"critic__model_name_or_path": "m", "reward__remote_url": None, "train__colocate_critic_reward": True}
    assert named(**both)[-1] == (("critic", "reward"), 2)
    assert named(train__colocate_all=True) == [(("engines", "actor", "reference"), 4)]
    taking_turns_is_over = {"train__colocate_all": True, "train__async_enable": True}
    assert named(**taking_turns_is_over) == [(("engines",), 4), (("actor", "reference"), 4)]
