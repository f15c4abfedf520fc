"""Does a training step take longer with our classes than with OpenRLHF's? Measured: the same batches, in turn.

    python benchmarks/training_time.py --batches 8 --out training_time.json [-- options of rhyme train]

A whole run cannot settle this: policies drift apart, so the arms of `rollout.py` train other batches, minutes apart.
Here two policy actors stand beside each other, OpenRLHF's (`unchanged.py`) and ours. Both train the recorded batches of
a run (`replay.py`), batch by batch: while one trains, the other waits. Which one begins turns with every batch. Both
begin from the same weights and, trained on the same batches, keep the same shapes. No engine runs.

It prints both policies' milliseconds a batch, and the ratio of usual and of mean times with their 95 % intervals
(`turns.py`). The largest difference of the two policies' losses must be tiny. Exit status 1: ours takes more than LIMIT
times as long, with certainty.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rhyme_openrlhf.platform import gpu_present, run_gpus, shims

if not gpu_present():
    shims.install()

import openrlhf.cli.train_ppo_ray as launcher
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from replay import TRACE, read_trace
from turns import Ratio, Repeats, Turn, mean_speed, ratio, usual_speed
from unchanged import UnchangedPolicyModelActor

from rhyme_openrlhf.cli import upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.run.placement import strategy_of
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.training.model_actors import RhymePolicyModelActor

ARMS = {"openrlhf": UnchangedPolicyModelActor, "ours": RhymePolicyModelActor}
# First batches allocate memory and build kernels; both arms train them untimed.
WARM_UP = 1
LIMIT = 1.02
# Both actors share one device.
SHARE = 0.5


class Services:
    """The part of a run's services that a policy actor uses: settings, and a record that keeps nothing."""

    def __init__(self, settings: RhymeSettings) -> None:
        self.settings = settings

    def record(self, event: Any, source: str) -> None:
        """Drop an event."""


def batches_of(trace: Path, samples: int) -> list[list[Experience]]:
    """Return the batches of a recorded run, each of `samples` samples."""
    experiences = [[one for record in step for one in experiences_of(record)] for step in read_trace(trace)]
    return [step[:samples] for step in experiences if len(step) >= samples]


def experiences_of(record: Record) -> list[Experience]:
    """Return a prompt's samples as a training step gets them; advantages are rewards above the prompt's mean."""
    mean = sum(piece.reward for piece in record.pieces) / len(record.pieces)
    found = []
    for piece in record.pieces:
        context, response = len(piece.context), len(piece.tokens)
        tokens = torch.tensor([[*map(int, piece.context), *map(int, piece.tokens)]])
        mask = torch.ones_like(tokens)
        actions = mask[:, 1:].clone()
        actions[:, : context - 1] = 0
        # A policy of before, which finds every token about as likely: the loss only has to be a number.
        log_probs = torch.full(actions.shape, -0.1) * actions
        found.append(
            Experience(
                sequences=tokens,
                attention_mask=mask,
                action_mask=actions,
                action_log_probs=log_probs,
                rollout_log_probs=log_probs.clone(),
                advantages=(piece.reward - mean) * actions,
                returns=(piece.reward - mean) * actions,
                rewards=torch.tensor([float(piece.reward)]),
                response_length=torch.tensor([response]),
                truncated=torch.tensor([False]),
                total_length=torch.tensor([context + response]),
                info={"reward": torch.tensor([float(piece.reward)])},
            )
        )
    return found


def start_actors(argv: list[str]) -> dict[str, Any]:
    """Start Ray and both policies."""
    args = upstream.parse(argv)
    if gpu_present():
        ray.init(log_to_driver=False)
    else:
        from rhyme_openrlhf.platform.cpu_arguments import adapt_arguments
        from rhyme_openrlhf.platform.local_ray import start_local_ray

        adapt_arguments(args)
        start_local_ray(1, len(ARMS) + 1, {}, log_to_driver=False)
    strategy = strategy_of(args, launcher.get_strategy, gpu_present())
    strategy.services = Services(RhymeSettings.from_namespace(args))
    actors = {}
    for name, kind in ARMS.items():
        actors[name] = ray.remote(num_gpus=SHARE)(kind).remote(1, 0, None, None)
        # One after the other: DeepSpeed's builds and ports are shared.
        ray.get(actors[name].init_model_from_pretrained.remote(strategy, args.actor.model_name_or_path, 1000, None))
    return actors


