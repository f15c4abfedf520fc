"""Judges whether training steps taught the policy anything. Pure: figures in, sentences out.

Invariants:
- A figure of policy or critic that is not finite ends the run in its step. Neither engines nor a checkpoint get its
  weights.
- A run without one update of the policy has failed, and so has one whose updates changed no weight. A step without an
  update, a gradient of zero, and an epoch whose prompts were mostly filtered out are upstream's to allow: they are
  warnings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

POLICY_LOSS = "policy_loss"
POLICY_GRADIENT = "actor_grad_norm"
# Optimizer steps of a training step (training/updates.py).
POLICY_UPDATES = "policy/optimizer_steps"
# OpenRLHF 0.11.2's names of what an update gives (trainer/ray/ppo_actor.py, ppo_critic.py).
LOSSES = (POLICY_LOSS, "critic_loss")
GRADIENTS = (POLICY_GRADIENT, "critic_grad_norm")
REWARDS = ("reward", "return")
# Below this share, most of an epoch's prompts were thrown away.
MOSTLY = 0.5


class LearningError(RuntimeError):
    """A training step, or a whole run, that taught nothing or spoilt the policy; the message says why."""


class Learning:
    """One run's training steps, in their order. `args` are upstream's nested arguments."""

    def __init__(self, args: SimpleNamespace) -> None:
        self._args = args
        self._frozen = False
        self._steps = 0
        self._updates = 0
        self._told: set[str] = set()
        self._epoch: int | None = None
        self._drawn_before = 0
        self._drawn = 0
        self._trained = 0

    def updated(self, step: int, status: Mapping[str, object]) -> Iterator[str]:
        """Take in what the update of a step gave; yield warnings. Raises LearningError for what is not finite."""
        figures = {key: float(value) for key, value in status.items() if isinstance(value, (int, float))}
        # With fp16, DeepSpeed leaves out a step whose gradient overflows, and lowers the scale of the loss.
        checked = LOSSES if self._args.ds.param_dtype == "fp16" else (*LOSSES, *GRADIENTS)
        for name in checked:
            if not math.isfinite(figures.get(name, 0.0)):
                raise LearningError(
                    f"step {step} gave {name} {figures[name]}, which spoils the model's weights: look at the learning "
                    "rate, the rewards and --rollout.temperature; checkpoints of earlier steps are as they were"
                )
        for name in REWARDS:
            if not math.isfinite(figures.get(name, 0.0)):
                yield from self._once(
                    name, f"step {step} has a mean {name} of {figures[name]}: rewards are too large to be added up"
                )
        # As upstream counts: from 0.
        if step - 1 <= self._args.critic.freezing_steps:
            self._frozen = True
            return
        self._steps += 1
        if not figures.get(POLICY_UPDATES, POLICY_LOSS in figures):
            # Micro-batches that make no whole update are said elsewhere (training/updates.py).
            if POLICY_LOSS in figures:
                return
            yield from self._once(
                "update",
                f"step {step} did not update the policy, because its samples fill no micro-batch of each rank "
                f"(--train.micro_batch_size {self._args.train.micro_batch_size})",
            )
            return
        self._updates += 1
        if figures.get(POLICY_GRADIENT) == 0.0:
            yield from self._once(
                "gradient",
                f"step {step} taught nothing: its gradient is 0, as where all responses of a prompt have one reward",
            )

    def step_completed(self, epoch: int, drawn: int, samples: int) -> Iterator[str]:
        """Note a step of `samples` samples, with which `drawn` prompts of the run are drawn; yield warnings.

        Several epochs are one span where no step falls into the first of them.
        """
        if epoch != self._epoch:
            yield from self.epoch_ended()
            self._epoch, self._trained, self._drawn_before = epoch, 0, self._drawn
        self._drawn = drawn
        self._trained += samples // self._args.rollout.n_samples_per_prompt

    def resumed(self, drawn: int) -> None:
        """Begin after a checkpoint, with which `drawn` prompts were drawn."""
        self._drawn = drawn

    def epoch_ended(self) -> Iterator[str]:
        """Yield a warning if most prompts of the epoch that ends were filtered out."""
        drawn = self._drawn - self._drawn_before
        if self._epoch is None or not self._args.algo.dynamic_filtering_enable or self._trained >= MOSTLY * drawn:
            return
        yield (
            f"epoch {self._epoch} trained on {self._trained} of {drawn} prompts: --algo.dynamic_filtering_enable threw "
            "the responses to the others away"
        )

    def run_ended(self) -> None:
        """Raise LearningError if the run, which was not resumed, has not once updated the policy."""
        if self._updates or (self._frozen and not self._steps):
            return
        if self._steps:
            raise LearningError(
                f"the run made {self._steps} steps, and none updated the policy: choose --train.batch_size "
                f"({self._args.train.batch_size}), --train.micro_batch_size ({self._args.train.micro_batch_size}) and "
                f"--rollout.batch_size ({self._args.rollout.batch_size}) so that a step's samples make an update"
            )
        if self._args.algo.dynamic_filtering_enable:
            low, high = self._args.algo.dynamic_filtering_range
            why = f"no prompt's mean score was between {low:g} and {high:g} (--algo.dynamic_filtering_range)"
        else:
            why = "no prompt gave samples"
        raise LearningError(f"the run ended without a training step, because {why}")

    def weights_compared(self, unchanged: bool) -> Iterator[str]:
        """Judge whether the run left the policy's weights `unchanged`. Raises LearningError if several updates did.

        The first update of a run has, by its schedule, often a learning rate of 0: it alone is a warning.
        """
        if not unchanged or not self._updates:
            return
        text = (
            f"{self._updates} training step{'s' if self._updates > 1 else ''} updated the policy, and none of its "
            "weights changed: look at the rewards, and at the learning rate (--actor.adam.lr "
            f"{self._args.actor.adam.lr:g}) and its schedule"
        )
        if self._updates > 1:
            raise LearningError(text)
        yield text

    def _once(self, kind: str, text: str) -> Iterator[str]:
        if kind not in self._told:
            self._told.add(kind)
            yield text
