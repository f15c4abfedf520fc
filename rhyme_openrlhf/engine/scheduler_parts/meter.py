"""Counts of what the decode steps of one engine did: counters, traces of drafts, figures of an engine's status.

vLLM's word on a step goes in, and plain figures come out. Nothing here is done once a sample and step that can be done
once a step, because it lies between two forward passes.

Invariants:
- A sample's first token (which prefill emits) is a response token but not a decode token.
- Drafts that vLLM pads with -1 to keep a batch uniform are no drafts.
- An accepted draft token counts only if it became a response token; tokens after the end of a response do not.
- Samples that are not to be counted are not.
- A trace's spans are in order and do not overlap. Traces that nobody takes are dropped, oldest first, so that aborted
  requests cannot fill the memory.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rhyme_openrlhf.drafting.source import Attribution, Int64s, Verified
from rhyme_openrlhf.engine.calls import SchedulerMeter
from rhyme_openrlhf.engine.requests import PROMPT_KEY, UNCOUNTED
from rhyme_openrlhf.engine.scheduler_parts import DecodeStep, Part
from rhyme_openrlhf.telemetry.engine_events import KV_CACHE, SLOWEST
from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES

# vLLM 0.29.0 pads the draft of a request that enters decode with this token (v1/core/sched/scheduler.py).
PADDING = -1
# Finished traces that wait to be taken: a few prompt groups finish between two calls of the engine's owner.
TRACES_KEPT = 4096
# One of this many decode steps is timed for an engine's status: reading what a step computes takes some 20 microseconds
# at 64 samples.
TIMED_EACH = 8
NOTHING = Verified.of([], [], [])
_last = operator.itemgetter(-1)


def extra_arguments(request: Any) -> dict[str, Any]:
    """Return what the request's sender told us about it."""
    parameters = request.sampling_params
    return (parameters.extra_args if parameters else None) or {}


