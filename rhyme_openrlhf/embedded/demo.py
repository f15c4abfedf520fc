"""The demo run's options: GRPO on the embedded model and task. Pure: the command line and the control plane use it."""

from __future__ import annotations

import shlex

from rhyme_openrlhf import embedded

# What one engine may use of a GPU that the policy trains on, too.
SHARED_GPU = 0.4


def placement(gpus: int) -> list[str]:
    """Return the options that place engines and policy on `gpus` GPUs. 0: no GPU, where none is asked for.

    Two engines and one policy rank want three GPUs. The placements for one and two GPUs have not been run on GPUs.
    """
    if gpus == 1:
        # OpenRLHF lets engine and policy share one GPU when they are colocated.
        return shlex.split(f"--vllm.num_engines 1 --train.colocate_all --vllm.gpu_memory_utilization {SHARED_GPU}")
    return ["--vllm.num_engines", "1" if gpus == 2 else "2"]


def demo_arguments(gpus: int = 0, *, cuda_graphs: bool = False) -> list[str]:
    """Return the options of `rhyme train` for a machine with `gpus` GPUs, without where checkpoints go.

    `cuda_graphs`: engines compile the model and capture CUDA graphs. That takes longer than the demo's few steps save.
    """
    engines = placement(gpus) + ([] if cuda_graphs else ["--vllm.enforce_eager"])
    return engines + shlex.split(
        f"""
        --actor.model_name_or_path {shlex.quote(str(embedded.MODEL))}
        --data.prompt_dataset {shlex.quote(str(embedded.DATA / "mixed_train.jsonl"))}
        --data.input_key input --data.label_key label
        --reward.remote_url {shlex.quote(str(embedded.REWARD))}
        --run.name demo
        --actor.num_gpus_per_node 1 --ds.zero_stage 2 --ds.attn_implementation sdpa
        --data.max_len 768 --rollout.max_new_tokens 512
        --rollout.batch_size 12 --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 8
        --train.batch_size 96 --train.micro_batch_size 8 --train.num_episodes 6
        --algo.advantage.estimator group_norm --algo.kl.init_coef 0
        --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip
        --algo.advantage.is_correction_threshold 0.0 5.0
        --actor.adam.lr 4e-4 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0
        """
    )
