#!/usr/bin/env bash
# NOT RUN on GPUs by us yet: the flags are checked against both parsers by a test, the numbers are a starting point.
#
# Asynchronous GRPO of Qwen3-8B on ONE node with 8 GPUs of 80 GB: 4 generate while 4 train, and new weights reach the
# engines in the middle of answers ("partial rollout"), which go on with the new weights.
#
#   DATA=math.jsonl REWARD=reward.py examples/async_partial_rollout.sh [more options, which win over those below]
#
# When to prefer it to grpo_qwen3_8b_8gpu.sh: when generation takes about as long as training, so that neither half
# of the GPUs waits for the other. The price is data that is slightly off policy, which the correction below weighs out.
set -euo pipefail

ARGUMENTS=(
    # -- Models: 4 GPUs for the trainer. KL is off, so no reference model takes any.
    --actor.model_name_or_path "${MODEL:-Qwen/Qwen3-8B}"
    --actor.num_nodes 1 --actor.num_gpus_per_node 4
    --algo.kl.init_coef 0

    # -- Engines: 4 GPUs of their own, which never sleep.
    --vllm.num_engines 4 --vllm.tensor_parallel_size 1
    --vllm.gpu_memory_utilization 0.9 --vllm.enable_prefix_caching

    # -- Asynchronous. The queue holds this many generated batches: more of them smooth out uneven steps, and make the
    # data older by as many steps.
    --train.async_enable --train.async_queue_size 1
    # Weights are switched under running requests, instead of waiting for the longest answer first.
    --train.partial_rollout_enable

    # -- Memory of the trainer.
    --ds.zero_stage 3 --ds.adam_offload --actor.gradient_checkpointing_enable
    --ds.packing_samples --train.dynamic_batch_enable
    --train.max_tokens_per_gpu 16384 --rollout.max_tokens_per_gpu 32768

    # -- Data.
    --data.prompt_dataset "${DATA:?set DATA to a file of prompts}"
    --data.input_key input --data.label_key label --data.apply_chat_template
    --data.max_len 9216 --rollout.max_new_tokens 8192
    --train.num_episodes 10

    # -- GRPO. vllm_generate_batch_size above batch_size keeps the engines busy with the next prompts while the last
    # long answers of a batch finish.
    --reward.remote_url "${REWARD:?set REWARD to a reward file or URL}"
    --algo.advantage.estimator group_norm
    --rollout.batch_size 128 --rollout.vllm_generate_batch_size 192
    --rollout.n_samples_per_prompt 8 --train.batch_size 1024
    --actor.adam.lr 1e-6
    # An answer's tokens come from up to two weight versions: drop those whose probability has moved too far.
    --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode mask
    --algo.advantage.is_correction_threshold 0.5 5.0

    # -- Ours.
    --histospec.enable --history.workers 1
    --run.name async-partial

    --ckpt.output_dir "${OUTPUT:-ckpt/async-partial}" --ckpt.path "${OUTPUT:-ckpt/async-partial}/resume"
    --ckpt.save_steps 50 --ckpt.max_num 2
)

exec python -m rhyme_openrlhf.cli.train_ppo_ray "${ARGUMENTS[@]}" "$@"
