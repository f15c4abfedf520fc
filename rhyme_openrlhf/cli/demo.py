"""`rhyme demo`: a real GRPO run on the embedded model and task, without a GPU or on any number of them.

This command only chooses arguments; the run itself is `rhyme train`. Further arguments of the command line are
appended, so every option can be changed.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from rhyme_openrlhf.cli import train_ppo_ray
from rhyme_openrlhf.embedded.demo import demo_arguments

USAGE = """\
usage: rhyme demo [options of rhyme train]

Trains the embedded model (1 to 3 M parameters, it is part of the package) on its embedded task with GRPO: real
OpenRLHF, Ray, DeepSpeed and vLLM, nothing downloaded. Without a GPU: two engines, a few minutes on two cores. With
one GPU, engine and policy share it; with two, each has its own; with three or more there are two engines.

  rhyme demo                               as it is
  rhyme demo --train.num_episodes 10       longer
  rhyme demo --no-histospec.enable         without drafts from history, to compare
  rhyme train --help-all                   every option that can be appended
"""


def arguments(saved_to: str, gpus: int = 0, *, cuda_graphs: bool = False) -> list[str]:
    """Return the demo's `rhyme train` arguments for `gpus` GPUs; everything it saves goes below `saved_to`."""
    chosen = demo_arguments(gpus, cuda_graphs=cuda_graphs)
    return [*chosen, "--ckpt.path", saved_to, "--ckpt.output_dir", f"{saved_to}/trained"]


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit code of `rhyme train`."""
    if argv in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    # Imported only now: --help must not wait for torch.
    from rhyme_openrlhf.platform import run_gpus

    return train_ppo_ray.main([*arguments(checkpoints(), run_gpus()), *argv])


def checkpoints() -> str:
    """Return where a demo saves by default: a folder of its own, which need not exist."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return str(Path(tempfile.gettempdir()) / f"rhyme-demo-{stamp}-{os.getpid()}")