class Emitted(Protocol):
    """One sample's output of a step: response tokens, and why it finished, if it did (vLLM's EngineCoreOutput)."""

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
        self._verified = NOTHING
        self._came: Attribution | None = None
        self._names: Sequence[str] = ()

    def start(self, request_id: str, response_tokens: int, counted: bool) -> None:
        """Begin a sample that has some response tokens from elsewhere, or none."""
        if not counted:
            self._uncounted.add(request_id)
        elif not response_tokens:
            self._beginning.add(request_id)

    def finish(self, request_id: str) -> None:
        """Forget a sample that ended or was aborted."""
        self._beginning.discard(request_id)
        self._uncounted.discard(request_id)

    def begin_step(self, scheduled: Mapping[str, int], known: Container[str]) -> None:
        """Begin to count a step that computed `scheduled` tokens of each sample; those not `known` were aborted."""
        here = sum(map(known.__contains__, scheduled))
        self._prefilling, self._ignored = set(), set()
        if self._beginning or self._uncounted:
            self._prefilling = {name for name in self._beginning if name in scheduled and name in known}
            self._ignored = {name for name in self._uncounted if name in scheduled and name in known}
            self._totals["prompt_tokens"] += sum(scheduled[name] for name in self._prefilling)
        self._decoding = here - len(self._prefilling) - len(self._ignored)

    def verified_drafts(
        self, drafts: Mapping[str, list[int]], sampling: Sequence[str], counts: Int64s, known: Mapping[str, Any],
        lengths: Int64s | None = None,
    ) -> Verified:  # fmt: skip
        """Return the drafts of the step that count: `drafts` as scheduled, `counts` of the tokens that came out of it.

        `lengths`: of the drafts, if none of them is padded. A request that sampled n tokens accepted n - 1 of its
        draft: the last one is the model's own.
        """
        sampled = dict(zip(sampling, counts.tolist(), strict=False))
        usual = not self._uncounted and drafts.keys() <= known.keys()
        if usual and (lengths is not None or PADDING not in map(_last, drafts.values())):
            # Nearly always, and hundreds of them lie between two forward passes.
            if lengths is None:
                lengths = np.fromiter(map(len, drafts.values()), np.int64, len(drafts))
            given = np.fromiter(map(sampled.get, drafts, itertools.repeat(0)), np.int64, len(drafts))
            return Verified(list(drafts), lengths, np.maximum(given - 1, 0))
        requests, drafted, accepted = [], [], []
        for name, tokens in drafts.items():
            length = len(tokens)
            if tokens[-1] == PADDING:
                length = sum(token != PADDING for token in tokens)
            if length and name in known and name not in self._uncounted:
                requests.append(name)
                drafted.append(length)
                accepted.append(max(sampled.get(name, 0) - 1, 0))
        return Verified.of(requests, drafted, accepted)

    def count_drafts(self, drafts: Verified, came: Attribution, names: Sequence[str]) -> None:
        """Count drafts of the step, which came from these sources; `names`: of all sources (`DraftSource.names`)."""
        self._verified, self._came, self._names = drafts, came, names

    def end_step(self, emitted: Iterable[Sequence[Emitted]], seconds: float) -> None:
        """Count what the step gave its samples, and how long it took."""
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
        drafts, came = self._verified, self._came
        if came is None:
            return
        totals = self._totals
        totals["drafts"] += len(drafts.requests)
        totals["drafted"] += int(drafts.drafted.sum())
        accepted = list(came.accepted)
        if ended:
            places = [place for place, name in enumerate(drafts.requests) if name in ended]
            for place, source, hits in zip(places, came.sources[places], drafts.accepted[places], strict=True):
                accepted[source] -= max(int(hits) - ended[drafts.requests[place]], 0)
        totals["accepted"] += sum(accepted)
        for source_name, tokens in zip(self._names, accepted, strict=True):
            # Some sources have a counter of their own.
            if (counter := f"accepted_{source_name}") in totals:
                totals[counter] += tokens
        self._came = None

    def add_draft_seconds(self, seconds: float) -> None:
        """Add time spent on drafts, which lies between two steps and is busy time too."""
        self._totals["draft_seconds"] += seconds
        self._totals["busy_seconds"] += seconds

    def counters(self) -> dict[str, int | float]:
        """Return the totals, by EngineCounters' field names."""
        return dict(self._totals)


class Meter(StepMeter, Part):
    """The counters of vLLM's scheduler."""

    calls = SchedulerMeter

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler

    def read_counters(self) -> dict[str, Any]:
        """Return what this engine did since it started, as EngineCounters' fields; KV_CACHE and SLOWEST as of now."""
        return {**self.counters(), KV_CACHE: self._scheduler.kv_cache_manager.usage, SLOWEST: self._slowest()}

    def _slowest(self) -> tuple[str, int] | None:
        """Return prompt key and response tokens of the counted, unfinished sample with the most; None without any."""
        arguments = ((extra_arguments(one), one.num_output_tokens) for one in self._scheduler.requests.values())
        counted = [(told.get(PROMPT_KEY, ""), tokens) for told, tokens in arguments if not told.get(UNCOUNTED)]
        return max(counted, key=lambda sample: sample[1], default=None)

    def output_lengths(self) -> dict[str, int]:
        """Return the response tokens so far of each unfinished request."""
        return {request_id: request.num_output_tokens for request_id, request in self._scheduler.requests.items()}

    def added(self, request: Any) -> None:
        self.start(request.request_id, request.num_output_tokens, not extra_arguments(request).get(UNCOUNTED))

    def finished_step(self, output: Any, results: Any) -> None:
        seconds = time.perf_counter() - output.rhyme_started
        self.end_step([client.outputs for client in results.values()], seconds)

    def freed(self, request_id: str) -> None:
        self.finish(request_id)


class _Trace:
    __slots__ = ("drafted", "name", "spans")

    def __init__(self, name: str) -> None:
        self.name = name
        self.drafted = 0
        self.spans: list[tuple[int, int, str]] = []


