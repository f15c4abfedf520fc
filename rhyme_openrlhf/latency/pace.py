"""The wait after a step that makes it as long as a profile says, for engines that emulate another machine. Pure.

Invariant: steps of one engine follow each other. Each takes at least the profile's time, counted from the later of its
begin and the end of the step before. With asynchronous scheduling, two steps can be under way at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel


@dataclass(frozen=True)
class StepContent:
    """The content of a step: decoding samples, their tokens of context and draft tokens; tokens of each prefill.

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
        """Start the clock; prefills cost nothing if the profile has none."""
        self._model = StepModel(profile)
        self._prefill = TransferModel(profile) if profile.prefills else None
        self._end = float("-inf")
        self.late_seconds = 0.0
        """The seconds by which steps took longer here than the profile says, in all."""

    def seconds(self, content: StepContent) -> float:
        """Return the seconds of the step by the profile; prefills beside decoding are added."""
        seconds = 0.0
        if content.running:
            seconds += self._model.seconds(content.running, content.context, content.drafts)
        if content.prefills and self._prefill is not None:
            seconds += self._prefill.prefill_seconds(content.prefills)
        return seconds

    def wait(self, content: StepContent, now: float) -> float:
        """Return the seconds to wait until the step ends, whose computing is over at `now`."""
        end = max(self._end, content.started) + self.seconds(content)
        self.late_seconds += max(now - end, 0.0)
        self._end = max(end, now)
        return max(end - now, 0.0)
