"""Options of the small training run that shows whether weights arrive. Pure: arguments in, arguments out.

The run is the user's (model, placement, ZeRO stage, transport, engines), made short, with weights that move. It has
few prompts, short responses, a high constant learning rate, and a reward of our own that differs from sample to sample.
The trained model is thrown away. Invariant: the run writes only below the given folder, and logs nothing to the user's
tracking services.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

STEPS = 3
PROMPTS_PER_STEP = 4
SAMPLES_PER_PROMPT = 4
RESPONSE_TOKENS = 32
# Adam moves every weight by about this much in each of its first steps, for any gradient. Log-probabilities then move
# by tenths and more, hundreds of times the difference between two right implementations.
LEARNING_RATE = "1e-3"
# Checked after every sync of the run.
ALL_SYNCS = "1000000"
REWARD = Path(__file__).parent / "varied_reward.py"
# Where upstream writes the trained model, which is worth nothing, and its checkpoints.
TRAINED, CHECKPOINTS = WRITTEN = ("trained", "checkpoints")
# Flags without a value that cannot be taken back by a later option.
DROPPED = frozenset(
    {
        "--ckpt.load_enable",
        "--ckpt.save_hf",
        # The prompts are written out as the model gets them.
        "--data.apply_chat_template",
        # Would draw more prompts than there are.
        "--algo.dynamic_filtering_enable",
    }
)


def training_arguments(
    argv: Sequence[str], args: SimpleNamespace, prompts: Path, lengths: Sequence[int], folder: Path
) -> list[str]:
    """Options of `rhyme train`: the user's `argv`, then what is different.

    `args` is `argv` parsed; `prompts` is a file of prompts ("input", "label"), `lengths` their lengths in tokens;
    the run's directory will be `folder`/run.
    """
    batch = min(PROMPTS_PER_STEP, len(lengths))
    samples = samples_per_prompt(batch, args)
    ranks = policy_ranks(args)
    share = batch * samples // ranks
    steps_per_epoch = max(1, min(STEPS, len(lengths) // batch))
    changed = {
        "data.prompt_dataset": prompts,
        "data.prompt_split": "train",
        "data.input_key": "input",
        "data.label_key": "label",
        "data.input_template": "",
        "data.max_samples": batch * steps_per_epoch,
        "data.max_len": max(lengths) + RESPONSE_TOKENS,
        "rollout.max_new_tokens": RESPONSE_TOKENS,
        "rollout.batch_size": batch,
        "rollout.vllm_generate_batch_size": batch,
        "rollout.n_samples_per_prompt": samples,
        "rollout.micro_batch_size": math.gcd(share, args.rollout.micro_batch_size),
        "train.batch_size": batch * samples,
        "train.micro_batch_size": math.gcd(share, args.train.micro_batch_size),
        "train.num_episodes": math.ceil(STEPS / steps_per_epoch),
        "train.max_epochs": 1,
        "train.agent_func_path": "",
        "reward.remote_url": REWARD,
        "actor.optim": "adam",
        "actor.adam.lr": LEARNING_RATE,
        "actor.lr_scheduler": "constant",
        "actor.lr_warmup_ratio": 0,
        "critic.freezing_steps": -1,
        "weights.check_syncs": ALL_SYNCS,
        "eval.dataset": "",
        "eval.steps": -1,
        "ckpt.save_steps": -1,
        "ckpt.path": folder / CHECKPOINTS,
        "ckpt.output_dir": folder / TRAINED,
        "logger.wandb.key": "",
        "logger.tensorboard_dir": "",
        "run.dir": folder / "run",
        "run.name": "verify",
        "run.progress": "off",
    }
    if args.data.prompt_probs:
        changed["data.prompt_probs"] = "1"
    kept = [option for option in argv if option not in DROPPED]
    return kept + [text for name, value in changed.items() for text in (f"--{name}", str(value))]


def policy_ranks(args: SimpleNamespace) -> int:
    """Data-parallel ranks of the policy: a step's samples are dealt to them evenly."""
    return args.actor.num_nodes * args.actor.num_gpus_per_node // args.ds.ring_attn_size // args.ds.tensor_parallel_size


def samples_per_prompt(batch: int, args: SimpleNamespace) -> int:
    """Return the samples per prompt: at least SAMPLES_PER_PROMPT, and the same number for every rank."""
    samples = SAMPLES_PER_PROMPT
    while batch * samples % policy_ranks(args):
        samples += 1
    return samples
