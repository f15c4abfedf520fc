"""How many GPUs (without any: pretended ones) a run asks Ray for. Pure: upstream's arguments in, numbers out.

Follows the placement in OpenRLHF 0.11.2 `cli/train_ppo_ray.py::train`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

# CPU slots beyond one for each GPU: controllers, queues, locks, recorder; they mostly wait.
SPARE_CPUS = 8
ENGINES = "engines"
# Each of what shares a GPU asks Ray for a fifth of it (OpenRLHF's 0.2).
SHARES = 5


@dataclass(frozen=True)
class Share:
    """GPUs that these models have for themselves: "engines", "actor", "reference", "critic", "reward"."""

    models: tuple[str, ...]
    gpus: int


def shares(args: SimpleNamespace) -> list[Share]:
    """Who gets which GPUs: every placement group and actor of a run, those with none left out."""
    engines = args.vllm.num_engines * args.vllm.tensor_parallel_size
    sizes = {
        "actor": _group(args.actor),
        "reference": _group(args.ref) if args.algo.kl.init_coef > 0 else 0,
        "critic": _group(args.critic) if args.critic.model_name_or_path else 0,
        "reward": _group(args.reward) if not args.reward.remote_url else 0,
    }
    there = tuple(name for name, size in sizes.items() if size)
    if args.train.colocate_all:
        # One placement group for all models; the engines share it only when generation and training take turns.
        if args.train.async_enable:
            found = [Share((ENGINES,), engines), Share(there, sizes["actor"])]
        else:
            found = [Share((ENGINES, *there), sizes["actor"])]
        return [share for share in found if share.gpus]
    pairs = []
    if args.train.colocate_actor_ref:
        pairs.append(("actor", "reference"))
    if args.train.colocate_critic_reward and sizes["critic"]:
        pairs.append(("critic", "reward"))
    found = [Share((ENGINES,), engines)]
    for name, size in sizes.items():
        first = next((pair for pair in pairs if name in pair), (name,))
        if name == first[0]:
            found.append(Share(tuple(one for one in first if sizes[one]), size))
    return [share for share in found if share.gpus]


def required_gpus(args: SimpleNamespace) -> int:
    """GPUs of all placement groups and actors of a run."""
    return sum(share.gpus for share in shares(args))


def shortage(args: SimpleNamespace, there: int) -> str:
    """Return one sentence where a run asks for more GPUs than are `there`, "" where they do."""
    needed = required_gpus(args)
    if needed <= there:
        return ""
    return (
        f"the run asks for {needed} GPUs (engines, policy, reference, critic and reward model), but there are {there}: "
        "lower --*.num_gpus_per_node, --vllm.num_engines or --vllm.tensor_parallel_size, or colocate "
        "(--train.colocate_all)"
    )


def _group(model: SimpleNamespace) -> int:
    return model.num_nodes * model.num_gpus_per_node