def train(actor: Any, batch: list[Experience]) -> tuple[float, float]:
    """Let one policy train a batch; return the seconds and the loss."""
    ray.get([actor.append.remote(experience) for experience in batch])
    begun = time.perf_counter()
    status = ray.get(actor.fit.remote())
    return time.perf_counter() - begun, float(status["policy_loss"])


def measure(
    actors: dict[str, Any], batches: list[list[Experience]], repeats: int
) -> tuple[dict[str, list[list[Turn]]], float]:
    """Train every batch by every arm in turn, `repeats` times; return turns and the largest difference of losses."""
    turns: dict[str, list[list[Turn]]] = {name: [] for name in actors}
    apart = 0.0
    for batch in batches[:WARM_UP]:
        for actor in actors.values():
            train(actor, batch)
    for repeat in range(repeats):
        for of_arm in turns.values():
            of_arm.append([])
        for number, batch in enumerate(batches):
            tokens = sum(int(experience.response_length.sum()) for experience in batch)
            losses = []
            order = list(actors) if (repeat + number) % 2 else list(actors)[::-1]
            for name in order:
                seconds, loss = train(actors[name], batch)
                turns[name][-1].append(Turn(tokens, seconds))
                losses.append(loss)
            # torch keeps a loss that is not a number; max() may drop it.
            found = torch.tensor(losses)
            apart = float(torch.tensor([apart, found.max() - found.min()]).max())
    return turns, apart


def taken(turns: dict[str, Repeats]) -> dict[str, Ratio]:
    """Return our time a batch over OpenRLHF's, by usual and by mean speeds, which are the other way round."""
    pairs = [(turns["openrlhf"], turns["ours"])]
    return {"usual": ratio(pairs, usual_speed), "mean": ratio(pairs, mean_speed)}


def main() -> int:
    """Run and report; 1 when ours is slower than LIMIT allows, with certainty."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="recorded training steps")
    parser.add_argument("--repeats", type=int, default=4, help="times that every batch is trained by both")
    parser.add_argument("--samples", type=int, default=96, help="of each batch")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--out", type=Path, default=Path("training_time.json"))
    parser.add_argument("options", nargs="*", help="options of rhyme train, after --")
    chosen = parser.parse_args()
    batches = batches_of(chosen.trace, chosen.samples)[: chosen.batches]
    with tempfile.TemporaryDirectory(prefix="rhyme-training-time-") as folder:
        argv = [*arguments(folder, run_gpus()), "--train.batch_size", str(chosen.samples), *chosen.options]
        try:
            turns, apart = measure(start_actors(argv), batches, chosen.repeats)
        finally:
            ray.shutdown()
    ratios = taken(turns)
    for name, repeats in turns.items():
        seconds = [turn.seconds for repeat in repeats for turn in repeat]
        print(f"{name:9s} {1000 * sum(seconds) / len(seconds):8.0f} ms a batch, mean of {len(seconds)}")
    for name, found in ratios.items():
        print(f"ours / openrlhf, {name} time: {found.value:.3f}x ({found.low:.3f} to {found.high:.3f})")
    print(f"largest difference of losses: {apart:.2g}")
    conditions = {"kind": "measured", "cpus": os.cpu_count(), "gpus": run_gpus(), "options": chosen.options}
    figures = {"turns": turns, "ratios": {name: found._asdict() for name, found in ratios.items()}, "losses": apart}
    chosen.out.write_text(json.dumps(conditions | figures) + "\n")
    # Written so that a ratio that is not a number fails too.
    return 0 if ratios["usual"].low <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