class DraftTraces:
    """The tokens of chosen requests that came from accepted drafts, and their sources.

    A request that did not ask costs a look-up in a dictionary a verified draft, and nothing while none asks.
    """

    def __init__(self, kept: int = TRACES_KEPT) -> None:
        self._kept = kept
        self._running: dict[str, _Trace] = {}
        self._finished: dict[str, _Trace] = {}

    def __len__(self) -> int:
        """Return how many requests are running and traced."""
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        """Return whether the request is running and traced."""
        return request_id in self._running

    def start(self, request_id: str, name: str | None) -> None:
        """Begin the trace of a request; `name` is what the trace will be asked for by, None: there is none."""
        if name is not None:
            self._running[request_id] = _Trace(name)

    def add(self, request_id: str, drafted: int, accepted: int, position: int, source: str) -> None:
        """Note that a step verified a draft that began behind the first `position` response tokens."""
        trace = self._running[request_id]
        trace.drafted += drafted
        if accepted:
            trace.spans.append((position, position + accepted, source))

    def finish(self, request_id: str) -> None:
        """Keep the trace of a request that has ended or was aborted."""
        trace = self._running.pop(request_id, None)
        if trace is not None:
            self._finished[trace.name] = trace
            if len(self._finished) > self._kept:
                del self._finished[next(iter(self._finished))]

    def take(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return {"drafted": tokens, "spans": [(first, end, source), ...]} of each name, counted in response tokens.

        Each is given once. An unknown one has drafted 0 and no spans.
        """
        nothing = _Trace("")
        found = (self._finished.pop(name, nothing) for name in names)
        return [{"drafted": trace.drafted, "spans": trace.spans} for trace in found]


class StatusFigures(Part):
    """The figures of an engine's status that need counting."""

    def __init__(self) -> None:
        self._steps = 0
        self._timed = 0
        self._sums = [0.0] * len(DecodeStep._fields)
        self._told_at = time.monotonic()
        self._told: Mapping[str, int | float] = {}
        # Draft tokens accepted here, and response tokens that a sample came with, by request: few have any.
        self._accepted: dict[str, int] = {}
        self._came_with: dict[str, int] = {}

    def added(self, request: Any) -> None:
        if request.num_output_tokens:
            self._came_with[request.request_id] = request.num_output_tokens

    def is_timed(self) -> bool:
        # A step is timed by the one after it.
        return (self._steps + 1) % TIMED_EACH <= 1

    def scheduled(self, output: Any, before: DecodeStep | None) -> None:
        self._steps += 1
        if before is not None and self._steps % TIMED_EACH == 1:
            self._timed += 1
            self._sums = [total + value for total, value in zip(self._sums, before, strict=True)]

    def verified(self, drafts: Verified) -> None:
        for request_id, accepted in zip(drafts.requests, drafts.accepted.tolist(), strict=True):
            if accepted:
                self._accepted[request_id] = self._accepted.get(request_id, 0) + accepted

    def freed(self, request_id: str) -> None:
        self._accepted.pop(request_id, None)
        self._came_with.pop(request_id, None)

    def accepted_per_step(self, request: str, generated: int) -> float:
        """Return draft tokens accepted per decode step here, of a sample with `generated` response tokens."""
        accepted = self._accepted.get(request, 0)
        steps = generated - self._came_with.get(request, 0) - accepted
        return accepted / steps if steps > 0 else 0.0

    def take(self, counters: Mapping[str, int | float]) -> dict[str, Any]:
        """Return figures since the last call; `counters`: the engine's totals (EngineCounters)."""
        now = time.monotonic()

        def since(name: str) -> float:
            return counters[name] - self._told.get(name, 0)

        sample_steps = since("sample_steps")
        figures = {
            "decode_steps": counters["decode_steps"],
            "tokens_per_second": since("response_tokens") / max(now - self._told_at, 1e-6),
            "tokens_per_step": since("decode_tokens") / sample_steps if sample_steps else 1.0,
            "decode": [total / self._timed for total in self._sums] if self._timed else None,
        }
        self._told, self._told_at = dict(counters), now
        self._timed, self._sums = 0, [0.0] * len(DecodeStep._fields)
        return figures
