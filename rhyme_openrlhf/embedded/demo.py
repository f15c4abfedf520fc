"""The demo run's options: GRPO on the embedded model and task. Pure: the command line and the control plane use it."""

from __future__ import annotations

import shlex

from rhyme_openrlhf import embedded


def demo_arguments() -> list[str]:
    """Options of `rhyme train`, without where checkpoints go."""
    return shlex.split(
        f"""
        --actor.model_name_or_path {shlex.quote(str(embedded.MODEL))}
        --data.prompt_dataset {shlex.quote(str(embedded.DATA / "mixed_train.jsonl"))}
        --data.input_key input --data.label_key label
        --reward.remote_url {shlex.quote(str(embedded.REWARD))}
        --run.name demo
        --vllm.num_engines 2 --vllm.enforce_eager
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
