"""A step as the trainer gets it: whole prompt groups, in the order in which they end, and then the step's end. Pure.

Upstream reshapes rewards to (prompts, samples of each). So a prompt group that is not whole, or not in one piece, would
silently mix prompts (OpenRLHF 0.11.2, `experience_maker.py`, `reshape(-1, n)`).

Invariants:
- A batch has every prompt group of its step and no other, each once and with all its samples side by side.
- No sample in a batch is more than `MOST_OFF_POLICY` steps off policy.
- Where prompt groups may be deferred (`scheduling/deferral.py`), a batch has some of the step before, at most one step
  older than that. In exchange the step before took as many of this step's own.
- Where prompt groups are filtered out or have no reward, the step before may have taken some of this step's own.

What would break one of these raises BatchError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rhyme_openrlhf.scheduling.turns import MOST_OFF_POLICY

# How many steps after its own a prompt group may train. TAKEN_AHEAD: in its own step, or a step earlier, which lacks
# some. EXCHANGED: also a step later, in exchange for a prompt group of that step.
TAKEN_AHEAD: tuple[int, ...] = (-1, 0)
EXCHANGED: tuple[int, ...] = (-1, 0, 1)


class BatchError(RuntimeError):
    """A prompt group does not belong into the batch; the message says which and why."""


@dataclass(frozen=True)
class PromptGroup:
    """The finished samples of prompt `place` (from 0) of training step `step`, which has `prompts` prompts.

    `versions`: the weight versions that each sample was generated with, empty where they are not known. There is one
    for each round of a conversation, and one more for each load below a deferred sample. `trained_in`: the step whose
    batch the prompt group is in; that batch has `batch` prompt groups.
    """

    step: int
    place: int
    prompts: int
    samples: Sequence[Any]
    versions: Sequence[Sequence[int]]
    trained_in: int = 0
    batch: int = 0


@dataclass(frozen=True)
class StepEnd:
    """All prompt groups of a step have been sent, `prompts` of them: what OpenRLHF's trainer gets beside the samples.

    `excluded`: prompt groups of this step and those before that are not trained on, because a reward did not come;
    `deferred`: of this step, that train in the next; `pass_rate`: of the prompts drawn for it, the percentage that was
    not filtered out, None where nothing is filtered.
    """

    step: int
    prompts: int
    client_states: dict[str, Any]
    seconds: float
    excluded: int = 0
    deferred: int = 0
    pass_rate: float | None = None


@dataclass
class Batches:
    """Collects one step's batch after the other; `step` is the one that is being collected. `late`: how many steps late
    it may have a prompt group."""

    step: int
    samples_per_prompt: int
    late: tuple[int, ...] = TAKEN_AHEAD
    _samples: list[Any] = field(default_factory=list)
    # Those of this batch, and those of the batches before as long as they could come again.
    _places: set[tuple[int, int]] = field(default_factory=set)
    _before: set[tuple[int, int]] = field(default_factory=set)

    def add(self, group: PromptGroup) -> None:
        """Take in a prompt group. Raises BatchError."""
        name = f"prompt group {group.place} of step {group.step}"
        # 1: deferred to this step; -1: this step has it from the next.
        late = self.step - group.step
        if group.trained_in != self.step or late not in self.late:
            raise BatchError(f"{name} came while step {self.step} is collected")
        key = (group.step, group.place)
        if key in self._places or key in self._before or not 0 <= group.place < group.prompts:
            raise BatchError(f"{name} came twice, or is none of the step's {group.prompts}")
        if len(group.samples) != self.samples_per_prompt or len(group.versions) != len(group.samples):
            raise BatchError(f"{name} has {len(group.samples)} samples instead of {self.samples_per_prompt}")
        most = MOST_OFF_POLICY + max(late, 0)
        for version in (version for of_sample in group.versions for version in of_sample):
            age = self.step - version - 1
            if not 0 <= age <= most:
                raise BatchError(
                    f"{name} was generated with weight version {version}: {age} steps off policy, where 0 to {most} "
                    "are allowed"
                )
        self._places.add(key)
        self._samples += group.samples

    def complete(self, step: int, prompts: int) -> list[Any]:
        """Return the step's samples, and collect the next step from now on. Raises BatchError if some are missing."""
        if step != self.step or len(self._places) != prompts:
            raise BatchError(
                f"step {step} is said to be complete, but of step {self.step} only {len(self._places)} of {prompts} "
                "prompt groups are there"
            )
        # From two steps before nothing is let in.
        self._before = {key for key in self._before | self._places if key[0] >= step}
        samples, self._samples, self._places, self.step = self._samples, [], set(), step + 1
        return samples
