"""What an option is for, in one sentence: the schema's own help, and where upstream's parser says nothing, ours."""

from __future__ import annotations

from rhyme_openrlhf.api.launch.schema import TypedOption

# Of OpenRLHF's options; its documentation and cli/train_ppo_ray.py (0.11.2) say what they do.
_UPSTREAM: dict[str, str] = {
    "--actor.model_name_or_path": "The model to train: a name on the hub, or a directory below the service's roots.",
    "--critic.model_name_or_path": "What the critic starts from; if not given, the policy's model.",
    "--reward.model_name_or_path": "A reward model that judges the answers, in place of a reward function.",
    "--reward.remote_url": "A Python file with reward_func(queries, prompts, labels), or a reward server's address.",
    "--train.agent_func_path": "A Python file with an agent, for answers of several turns; it gives the reward itself.",
    "--data.prompt_dataset": "The prompts: a data set's name on the hub, or a file (JSON lines, CSV, Parquet).",
    "--data.input_key": "The column with the prompt.",
    "--data.label_key": "The column with the expected answer, which the reward gets.",
    "--data.input_template": "A text with {} where the prompt goes.",
    "--data.prompt_split": "Which split of the data set is trained on.",
    "--rollout.batch_size": "Prompts of one step.",
    "--rollout.temperature": "Randomness of sampling: 1 samples from the model as it is, less is more certain.",
    "--rollout.top_p": "Sample only from the likeliest tokens that together have this probability.",
    "--rollout.micro_batch_size": "Samples of one forward pass when log-probabilities and rewards are computed.",
    "--rollout.max_tokens_per_gpu": "Tokens of one forward pass on a GPU, with dynamic batches.",
    "--train.num_episodes": "How often the whole data set is gone through.",
    "--train.max_epochs": "How often each step's samples are trained on.",
    "--train.seed": "Start of the random numbers.",
    "--train.dynamic_batch_enable": "Make batches of equal numbers of tokens instead of equal numbers of samples.",
    "--train.max_tokens_per_gpu": "Tokens of one training batch on a GPU, with dynamic batches.",
    "--train.batch_size": "Samples of one optimizer step, over all GPUs.",
    "--algo.kl.init_coef": "How strongly the policy is held near the reference model; 0 needs no reference model.",
    "--algo.kl.target": "Move the KL coefficient so that the KL divergence comes near this value.",
    "--actor.adam.lr": "Learning rate of the policy.",
    "--critic.adam.lr": "Learning rate of the critic.",
    "--actor.adam.betas": "Adam's decay rates of mean and variance.",
    "--critic.adam.betas": "Adam's decay rates of mean and variance.",
    "--actor.adam.eps": "Adam's smallest denominator.",
    "--critic.adam.eps": "Adam's smallest denominator.",
    "--actor.adam.weight_decay": "Decay of the weights at each optimizer step.",
    "--critic.adam.weight_decay": "Decay of the weights at each optimizer step.",
    "--actor.lr_scheduler": "How the learning rate changes over the run: constant, cosine_with_min_lr, linear, ...",
    "--critic.lr_scheduler": "How the learning rate changes over the run: constant, cosine_with_min_lr, linear, ...",
    "--actor.lr_warmup_ratio": "Share of the run in which the learning rate rises to its value.",
    "--critic.lr_warmup_ratio": "Share of the run in which the learning rate rises to its value.",
    "--actor.min_lr_ratio": "Where the cosine ends, as a share of the learning rate.",
    "--critic.min_lr_ratio": "Where the cosine ends, as a share of the learning rate.",
    "--actor.max_norm": "Longer gradients are cut to this norm.",
    "--critic.max_norm": "Longer gradients are cut to this norm.",
    "--actor.optim": "Optimizer of the policy.",
    "--critic.optim": "Optimizer of the critic.",
    "--actor.gradient_checkpointing_enable": "Compute activations again in the backward pass: less memory, more time.",
    "--actor.policy_loss_type": "ppo: a ratio for each token; gspo: one for each sequence.",
    "--vllm.num_engines": "Engines that generate the answers; each is a copy of the model.",
    "--vllm.tensor_parallel_size": "GPUs over which each engine's copy of the model is split.",
    "--vllm.gpu_memory_utilization": "Share of a GPU's memory that an engine takes for weights and KV cache.",
    "--vllm.enable_prefix_caching": "Keep the KV cache of beginnings that several requests share.",
    "--vllm.sync_with_ray": "Send weights through Ray's collectives, where OpenRLHF's own broadcast is used.",
    "--eval.steps": "Evaluate every so many steps; -1: never.",
    "--eval.split": "Which split of the evaluation data set.",
    "--ckpt.path": "Where checkpoints go; if not given, a folder of the run's own.",
    "--ckpt.output_dir": "Where the trained model goes; if not given, beside the checkpoints.",
    "--ckpt.save_steps": "Write a checkpoint every so many steps; -1: only when the run is stopped.",
    "--ckpt.save_hf": "Write each checkpoint as a Hugging Face model too.",
    "--ckpt.disable_ds": "Write no DeepSpeed state: such a checkpoint cannot be resumed from.",
    "--ckpt.max_num": "Older checkpoints beyond this number are deleted.",
    "--ckpt.max_mem": "Older checkpoints beyond this size, in GB, are deleted.",
    "--ckpt.load_enable": "Go on from the checkpoint in ckpt.path.",
    "--logger.logging_steps": "Report metrics every so many steps.",
    "--logger.wandb.org": "Team in Weights & Biases.",
    "--logger.wandb.group": "Group of runs in Weights & Biases.",
    "--logger.wandb.project": "Project in Weights & Biases.",
    "--logger.wandb.run_name": "Name of the run in Weights & Biases.",
    "--ds.packing_samples": "Put several samples into one sequence, so that nothing is computed on padding.",
    "--ds.load_in_4bit": "Load the model with 4-bit weights (QLoRA).",
    "--ds.lora.rank": "Rank of LoRA; 0 trains all weights.",
    "--ds.lora.alpha": "Scale of LoRA.",
    "--ds.lora.dropout": "Dropout in LoRA's layers.",
    "--ds.lora.target_modules": "Layers that LoRA is put on.",
    "--ds.overlap_comm": "Communicate gradients while others are still computed.",
    "--ds.deepcompile": "Let DeepSpeed compile the model.",
}


def explained(option: TypedOption) -> str:
    """One sentence; "" where nobody has said anything."""
    said = _UPSTREAM.get(option.flag) or option.help.strip()
    if not said:
        return ""
    # Upstream's help begins and ends in every way.
    return f"{said[0].upper()}{said[1:]}{'' if said[-1] in '.?!:' else '.'}"
