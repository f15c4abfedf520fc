#!/usr/bin/env bash
# NOT RUN on GPUs by us yet: the flags are checked against both parsers by a test, the numbers are a starting point.
#
# GRPO of Qwen3-8B on ONE node with 8 GPUs of 80 GB. Everything shares the same 8 GPUs ("colocate_all"): while the
# engines generate, the trainer's state sleeps in host memory, and the other way round.
#
#   DATA=math.jsonl REWARD=reward.py examples/grpo_qwen3_8b_8gpu.sh [more options, which win over those below]
#
# DATA    rows like {"input": "What is 2+3?", "label": "5"}
# REWARD  a Python file with reward_func(queries, prompts, labels, **kwargs) (rhyme_openrlhf/embedded/reward.py is one)
set -euo pipefail

ARGUMENTS=(
    # -- Models. The reference model exists because KL is on (--algo.kl.init_coef above 0).
    --actor.model_name_or_path "${MODEL:-Qwen/Qwen3-8B}"
    --actor.num_nodes 1 --actor.num_gpus_per_node 8
    --ref.num_nodes 1 --ref.num_gpus_per_node 8

    # -- Engines. With colocate_all, engines x tensor parallel size must be the actor's number of GPUs: 8 x 1.
    --vllm.num_engines 8 --vllm.tensor_parallel_size 1
    --train.colocate_all --vllm.enable_sleep --ds.enable_sleep
    # What is left is for weights, gradients and activations of the trainer, which is awake when the engines sleep.
    --vllm.gpu_memory_utilization 0.6
    --vllm.enable_prefix_caching

    # -- Memory of the trainer: parameters, gradients and Adam's state are split over the 8 GPUs.
    --ds.zero_stage 3 --ds.adam_offload --actor.gradient_checkpointing_enable
    # Answers differ much in length; packing wastes no computation on padding.
    --ds.packing_samples --train.dynamic_batch_enable
    --train.max_tokens_per_gpu 16384 --rollout.max_tokens_per_gpu 32768

    # -- Data. Drafts come from what the same prompt was answered before, so they start to pay in the second episode.
    --data.prompt_dataset "${DATA:?set DATA to a file of prompts}"
    --data.input_key input --data.label_key label --data.apply_chat_template
    --data.max_len 9216 --rollout.max_new_tokens 8192
    --train.num_episodes 10

    # -- GRPO: 128 prompts x 8 answers a step, one optimizer step on all of them.
    --reward.remote_url "${REWARD:?set REWARD to a reward file or URL}"
    --algo.advantage.estimator group_norm
    --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024
    --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3
    # Engine and trainer compute a token's probability slightly differently; this weighs the difference out.
    --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip
    --algo.advantage.is_correction_threshold 0.5 2.0
    --actor.adam.lr 1e-6 --rollout.temperature 1.0

    # -- Ours. All of these are defaults or close to them; --no-histospec.enable gives OpenRLHF's own rollout.
    --histospec.enable --histospec.window_max 32
    # One history worker keeps and indexes the answers of these prompts; give more when there are 100,000 of them.
    --history.workers 1
    --run.name grpo-qwen3-8b

    # -- Checkpoints.
    --ckpt.output_dir "${OUTPUT:-ckpt/grpo-qwen3-8b}" --ckpt.path "${OUTPUT:-ckpt/grpo-qwen3-8b}/resume"
    --ckpt.save_steps 50 --ckpt.max_num 2 --ckpt.save_hf
)

# Starts Ray on this node by itself.
exec python -m rhyme_openrlhf.cli.train_ppo_ray "${ARGUMENTS[@]}" "$@"
