"""Ranges of OpenRLHF's numeric options, and words of those that take any word, by flag: its parser checks neither.

Invariant: the table has every numeric option of OpenRLHF 0.11.2 and no other one, which `tests/settings/` compares with
`settings/upstream_options.json`. So an option that a later OpenRLHF brings has to be judged here before it can be used.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# No infinity, and no NaN either, unless a range says so.
LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`, both included unless `open_low` or `open_high`, and the one in `or_else`."""

    low: float = -LARGEST
    high: float = LARGEST
    open_low: bool = False
    open_high: bool = False
    or_else: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether `value` is allowed; NaN never is."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return (above and below) or value == self.or_else

    def __str__(self) -> str:
        parts = []
        if self.or_else is not None:
            parts.append(f"{self.or_else:g} or")
        if self.low > -LARGEST:
            parts.append(f"{'above' if self.open_low else 'at least'} {self.low:g}")
        if self.high < LARGEST:
            both = "and " if self.low > -LARGEST else ""
            parts.append(f"{both}{'below' if self.open_high else 'at most'} {self.high:.10g}")
        return " ".join(parts) or "a finite number"


ANY = Range()
COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, open_low=True)
SHARE = Range(0, 1)
# Of an Adam or Muon optimizer.
MOMENTUM = Range(0, 1, open_high=True)
# A number of steps; -1: never.
PERIOD = Range(1, or_else=-1)
# OpenRLHF's scripts give 0 GPUs to models that a run does not have.
GPUS = NOT_NEGATIVE

UPSTREAM_RANGES: Mapping[str, Range] = {
    "--actor.num_nodes": COUNT,
    "--actor.num_gpus_per_node": COUNT,
    "--ref.num_nodes": GPUS,
    "--ref.num_gpus_per_node": GPUS,
    "--reward.num_nodes": GPUS,
    "--reward.num_gpus_per_node": GPUS,
    "--critic.num_nodes": GPUS,
    "--critic.num_gpus_per_node": GPUS,
    "--vllm.num_engines": COUNT,
    "--vllm.tensor_parallel_size": COUNT,
    "--vllm.gpu_memory_utilization": Range(0, 1, open_low=True),
    "--rollout.batch_size": COUNT,
    # 0: as --rollout.batch_size.
    "--rollout.vllm_generate_batch_size": NOT_NEGATIVE,
    "--rollout.micro_batch_size": COUNT,
    "--rollout.max_new_tokens": COUNT,
    "--rollout.max_tokens_per_gpu": COUNT,
    "--rollout.n_samples_per_prompt": COUNT,
    "--rollout.top_p": Range(0, 1, open_low=True),
    # The policy's logits are divided by it, so 0 makes every loss NaN (openrlhf/models/actor.py).
    "--rollout.temperature": POSITIVE,
    "--train.async_queue_size": COUNT,
    "--train.ema_beta": SHARE,
    "--train.max_tokens_per_gpu": COUNT,
    "--train.num_episodes": COUNT,
    "--train.max_epochs": COUNT,
    "--train.micro_batch_size": COUNT,
    "--train.batch_size": COUNT,
    # NumPy's generators take no other seed.
    "--train.seed": Range(0, 2**32 - 1),
    "--eval.steps": PERIOD,
    # 0: greedy.
    "--eval.temperature": NOT_NEGATIVE,
    "--eval.n_samples_per_prompt": COUNT,
    "--ckpt.save_steps": PERIOD,
    "--ckpt.max_num": COUNT,
    "--ckpt.max_mem": Range(0, math.inf, open_low=True),
    "--logger.logging_steps": COUNT,
    "--local_rank": ANY,
    "--ds.zero_stage": Range(0, 3),
    "--ds.zpg": COUNT,
    "--ds.tensor_parallel_size": COUNT,
    "--ds.lora.rank": NOT_NEGATIVE,
    "--ds.lora.alpha": COUNT,
    "--ds.lora.dropout": MOMENTUM,
    "--ds.ring_attn_size": COUNT,
    "--ds.ring_attn_head_stride": COUNT,
    "--data.dataloader_num_workers": NOT_NEGATIVE,
    "--data.max_len": COUNT,
    "--data.max_samples": COUNT,
    "--data.max_images_per_prompt": NOT_NEGATIVE,
    "--actor.eps_clip": NOT_NEGATIVE,
    "--actor.eps_clip_low_high": NOT_NEGATIVE,
    "--actor.dual_clip": Range(1, open_low=True),
    "--critic.value_clip": NOT_NEGATIVE,
    "--critic.freezing_steps": Range(-1),
    "--algo.advantage.lambd": SHARE,
    "--algo.advantage.gamma": SHARE,
    "--algo.advantage.is_correction_threshold": NOT_NEGATIVE,
    "--algo.kl.target": NOT_NEGATIVE,
    "--algo.kl.horizon": COUNT,
    "--algo.kl.init_coef": NOT_NEGATIVE,
    "--algo.dynamic_filtering_range": Range(-math.inf, math.inf),
    "--actor.aux_loss_coef": NOT_NEGATIVE,
    "--actor.entropy_coef": ANY,
    "--reward.clip_range": Range(-math.inf, math.inf),
    "--reward.overlong_buffer_len": NOT_NEGATIVE,
    "--reward.overlong_penalty_factor": NOT_NEGATIVE,
    "--reward.stop_properly_penalty_coef": Range(-LARGEST, 1),
    **{
        f"--{model}.{name}": allowed
        for model in ("actor", "critic")
        for name, allowed in {
            "muon.lr": NOT_NEGATIVE,
            "muon.momentum": MOMENTUM,
            "muon.ns_steps": COUNT,
            "adam.lr": NOT_NEGATIVE,
            "adam.betas": MOMENTUM,
            "adam.eps": NOT_NEGATIVE,
            "adam.weight_decay": NOT_NEGATIVE,
            "lr_warmup_ratio": SHARE,
            "min_lr_ratio": SHARE,
            "max_norm": NOT_NEGATIVE,
        }.items()
    },
}

