#!/usr/bin/env bash
# NOT RUN on GPUs by us yet: the flags are checked against both parsers by a test, the numbers are a starting point.
#
# PPO with a critic and a reward model on TWO nodes with 8 GPUs of 80 GB each, nothing sleeping:
#
#   4 GPUs  actor and reference model (they share: the reference only runs before the actor trains)
#   4 GPUs  critic and reward model   (they share for the same reason)
#   8 GPUs  4 vLLM engines of tensor parallel size 2
#
# Before: `ray start --head` on the first node, `ray start --address FIRST:6379` on the second, and this package in the
# same environment on both.
#
#   DATA=prompts.jsonl REWARD_MODEL=org/name OUTPUT=/shared/ppo-critic examples/ppo_critic_16gpu.sh \
#       [more options, which win over those below]
#
# OUTPUT   an absolute path on a file system that all nodes share: for the run's record, checkpoints and the model
set -euo pipefail

ARGUMENTS=(
    # -- Models. The critic starts from the reward model when none is named.
    --actor.model_name_or_path "${MODEL:-Qwen/Qwen3-8B}"
    --reward.model_name_or_path "${REWARD_MODEL:?set REWARD_MODEL to a reward model}"
    --actor.num_nodes 1 --actor.num_gpus_per_node 4
    --ref.num_nodes 1 --ref.num_gpus_per_node 4 --train.colocate_actor_ref
    --critic.num_nodes 1 --critic.num_gpus_per_node 4
    --reward.num_nodes 1 --reward.num_gpus_per_node 4 --train.colocate_critic_reward

    # -- Engines. Two GPUs an engine: a long last answer finishes sooner, and the weights take half the memory of each.
    --vllm.num_engines 4 --vllm.tensor_parallel_size 2
    --vllm.gpu_memory_utilization 0.85 --vllm.enable_prefix_caching

    # -- Memory of the trainer.
    --ds.zero_stage 3 --ds.adam_offload --actor.gradient_checkpointing_enable --ds.packing_samples
    --rollout.micro_batch_size 4 --train.micro_batch_size 2

    # -- Data.
    --data.prompt_dataset "${DATA:?set DATA to a file of prompts}"
    --data.input_key input --data.apply_chat_template
    --data.max_len 4096 --rollout.max_new_tokens 2048
    --train.num_episodes 3

    # -- PPO: the critic's estimate is the baseline, so one answer a prompt is enough.
    --algo.advantage.estimator gae --algo.advantage.gamma 1.0 --algo.advantage.lambd 0.95
    --rollout.batch_size 1024 --rollout.n_samples_per_prompt 1 --train.batch_size 128
    --algo.kl.init_coef 0.01 --reward.normalize_enable
    --actor.adam.lr 5e-7 --critic.adam.lr 9e-6
    # Let the critic learn to judge before the actor listens to it.
    --critic.freezing_steps 10

    # -- Ours. One answer a prompt means no siblings to draft from: all drafts come from earlier episodes.
    --histospec.enable
    # Two workers, which Ray may place on different nodes; each keeps half of the prompts.
    --history.workers 2
    --run.name ppo-critic

    --run.dir "${OUTPUT:?set OUTPUT to an absolute path that all nodes share}/runs/$(date +%Y%m%d-%H%M%S)"
    --ckpt.output_dir "$OUTPUT" --ckpt.path "$OUTPUT/resume"
    --ckpt.save_steps 50 --ckpt.max_num 2
)

# `ray job submit` sends the working directory to the cluster and shows the driver's output here. A run that was
# submitted goes on when this terminal is closed; `ray job logs` shows it again.
exec ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir . \
    -- python3 -m rhyme_openrlhf.cli.train_ppo_ray "${ARGUMENTS[@]}" "$@"
