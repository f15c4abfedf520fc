"""One sentence on each option: the schema's help, or ours where upstream's parser has none."""

from __future__ import annotations

from rhyme_openrlhf.api.launch.schema import TypedOption

# OpenRLHF's options, after its documentation and cli/train_ppo_ray.py (0.11.2).
_UPSTREAM: dict[str, str] = {
    "--actor.model_name_or_path": "The model to train: a name on the hub, or a directory below the service's roots.",
    "--critic.model_name_or_path": "The critic's initial model; if not given, the policy's model.",
    "--reward.model_name_or_path": "A reward model that scores the responses, in place of a reward function.",
    "--reward.remote_url": "A Python file with reward_func(queries, prompts, labels), or a reward server's address.",
    "--train.agent_func_path": "A Python file with an agent for multi-turn responses; the agent computes the reward.",
    "--data.prompt_dataset": "The prompts: a data set's name on the hub, or a file (JSON lines, CSV, Parquet).",
    "--data.input_key": "The column with the prompt.",
    "--data.label_key": "The column with the expected answer, which is passed to the reward function.",
    "--data.input_template": "A template with {} in place of the prompt.",
    "--data.prompt_split": "The split of the data set to train on.",
    "--rollout.batch_size": "Prompts in one step.",
    "--rollout.temperature": "Randomness of sampling: 1 keeps the model's distribution, lower values sharpen it.",
    "--rollout.top_p": "Sample only from the most likely tokens whose probabilities add up to this value.",
    "--rollout.micro_batch_size": "Samples in one forward pass when log-probabilities and rewards are computed.",
    "--rollout.max_tokens_per_gpu": "Tokens in one forward pass on a GPU, with dynamic batches.",
    "--train.num_episodes": "Number of passes over the whole data set.",
    "--train.max_epochs": "Number of training passes over each step's samples.",
    "--train.seed": "Seed of the random number generators.",
    "--train.dynamic_batch_enable": "Make batches with equal numbers of tokens instead of equal numbers of samples.",
    "--train.max_tokens_per_gpu": "Tokens in one training batch on a GPU, with dynamic batches.",
    "--train.batch_size": "Samples in one optimizer step, over all GPUs.",
    "--algo.kl.init_coef": "Weight of the KL penalty towards the reference model; 0 needs no reference model.",
    "--algo.kl.target": "Adapt the KL coefficient so that the KL divergence approaches this value.",
    "--actor.adam.lr": "Learning rate of the policy.",
    "--critic.adam.lr": "Learning rate of the critic.",
    "--actor.adam.betas": "Adam's decay rates (betas) of mean and variance.",
    "--critic.adam.betas": "Adam's decay rates (betas) of mean and variance.",
    "--actor.adam.eps": "Adam's epsilon: a small number added to the denominator.",
    "--critic.adam.eps": "Adam's epsilon: a small number added to the denominator.",
    "--actor.adam.weight_decay": "Decay of the weights at each optimizer step.",
    "--critic.adam.weight_decay": "Decay of the weights at each optimizer step.",
    "--actor.lr_scheduler": "How the learning rate changes over the run: constant, cosine_with_min_lr, linear, ...",
    "--critic.lr_scheduler": "How the learning rate changes over the run: constant, cosine_with_min_lr, linear, ...",
    "--actor.lr_warmup_ratio": "Share of the run used for learning-rate warm-up.",
    "--critic.lr_warmup_ratio": "Share of the run used for learning-rate warm-up.",
    "--actor.min_lr_ratio": "Final learning rate of the cosine schedule, as a share of the learning rate.",
    "--critic.min_lr_ratio": "Final learning rate of the cosine schedule, as a share of the learning rate.",
    "--actor.max_norm": "Gradients with a larger norm are clipped to this norm.",
    "--critic.max_norm": "Gradients with a larger norm are clipped to this norm.",
    "--actor.optim": "Optimizer of the policy.",
    "--critic.optim": "Optimizer of the critic.",
    "--actor.gradient_checkpointing_enable": "Recompute activations in the backward pass: less memory, more time.",
    "--actor.policy_loss_type": "Importance ratio of the policy loss: ppo uses one per token, gspo one per sequence.",
    "--vllm.num_engines": "Engines that generate the responses; each holds a copy of the model.",
    "--vllm.tensor_parallel_size": "GPUs over which each engine's copy of the model is split.",
    "--vllm.gpu_memory_utilization": "Share of a GPU's memory that an engine takes for weights and KV cache.",
    "--vllm.enable_prefix_caching": "Keep the KV cache of prefixes that several requests share.",
    "--vllm.sync_with_ray": "Send weights through Ray's collectives if OpenRLHF's own broadcast is used.",
    "--eval.steps": "Steps between two evaluations; -1: never.",
    "--eval.split": "The split of the evaluation data set.",
    "--ckpt.path": "Folder of the checkpoints; if not given, a folder in the run directory.",
    "--ckpt.output_dir": "Folder of the trained model; if not given, beside the checkpoints.",
    "--ckpt.save_steps": "Steps between two checkpoints; -1: only when the run is stopped.",
    "--ckpt.save_hf": "Also write each checkpoint as a Hugging Face model.",
    "--ckpt.disable_ds": "Write no DeepSpeed state: such a checkpoint cannot be resumed from.",
    "--ckpt.max_num": "Most checkpoints to keep; older ones are deleted.",
    "--ckpt.max_mem": "Largest total size of checkpoints in GB; older ones are deleted.",
    "--ckpt.load_enable": "Resume from the checkpoint in ckpt.path.",
    "--logger.logging_steps": "Steps between two reports of metrics.",
    "--logger.wandb.org": "Team in Weights & Biases.",
    "--logger.wandb.group": "Group of runs in Weights & Biases.",
    "--logger.wandb.project": "Project in Weights & Biases.",
    "--logger.wandb.run_name": "Name of the run in Weights & Biases.",
    "--ds.packing_samples": "Pack several samples into one sequence, so that nothing is computed on padding.",
    "--ds.load_in_4bit": "Load the model with 4-bit weights (QLoRA).",
    "--ds.lora.rank": "Rank of LoRA; 0 trains all weights.",
    "--ds.lora.alpha": "Scale (alpha) of LoRA.",
    "--ds.lora.dropout": "Dropout in LoRA's layers.",
    "--ds.lora.target_modules": "Layers to which LoRA is applied.",
    "--ds.overlap_comm": "Communicate gradients while the next ones are computed.",
    "--ds.deepcompile": "Let DeepSpeed compile the model.",
}


def explained(option: TypedOption) -> str:
    """Return one sentence on the option, or "" if there is none."""
    said = _UPSTREAM.get(option.flag) or option.help.strip()
    if not said:
        return ""
    # Normalise upstream's help, which begins and ends in different ways.
    return f"{said[0].upper()}{said[1:]}{'' if said[-1] in '.?!:' else '.'}"
