"""Counts what the steps of one engine did. Pure: what vLLM says of a step in, counters out.

Nothing here is done once a sample and step that can be done once a step: it lies between two forward passes.

Invariants: a sample's first token (which prefill emits) is a response token but not a decode token; drafts that vLLM
pads with -1 to keep a batch uniform are no drafts; an accepted draft token counts only if it became a response token
(tokens after the end of a response do not); samples that are not to be counted, are not.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from rhyme_openrlhf.drafting.drafter import FROM_OWN, FROM_SIBLINGS, Verified
from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES

# vLLM 0.29.0 pads the draft of a request that enters decode with this token (v1/core/sched/scheduler.py).
PADDING = -1


class Emitted(Protocol):
    """What a step gave one sample: response tokens, and why it finished, if it did (vLLM's EngineCoreOutput)."""

    request_id: str
    new_token_ids: Sequence[int]
    finish_reason: object


class StepMeter:
    """Running totals of one engine since it started."""

    def __init__(self) -> None:
        self._totals: dict[str, int | float] = dict.fromkeys(COUNTER_NAMES, 0)
        # Samples without a response token, and those that are not counted: few, or none.
        self._beginning: set[str] = set()
        self._uncounted: set[str] = set()
        # Of the step under way: its counted samples in prefill and in decode; those that are not counted; its drafts,
        # and where they came from.
        self._prefilling: set[str] = set()
        self._decoding = 0
        self._ignored: set[str] = set()
        self._verified = Verified([], [], [])
        self._sources: Sequence[int] = ()
        self._accepted: Sequence[int] = ()

    def start(self, request_id: str, response_tokens: int, counted: bool) -> None:
        """A sample begins, or goes on, with so many response tokens from elsewhere."""
        if not counted:
            self._uncounted.add(request_id)
        elif not response_tokens:
            self._beginning.add(request_id)

    def finish(self, request_id: str) -> None:
        """A sample ended or was aborted."""
        self._beginning.discard(request_id)
        self._uncounted.discard(request_id)

    def begin_step(self, scheduled: Mapping[str, int], known: Container[str]) -> None:
        """A step has run that computed `scheduled` tokens of each sample; those not `known` were aborted meanwhile."""
        here = sum(map(known.__contains__, scheduled))
        self._prefilling, self._ignored = set(), set()
        if self._beginning or self._uncounted:
            self._prefilling = {name for name in self._beginning if name in scheduled and name in known}
            self._ignored = {name for name in self._uncounted if name in scheduled and name in known}
            self._totals["prompt_tokens"] += sum(scheduled[name] for name in self._prefilling)
        self._decoding = here - len(self._prefilling) - len(self._ignored)

    def verified_drafts(
        self, drafts: Mapping[str, Sequence[int]], sampled: Mapping[str, int], known: Container[str]
    ) -> Verified:
        """The drafts of the step that count: `drafts` as scheduled, `sampled` tokens that came out of the step.

        A request that sampled n tokens accepted n - 1 of its draft: the last one is the model's own.
        """
        requests, drafted, accepted = [], [], []
        for name, tokens in drafts.items():
            length = len(tokens)
            if tokens[-1] == PADDING:
                length = sum(token != PADDING for token in tokens)
            if length and name in known and name not in self._uncounted:
                requests.append(name)
                drafted.append(length)
                accepted.append(max(sampled.get(name, 0) - 1, 0))
        return Verified(requests, drafted, accepted)

    def count_drafts(self, drafts: Verified, sources: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts of the step, the source of each, and by source the accepted tokens (`drafter.FROM_...`)."""
        self._verified, self._sources, self._accepted = drafts, sources, accepted

    def end_step(self, emitted: Iterable[Sequence[Emitted]], seconds: float) -> None:
        """What the step gave its samples, and how long it took."""
        if self._ignored and not self._decoding and not self._prefilling:
            return
        totals = self._totals
        tokens = first = 0
        ended: dict[str, int] = {}
        for outputs in emitted:
            for output in outputs:
                gained = len(output.new_token_ids)
                if self._ignored and output.request_id in self._ignored:
                    continue
                tokens += gained
                if output.finish_reason is not None:
                    ended[output.request_id] = gained
                if self._prefilling and gained and output.request_id in self._prefilling:
                    self._beginning.discard(output.request_id)
                    first += gained
        totals["response_tokens"] += tokens
        totals["decode_tokens"] += tokens - first
        totals["finished_samples"] += len(ended)
        self._count_accepted(ended)
        totals["decode_steps"] += self._decoding > 0
        totals["sample_steps"] += self._decoding
        totals["busy_seconds"] += seconds

    def _count_accepted(self, ended: Mapping[str, int]) -> None:
        drafts = self._verified
        if not drafts.requests:
            return
        totals = self._totals
        totals["drafts"] += len(drafts.requests)
        totals["drafted"] += sum(drafts.drafted)
        accepted = list(self._accepted)
        if ended:
            for name, source, hits in zip(drafts.requests, self._sources, drafts.accepted, strict=True):
                if name in ended:
                    accepted[source] -= max(hits - ended[name], 0)
        totals["accepted"] += sum(accepted)
        totals["accepted_siblings"] += accepted[FROM_SIBLINGS]
        totals["accepted_own"] += accepted[FROM_OWN]
        self._verified = Verified([], [], [])

    def add_draft_seconds(self, seconds: float) -> None:
        """Time spent looking up drafts, which lies between two steps and is busy time too."""
        self._totals["draft_seconds"] += seconds
        self._totals["busy_seconds"] += seconds

    def counters(self) -> dict[str, int | float]:
        """The totals, by EngineCounters' field names."""
        return dict(self._totals)
