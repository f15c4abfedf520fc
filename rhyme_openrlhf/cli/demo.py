"""`rhyme demo`: a real GRPO run on the embedded model and task, on a machine without a GPU.

Only chooses arguments: the run itself is `rhyme train`. Whatever follows on the command line is appended, so every
option can be changed.
"""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import train_ppo_ray

USAGE = """\
usage: rhyme demo [options of rhyme train]

Trains the embedded model (1 to 3 M parameters, it is part of the package) on its embedded task with GRPO: real
OpenRLHF, Ray, DeepSpeed and vLLM, two engines, no GPU, nothing downloaded. A few minutes on two cores.

  rhyme demo                               as it is
  rhyme demo --train.num_episodes 10       longer
  rhyme demo --no-histospec.enable         without drafts from history, to compare
  rhyme train --help                       every option that can be appended
"""


def arguments(checkpoints: str) -> list[str]:
    """The demo's `rhyme train` arguments; checkpoints and the trained model go below `checkpoints`."""
    return shlex.split(
        f"""
        --actor.model_name_or_path {shlex.quote(str(embedded.MODEL))}
        --data.prompt_dataset {shlex.quote(str(embedded.DATA / "mixed_train.jsonl"))}
        --data.input_key input --data.label_key label
        --reward.remote_url {shlex.quote(str(embedded.REWARD))}
        --run.name demo
        --ckpt.path {shlex.quote(checkpoints)} --ckpt.output_dir {shlex.quote(checkpoints)}/trained
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


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit code of `rhyme train`."""
    if argv in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    checkpoints = str(Path(tempfile.gettempdir()) / "rhyme-demo-checkpoints")
    return train_ppo_ray.main([*arguments(checkpoints), *argv])
