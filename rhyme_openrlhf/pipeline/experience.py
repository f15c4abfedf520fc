"""The experience maker of the streaming pipeline: forward passes (policy, reference, critic, reward model) begin when
whole prompt groups are there, while engines still generate the rest of the step.

Checked against OpenRLHF 0.11.2 `trainer/ppo_utils/experience_maker.py`. Invariants: the micro-batches are those that
upstream would make of the whole step in the same order, each computed once and with the weights that upstream would use
(the policy is not trained in between); rewards are shaped and advantages computed on the whole step, by upstream.
"""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.training.experience import RhymeExperienceMaker


class StreamingExperienceMaker(RhymeExperienceMaker):
    """Upstream's, with `take` beside `make_experience_batch`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._taken: list[Any] = []
        self._made: list[Any] = []

    def take(self, samples: list[Any], of: int) -> None:
        """Finished samples, a whole prompt group, of a step that has `of` samples; computes what can be computed."""
        self._taken += samples
        # Micro-batches of like length are only known when all samples are.
        if self.args.train.dynamic_batch_enable:
            return
        unit = self._unit()
        while len(self._taken) >= self._done + unit and (of - self._done) // unit > 1:
            self._make(self._taken[self._done : self._done + unit])

    def _unit(self) -> int:
        """Samples that make one micro-batch for every rank: fewer could not be shared among the ranks."""
        ranks = max(
            len(group._actor_handlers) // group.duplicate_actors
            for group in (
                self.actor_model_group,
                self.critic_model_group,
                self.reward_model_group,
                self.initial_model_group,
            )
            if group is not None
        )
        return int(self.args.rollout.micro_batch_size) * ranks

    @property
    def _done(self) -> int:
        return sum(len(experience.index) for experience in self._made)

    def _make(self, samples: list[Any]) -> None:
        first = self._done
        experiences = super().make_experience(super().split_rollout_samples(samples))
        for experience in experiences:
            experience.index = [first + number for number in experience.index]
        self._made += experiences

    def split_rollout_samples(self, rollout_samples: list[Any]) -> list[Any]:
        """Micro-batches of the samples whose passes are still to be made."""
        first = self._done
        if [id(sample) for sample in rollout_samples] != [id(sample) for sample in self._taken]:
            raise ValueError("the samples of the step are not those that came for it, in that order")
        if first == len(rollout_samples):
            # Prompt groups were left out that the last micro-batch was kept for.
            return []
        rest: list[Any] = super().split_rollout_samples(rollout_samples[first:])
        for experience in rest:
            experience.index = [first + number for number in experience.index]
        return rest

    def make_experience(self, samples_list: list[Any]) -> list[Any]:
        """All experiences of the step, in order."""
        made, self._made, self._taken = self._made, [], []
        return [*made, *super().make_experience(samples_list)] if samples_list else made
