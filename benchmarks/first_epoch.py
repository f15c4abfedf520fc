"""Speed of the first epoch: when no prompt has a history yet, and with the responses of an earlier run. Measured.

Real runs on this machine, interleaved.

    python benchmarks/first_epoch.py --seeds 1 2 3 --out first_epoch.json [-- options of rhyme train for every arm]
    python benchmarks/first_epoch.py --new "--histospec.window_max 16"     # one more arm: ours with these options
    python benchmarks/first_epoch.py --quick                               # one seed, short epochs: does it work?

A GRPO run of two epochs, seed by seed, on these arms in turn:

- `openrlhf`, `off`, `on`: the arms of `rollout.py`: OpenRLHF's own classes, ours without drafts, and ours by default.
- `earlier`: ours with the responses of an earlier run (`--history.earlier`). That run has the same prompts and options,
  and another seed (its own plus 1000). It is made before the seed's other runs and is no arm.
- `new`: further options of `rhyme train`, such as another source of drafts.

The table has each arm's figures by epoch. Then come the ratios of runs with the same seed: rollout tokens/s, steps/s
and tokens/s of whole steps, in epoch 1, from epoch 2 on and in all. Each is a median with its interval. The machine's
speed drifts over minutes, so more seeds give a better interval. The file is written after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout import ARM_OPTIONS, OPENRLHF, PROMPTS_A_STEP, run_arm, run_arms, table, write_prompts

from rhyme_openrlhf.platform import run_gpus
from rhyme_openrlhf.settings.history import NONE

# Four steps an epoch: within the first epoch, samples finish that a source over all prompts can draft from.
PROMPTS = 24
QUICK_PROMPTS = 6
EPOCHS = 2
EARLIER, NEW = "earlier", "new"
# The run that `earlier` drafts from.
BEFORE = "before"
# What an earlier run's seed is more.
OTHER_SEED = 1000
ARMS = (*ARM_OPTIONS, EARLIER)


def comparisons(arms: Sequence[str], per_epoch: int) -> list[tuple[str, str, str, slice]]:
    """Return what is compared: arm, its peer, when in words and as steps."""
    times = (("epoch 1", slice(0, per_epoch)), ("epochs 2 on", slice(per_epoch, None)), ("whole run", slice(None)))
    pairs = [(arm, peer) for arm in ("on", EARLIER, NEW) for peer in (OPENRLHF, "off", "on") if arm != peer]
    return [(arm, peer, when, steps) for arm, peer in pairs if {arm, peer} <= set(arms) for when, steps in times]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--new", type=shlex.split, metavar="OPTIONS", help="options of rhyme train of a further arm")
    parser.add_argument("--quick", action="store_true", help="one seed, one step an epoch")
    parser.add_argument("--out", type=Path, default=Path("first_epoch.json"))
    parser.add_argument("options", nargs="*", help="options of rhyme train for every arm, after --")
    chosen = parser.parse_args()
    arms: dict[str, Sequence[str]] = {name: ARM_OPTIONS.get(name, ()) for name in chosen.arms}
    if chosen.new:
        arms[NEW] = chosen.new
    count, seeds = (QUICK_PROMPTS, chosen.seeds[:1]) if chosen.quick else (PROMPTS, chosen.seeds)
    per_epoch = count // PROMPTS_A_STEP
    conditions = {"kind": "measured", "cpus": os.cpu_count(), "gpus": run_gpus(), "options": chosen.options}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rhyme-first-epoch-") as temporary:
        folder = Path(temporary)
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, count)

        def run(name: str, seed: int, arm_options: Sequence[str]) -> list[dict[str, Any]]:
            before = folder / f"{BEFORE}-{seed + OTHER_SEED}"
            if EARLIER in arms and not before.exists():
                runs.append({"arm": BEFORE, "seed": seed + OTHER_SEED, "steps": one_run(BEFORE, seed + OTHER_SEED, ())})
            source = str(before / "run") if name == EARLIER else NONE
            ours = () if name == OPENRLHF else ("--history.earlier", source)
            return one_run(name, seed, [*ours, *arm_options])

        def one_run(name: str, seed: int, options: Sequence[str]) -> list[dict[str, Any]]:
            return run_arm(name, seed, prompts, [*chosen.options, *options], folder, epochs=EPOCHS)

        for one in run_arms(arms, seeds, run):
            runs.append(one)
            chosen.out.write_text(json.dumps({**conditions, "arms": arms, "runs": runs}) + "\n")
    print(table([one for one in runs if one["arm"] in arms], per_epoch, comparisons(list(arms), per_epoch)))


if __name__ == "__main__":
    main()
