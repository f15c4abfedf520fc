"""A step that engines have, as the pipeline's controller keeps it, and what the trainer is told at its end: plain data.

Invariant: what engines still owe of a step is what is not `done`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rhyme_openrlhf.pipeline.generator import DrawnStep, HandedStep
from rhyme_openrlhf.scheduling.step_plan import StepPlacement
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.training.samples_generator import Swapped

# A prompt group: the step it was drawn for, and its place in that step.
Key = tuple[int, int]


@dataclass(frozen=True)
class StepEnd:
    """All prompt groups of a step have been sent, `prompts` of them: what OpenRLHF's trainer gets beside the samples.

    `excluded`: prompt groups of this step and those before that were left out, because a reward did not come;
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
class StepInFlight:
    """`done`: places whose prompt groups have ended or were given up; `lengths`: of the responses of those that ended.

    `retried`: places that are generated for the second time; `deferred`: places that train in the next step; `moved`:
    samples that were sent to another engine because they are too long; `filtered`: places that are not trained on, for
    which `drawn` has more prompts at its end.
    """

    drawn: DrawnStep
    placement: StepPlacement
    handed: HandedStep
    done: set[int] = field(default_factory=set)
    lengths: dict[int, list[int]] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)
    deferred: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    filtered: set[int] = field(default_factory=set)
    counters: EngineCounters = EngineCounters()

    def owed(self) -> list[int]:
        """The places whose prompt groups have not ended."""
        return [place for place in range(len(self.drawn.prompts)) if place not in self.done]

    @property
    def prompts(self) -> int:
        """How many prompts the step was drawn with, and so how many it trains on while there are enough."""
        return len(self.placement.engine_of)

    @property
    def pass_rate(self) -> float:
        """The percentage of its prompts that was not filtered out."""
        return 100 * (1 - len(self.filtered) / len(self.drawn.prompts))

    def swapped(self, deferred: Sequence[Key], taken: Sequence[Key]) -> Swapped:
        """Where the next step has prompts that this one deferred, instead of those that this one has taken."""
        drawn = self.drawn
        return tuple(
            (place, (drawn.prompts[late], drawn.labels[late], drawn.images[late]))
            for (_, place), (_, late) in zip(taken, deferred, strict=True)
        )
