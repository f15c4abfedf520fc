"""Counts what the steps of one engine did. Pure: plain dictionaries in, counters out.

Invariants: a sample's first token (which prefill emits) is a response token but not a decode token; drafts that vLLM
pads with -1 to keep a batch uniform are no drafts; an accepted draft token counts only if it became a response token
(tokens after the end of a response do not).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES

# vLLM 0.29.0 pads the draft of a request that enters decode with this token (v1/core/sched/scheduler.py).
PADDING = -1
# What the counters tell apart: the rest of the accepted tokens is from history.
ACCEPTED_BY_SOURCE = {"siblings": "accepted_siblings", "own": "accepted_own"}


@dataclass(frozen=True)
class VerifiedDraft:
    """A draft that one step verified: tokens drafted, and how many of them were accepted."""

    request: str
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Emitted:
    """What a step gave one sample: response tokens, and whether it finished."""

    tokens: int
    finished: bool


def verified_drafts(drafts: Mapping[str, Sequence[int]], sampled: Mapping[str, int]) -> list[VerifiedDraft]:
    """The real drafts of a step, by request: `drafts` as scheduled, `sampled` tokens that came out of the step.

    A request that sampled n tokens accepted n - 1 of its draft: the last one is the model's own.
    """
    verified = []
    for request, tokens in drafts.items():
        drafted = sum(token != PADDING for token in tokens)
        if drafted:
            verified.append(VerifiedDraft(request, drafted, max(sampled.get(request, 0) - 1, 0)))
    return verified


class StepMeter:
    """Running totals of one engine since it started."""

    def __init__(self) -> None:
        self._totals: dict[str, int | float] = dict.fromkeys(COUNTER_NAMES, 0)

    def record_step(
        self,
        output_tokens_before: Mapping[str, int],
        scheduled_tokens: Mapping[str, int],
        verified: Sequence[VerifiedDraft],
        emitted: Mapping[str, Emitted],
        sources: Mapping[str, str],
        seconds: float,
    ) -> None:
        """Count one step; mappings are by request. A request with no response token before it is in prefill.

        `sources`: where the drafts came from, "history" or a key of ACCEPTED_BY_SOURCE.
        """
        totals = self._totals
        nothing = Emitted(0, False)
        decoding = 0
        for request, before in output_tokens_before.items():
            result = emitted.get(request, nothing)
            totals["response_tokens"] += result.tokens
            totals["finished_samples"] += result.finished
            if before:
                decoding += 1
                totals["decode_tokens"] += result.tokens
            else:
                totals["prompt_tokens"] += scheduled_tokens[request]
        for draft in verified:
            totals["drafts"] += 1
            totals["drafted"] += draft.drafted
            accepted = min(draft.accepted, emitted.get(draft.request, nothing).tokens)
            totals["accepted"] += accepted
            counter = ACCEPTED_BY_SOURCE.get(sources.get(draft.request, ""))
            if counter:
                totals[counter] += accepted
        totals["decode_steps"] += decoding > 0
        totals["sample_steps"] += decoding
        totals["busy_seconds"] += seconds

    def add_draft_seconds(self, seconds: float) -> None:
        """Time spent looking up drafts, which lies between two steps and is busy time too."""
        self._totals["draft_seconds"] += seconds
        self._totals["busy_seconds"] += seconds

    def counters(self) -> dict[str, int | float]:
        """The totals, by EngineCounters' field names."""
        return dict(self._totals)