# Schedulers of Transformers that work with what OpenRLHF gives them. It gives no number of decay steps
# (warmup_stable_decay) and no loss (reduce_lr_on_plateau, greedy).
SCHEDULERS = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr",
)  # fmt: skip
UPSTREAM_CHOICES: Mapping[str, tuple[str, ...]] = {
    "--actor.lr_scheduler": SCHEDULERS,
    "--critic.lr_scheduler": SCHEDULERS,
    # DeepSpeed's names (runtime/config.py).
    "--ds.grad_accum_dtype": ("fp32", "float32", "float", "bf16", "bfloat16", "fp16", "float16", "half"),
    # Backends of torch.distributed.
    "--vllm.sync_backend": ("nccl", "gloo", "mpi", "ucc", "xccl", "hccl"),
}


def out_of_range(values: Mapping[str, Any]) -> str:
    """Return one sentence on the first value outside of its range, or "". `values` by flag, None where not given."""
    for flag, allowed in UPSTREAM_RANGES.items():
        given = values.get(flag)
        for value in given if isinstance(given, list | tuple) else [given]:
            if value is not None and not allowed.holds(value):
                return f"{flag} must be {allowed}, got {value:g}"
    return ""


def not_a_choice(values: Mapping[str, Any]) -> str:
    """Return one sentence on the first value that OpenRLHF cannot use, or "". `values` as of `out_of_range`."""
    for flag, allowed in UPSTREAM_CHOICES.items():
        value = values.get(flag)
        if value is not None and value not in allowed:
            return f"{flag} must be one of {', '.join(allowed)}, got {value!r}"
    return ""


def indivisible(args: SimpleNamespace) -> str:
    """Return one sentence on batch sizes and ranks that do not divide each other, or "". `args`: upstream's, nested.

    DeepSpeed asserts both when models load (runtime/config.py, OpenRLHF's utils/deepspeed/deepspeed.py).
    """
    share = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    for name, ranks in _models(args):
        if not ranks:
            return f"--{name}.num_nodes and --{name}.num_gpus_per_node must be at least 1, because the run has a {name}"
        if ranks % share:
            return (
                f"--{name}.num_nodes times --{name}.num_gpus_per_node is {ranks}, which --ds.ring_attn_size times "
                f"--ds.tensor_parallel_size ({share}) does not divide"
            )
        unit = args.train.micro_batch_size * (ranks // share)
        if not args.train.dynamic_batch_enable and args.train.batch_size % unit:
            return (
                f"--train.batch_size {args.train.batch_size} is no multiple of {unit}, which is "
                f"--train.micro_batch_size {args.train.micro_batch_size} times the {ranks // share} ranks of the {name}"
            )
    return ""


def _models(args: SimpleNamespace) -> Iterator[tuple[str, int]]:
    """Yield the models that are trained, each with its number of ranks."""
    yield "actor", _ranks(args, "actor")
    if args.critic.model_name_or_path:
        yield "critic", _ranks(args, "critic")


def misplaced(args: SimpleNamespace) -> str:
    """Return one sentence on models that cannot be placed on the GPUs given to them, or "". `args`: upstream's, nested.

    OpenRLHF asserts the equal numbers after Ray and engines have started (cli/train_ppo_ray.py).
    """
    share = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    has_ref, has_reward = args.algo.kl.init_coef > 0, not args.reward.remote_url
    for name, has in (("ref", has_ref), ("reward", has_reward)):
        ranks = _ranks(args, name)
        if has and (not ranks or ranks % share):
            return (
                f"--{name}.num_nodes times --{name}.num_gpus_per_node is {ranks}, but must be a multiple of "
                f"--ds.ring_attn_size times --ds.tensor_parallel_size ({share})"
            )
    colocated = args.train.colocate_all or args.train.colocate_actor_ref
    if colocated and has_ref and _shape(args, "actor") != _shape(args, "ref"):
        return _unequal("ref", "actor", "--train.colocate_all or --train.colocate_actor_ref")
    both = args.train.colocate_critic_reward and args.critic.model_name_or_path
    if both and _shape(args, "critic") != _shape(args, "reward"):
        return _unequal("reward", "critic", "--train.colocate_critic_reward")
    if args.train.colocate_all and not args.train.async_enable:
        actors, engines = _ranks(args, "actor"), args.vllm.num_engines * args.vllm.tensor_parallel_size
        if actors != engines:
            return (
                f"--train.colocate_all needs as many GPUs for engines as for the actor: --vllm.num_engines times "
                f"--vllm.tensor_parallel_size is {engines}, and --actor.num_nodes times --actor.num_gpus_per_node is "
                f"{actors}"
            )
    return ""


def _shape(args: SimpleNamespace, name: str) -> tuple[int, int]:
    model = getattr(args, name)
    return model.num_nodes, model.num_gpus_per_node


def _ranks(args: SimpleNamespace, name: str) -> int:
    nodes, gpus = _shape(args, name)
    return nodes * gpus


def _unequal(name: str, other: str, flag: str) -> str:
    return (
        f"{flag} needs --{name}.num_nodes and --{name}.num_gpus_per_node to be those of --{other}.*, because both "
        "models share GPUs"
    )
