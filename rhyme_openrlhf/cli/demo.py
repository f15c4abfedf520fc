"""`rhyme demo`: a real GRPO run on the embedded model and task, on a machine without a GPU.

Only chooses arguments: the run itself is `rhyme train`. Whatever follows on the command line is appended, so every
option can be changed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rhyme_openrlhf.cli import train_ppo_ray
from rhyme_openrlhf.embedded.demo import demo_arguments

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
    return [*demo_arguments(), "--ckpt.path", checkpoints, "--ckpt.output_dir", f"{checkpoints}/trained"]


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit code of `rhyme train`."""
    if argv in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    checkpoints = str(Path(tempfile.gettempdir()) / "rhyme-demo-checkpoints")
    return train_ppo_ray.main([*arguments(checkpoints), *argv])
