"""A step that engines have, as the pipeline's controller keeps it: plain data.

Invariant: what engines still owe of it is what is not `done`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhyme_openrlhf.rollout.pipeline_generator import DrawnStep, HandedStep
from rhyme_openrlhf.scheduling.step_plan import StepPlacement
from rhyme_openrlhf.telemetry.metrics import EngineCounters

# A prompt group: the step it was drawn for, and its place in that step.
Key = tuple[int, int]


@dataclass
class StepInFlight:
    """`done`: places whose prompt groups have ended or were given up; `lengths`: of the responses of those that ended.

    `retried`: places that are generated for the second time; `deferred`: places that train in the next step; `moved`:
    samples that were sent to another engine because they are too long.
    """

    drawn: DrawnStep
    placement: StepPlacement
    handed: HandedStep
    done: set[int] = field(default_factory=set)
    lengths: dict[int, list[int]] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)
    deferred: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    counters: EngineCounters = EngineCounters()

    def owed(self) -> list[int]:
        """The places whose prompt groups have not ended."""
        return [place for place in range(len(self.drawn.prompts)) if place not in self.done]
