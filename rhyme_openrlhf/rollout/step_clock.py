"""How long decode steps take: from a step's scheduling to the next one's, when that follows at once.

So a step's time has in it all that surrounds the forward pass: sampling, drafting, vLLM's own work between two steps.

Invariants: only steps that decode and prefill nothing are timed; a step after which the engine had nothing to run has
no next one to be timed by, and is dropped. Checked against vLLM 0.29.0 `v1/core/sched/output.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class DecodeStep(NamedTuple):
    """A timed step: samples, tokens of context in all before it, draft tokens verified in all, seconds."""

    running: int
    context: int
    drafts: int
    seconds: float


class StepClock:
    """The steps of one engine."""

    def __init__(self) -> None:
        self._before: DecodeStep | None = None

    def scheduled(self, output: Any, requests: Mapping[str, Any], now: float) -> DecodeStep | None:
        """A step was scheduled at `now` (seconds of a steady clock): returns the one before it, if that is to be timed.

        `output`: vLLM's SchedulerOutput; `requests`: the scheduler's, by id.
        """
        before, self._before = self._before, _decode_step(output, requests, now)
        return before._replace(seconds=now - before.seconds) if before is not None else None

    def interrupted(self) -> None:
        """Whatever comes next does not follow at once."""
        self._before = None


def _decode_step(output: Any, requests: Mapping[str, Any], now: float) -> DecodeStep | None:
    scheduled = output.num_scheduled_tokens
    drafts = {request: len(tokens) for request, tokens in output.scheduled_spec_decode_tokens.items()}
    if not scheduled or any(tokens != 1 + drafts.get(request, 0) for request, tokens in scheduled.items()):
        return None
    # A sample's first token is of its prefill, also where that has one token left to compute.
    if any(requests[request].num_output_tokens == 0 for request in scheduled):
        return None
    # Scheduling has counted this step's tokens as computed already.
    computed = sum(requests[request].num_computed_tokens for request in scheduled) - sum(scheduled.values())
    return DecodeStep(len(scheduled), computed, sum(drafts.values()), now)
