"""How many GPUs (without any: pretended ones) a run asks Ray for. Pure: upstream's arguments in, numbers out.

Follows the placement in OpenRLHF 0.11.2 `cli/train_ppo_ray.py::train`.
"""

from __future__ import annotations

from types import SimpleNamespace

# CPU slots beyond one for each GPU: controllers, queues, locks, recorder; they mostly wait.
SPARE_CPUS = 8


def required_gpus(args: SimpleNamespace) -> int:
    """GPUs of all placement groups and actors of a run."""
    engines = args.vllm.num_engines * args.vllm.tensor_parallel_size
    actor = _group(args.actor)
    reference = _group(args.ref) if args.algo.kl.init_coef > 0 else 0
    critic = _group(args.critic) if args.critic.model_name_or_path else 0
    reward = _group(args.reward) if not args.reward.remote_url else 0
    if args.train.colocate_all:
        # One placement group for all models; the engines share it only when generation and training take turns.
        return actor + (engines if args.train.async_enable else 0)
    if args.train.colocate_actor_ref:
        reference = 0
    if args.train.colocate_critic_reward and critic:
        reward = 0
    return engines + actor + reference + critic + reward


def _group(model: SimpleNamespace) -> int:
    return model.num_nodes * model.num_gpus_per_node
