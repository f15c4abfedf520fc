"""The judgement of each flag of OpenRLHF's command: the same here, refused in some runs, or different.

Invariant: every flag of OpenRLHF 0.11.2 is judged once, and no other one. `tests/settings/test_upstream_flags.py`
compares the table with OpenRLHF's own parser, so a flag of a later release fails there until it is judged. Ranges of
numbers are in `upstream_ranges.py`; a number outside of its range is refused for every flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["the same", "refused", "different"]


@dataclass(frozen=True)
class Judgement:
    """A flag's meaning here. `sentence`: when it is refused, or what differs; `page`: of docs/, with more on it."""

    verdict: Verdict
    sentence: str = ""
    page: str = ""


# By group, the flags that mean here what they mean in OpenRLHF, in every run.
_SAME: Mapping[str, str] = {
    "actor": "adam.betas adam.eps adam.lr adam.weight_decay aux_loss_coef dual_clip entropy_coef eps_clip "
    "eps_clip_low_high freeze_visual_encoder gradient_checkpointing_enable gradient_checkpointing_reentrant "
    "loss_agg_mode lr_scheduler lr_warmup_ratio max_norm min_lr_ratio muon.lr muon.momentum muon.nesterov "
    "muon.no_nesterov muon.ns_steps optim policy_loss_type",
    "algo": "advantage.estimator advantage.gamma advantage.is_correction_gating advantage.is_correction_level "
    "advantage.is_correction_mode advantage.is_correction_threshold advantage.lambd advantage.no_std_norm "
    "dynamic_filtering_range kl.estimator kl.horizon kl.init_coef kl.target kl.unbiased_gradient kl.use_loss",
    "ckpt": "best_metric_key disable_ds max_mem save_hf",
    "critic": "adam.betas adam.eps adam.lr adam.weight_decay freezing_steps lr_scheduler lr_warmup_ratio max_norm "
    "min_lr_ratio muon.lr muon.momentum muon.nesterov muon.no_nesterov muon.ns_steps optim save_value_network "
    "value_clip",
    "data": "apply_chat_template dataloader_num_workers disable_fast_tokenizer image_key input_key input_template "
    "label_key max_images_per_prompt max_samples prompt_probs prompt_split",
    "ds": "adam_offload deepcompile enable_sleep experts_implementation grad_accum_dtype lora.alpha lora.dropout "
    "lora.target_modules overlap_comm ring_attn_head_stride value_head_prefix zero_stage zpg",
    "eval": "dataset n_samples_per_prompt split steps temperature",
    "logger": "logging_steps wandb.group wandb.org wandb.project wandb.run_name",
    "ref": "offload",
    "reward": "clip_range normalize_enable offload overlong_buffer_len overlong_penalty_factor "
    "stop_properly_penalty_coef",
    "rollout": "batch_size max_tokens_per_gpu micro_batch_size n_samples_per_prompt temperature top_p",
    "train": "colocate_actor_ref colocate_critic_reward dynamic_batch_enable ema_beta full_determinism_enable "
    "max_epochs max_tokens_per_gpu num_episodes seed",
    "vllm": "enable_prefix_caching enforce_eager",
    "": "local_rank use_ms",
}

_GPUS = "Refused where the run asks for more GPUs than the machine has; on a cluster (RAY_ADDRESS) the run waits."
_NEEDS_GPU = "Refused on a machine without a GPU."
_NO_ROOM = "Refused where a prompt of the data leaves no room for a response; OpenRLHF cuts such prompts."
_DIVIDES = "Refused before the start where batches and ranks do not divide; DeepSpeed fails later."
_WRITABLE = "Refused before the start where the directory cannot be written."
_PIPELINE = "Refused together with --histopipe.enable"
_BUFFER = "Ignored where the weight buffer carries the weights; the run says so at its start."

