"""How long to wait so that a step takes what a profile says: pure, asked by engines that emulate another machine.

Invariant: steps of one engine follow each other; each takes at least the profile's time from the later of its begin and
the end of the one before (which two steps on their way at once, as with asynchronous scheduling, need).
"""

from __future__ import annotations

from dataclasses import dataclass

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel


@dataclass(frozen=True)
class StepContent:
    """What a step computes: decoding samples, their tokens of context and draft tokens; tokens of each prefill.

    `started`: seconds of a steady clock.
    """

    started: float
    running: int
    context: int
    drafts: int
    prefills: tuple[int, ...] = ()


class Pace:
    """The clock of one engine."""

    def __init__(self, profile: Profile) -> None:
        """Prefills cost nothing where the profile has none."""
        self._model = StepModel(profile)
        self._prefill = TransferModel(profile) if profile.prefills else None
        self._end = float("-inf")
        self.late_seconds = 0.0
        """By how much steps took longer here than the profile says, in all."""

    def seconds(self, content: StepContent) -> float:
        """What the profile says the step takes; prefills beside decoding are added to it."""
        seconds = 0.0
        if content.running:
            seconds += self._model.seconds(content.running, content.context, content.drafts)
        if content.prefills and self._prefill is not None:
            seconds += self._prefill.prefill_seconds(content.prefills)
        return seconds

    def wait(self, content: StepContent, now: float) -> float:
        """The step's computing is over at `now`: how many seconds to wait until it ends."""
        end = max(self._end, content.started) + self.seconds(content)
        self.late_seconds += max(now - end, 0.0)
        self._end = max(end, now)
        return max(end - now, 0.0)