_REFUSED: Mapping[str, str] = {
    **{f"--{model}.{name}": _GPUS for model in ("actor", "critic", "ref", "reward")
       for name in ("num_nodes", "num_gpus_per_node")},
    "--vllm.num_engines": "Refused at 0, and where the run asks for more GPUs than the machine has.",
    "--vllm.tensor_parallel_size": "Refused where it does not divide the model, or takes more GPUs than there are.",
    "--vllm.gpu_memory_utilization": "Refused where the memory plan shows that the models do not fit.",
    "--actor.model_name_or_path": "Refused before the start where it cannot be loaded as a model.",
    "--reward.model_name_or_path": "Refused before the start where it cannot be loaded as a model.",
    "--critic.model_name_or_path": "Refused where the memory plan shows that the models do not fit.",
    "--data.prompt_dataset": "Refused before the start where a row cannot be used.",
    "--data.max_len": _NO_ROOM,
    "--rollout.max_new_tokens": _NO_ROOM,
    "--train.batch_size": _DIVIDES,
    "--train.micro_batch_size": _DIVIDES,
    "--ckpt.output_dir": "Refused before the start where it cannot be written, or the trained model does not fit.",
    "--logger.tensorboard_dir": _WRITABLE,
    "--ds.packing_samples": _NEEDS_GPU,
    "--ds.use_liger_kernel": _NEEDS_GPU,
    "--ds.ring_attn_size": _NEEDS_GPU,
    "--ds.load_in_4bit": f"{_NEEDS_GPU} Refused with --ds.lora.rank: adapters cannot be added to packed weights.",
    "--ds.tensor_parallel_size": f"{_NEEDS_GPU} Above 1, refused with the weight buffer.",
    "--ds.lora.rank": "Above 0, refused with --weights.transport openrlhf: vLLM cannot load the adapters it sends.",
    "--train.async_enable": "Refused with --tp_switch.enable, unless --histopipe.enable is given, too.",
    "--train.async_queue_size": f"{_PIPELINE} above 1.",
    "--train.partial_rollout_enable": f"{_PIPELINE}.",
    "--train.colocate_all": f"{_PIPELINE}; without a GPU also with --weights.transport openrlhf.",
    "--rollout.vllm_generate_batch_size": f"{_PIPELINE} above twice --rollout.batch_size.",
    "--algo.dynamic_filtering_enable": f"{_PIPELINE} and --histopipe.defer.",
    "--train.agent_func_path": f"{_PIPELINE} and --move.enable or --tp_switch.enable.",
}  # fmt: skip

_DIFFERENT: Mapping[str, tuple[str, str]] = {
    "--vllm.sync_backend": (_BUFFER, "weights.md"),
    "--vllm.sync_with_ray": (_BUFFER, "weights.md"),
    "--vllm.enable_sleep": ("Engines without a GPU never sleep.", "start/cpu.md"),
    "--ds.attn_implementation": ("Without a GPU, flash attention becomes sdpa; the run says so.", "start/cpu.md"),
    "--ds.param_dtype": ("Without a GPU it is fp32, unless --cpu.dtype says bfloat16.", "start/cpu.md"),
    "--ds.use_universal_ckpt": (
        "Resumes from the newest checkpoint of OpenRLHF's; what only ours have starts anew.", "checkpoints.md"),
    "--ckpt.path": ("One run at a time has the directory; a run keeps its own state in it, too.", "checkpoints.md"),
    "--ckpt.max_num": ("1 becomes 2: the last checkpoint stays until the next one is complete.", "checkpoints.md"),
    "--ckpt.save_steps": ("A run that is asked to stop writes one more checkpoint.", "checkpoints.md"),
    "--ckpt.load_enable": (
        "Takes the newest complete checkpoint; refused where it was made with other settings.", "checkpoints.md"),
    "--train.enable_ema": ("After a resume the average starts anew from the given model.", "checkpoints.md"),
    "--reward.remote_url": (
        "Files are imported once before the start; rewards that are no numbers end the run.", "reliability.md"),
    "--logger.wandb.key": ("Hidden in all that a run records and prints.", "run-files.md"),
}  # fmt: skip


def _flag(group: str, name: str) -> str:
    return f"--{group}.{name}" if group else f"--{name}"


UPSTREAM_FLAGS: Mapping[str, Judgement] = {
    **{_flag(group, name): Judgement("the same") for group, names in _SAME.items() for name in names.split()},
    **{flag: Judgement("refused", sentence) for flag, sentence in _REFUSED.items()},
    **{flag: Judgement("different", *said) for flag, said in _DIFFERENT.items()},
}
# A flag that is judged twice.
assert len(UPSTREAM_FLAGS) == sum(len(names.split()) for names in _SAME.values()) + len(_REFUSED) + len(_DIFFERENT)
