"""vLLM scheduler plug-ins: counting what an engine does, and drafting from history.

`metered_scheduler` is what vLLM's `scheduler_cls` names when speculation is off: vLLM's own scheduler, plain or
async as vLLM chose, plus counters. `HistoryScheduler` also fills each request's draft tokens between two steps
(speculation makes vLLM schedule synchronously, so the scheduler knows every token by then).

With a profile (`install_profile`) a planner decides how much of the drafts the next step verifies, from the step times
that the profile and this engine's own steps say; without one the fixed rules of the paper do.

Invariants: scheduling decisions are vLLM's own; a draft only ever proposes, vLLM's rejection sampler decides; a
request without history gets an empty draft. Checked against vLLM 0.29.0 `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from rhyme_openrlhf.drafting.decision_log import DecisionLog
from rhyme_openrlhf.drafting.draft_trace import DraftTraces
from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES, Attribution, HistoryDrafter, Verified
from rhyme_openrlhf.drafting.gain import GainMeter, Ticket
from rhyme_openrlhf.drafting.planner import Decision, DraftPlanner
from rhyme_openrlhf.engine.patches import core_channel  # noqa: F401  (adds the channel to this process's EngineCore)
from rhyme_openrlhf.engine.request_keys import PROMPT_KEY, TRACE, UNCOUNTED, WINDOW
from rhyme_openrlhf.engine.scheduler_parts.clock import DecodeStep
from rhyme_openrlhf.engine.scheduler_parts.meter import StepMeter
from rhyme_openrlhf.engine.scheduler_parts.pacing import Pacing
from rhyme_openrlhf.engine.scheduler_parts.row_limit import DRAFTING_KEY, RowLimit
from rhyme_openrlhf.engine.scheduler_parts.timing import StepTiming
from rhyme_openrlhf.history.index import IndexBufferError
from rhyme_openrlhf.latency.predictor import Predictor, SpeculationOverhead
from rhyme_openrlhf.latency.profile import ProfileError, parse
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.telemetry.engine_events import KV_CACHE

# Key of our settings in vLLM's additional_config.
SETTINGS_KEY = "rhyme_histospec"
# A draft token of a measured step: any token of any vocabulary.
DUMMY = 1


def extra_arguments(request: Any) -> dict[str, Any]:
    """What the request's sender told us about it."""
    parameters = request.sampling_params
    return (parameters.extra_args if parameters else None) or {}


class Metering(Pacing):
    """Counts, for every step, what was decoded, drafted and accepted. Mixed into vLLM's scheduler classes."""

    CALLABLE: tuple[str, ...] = ("read_counters", "output_lengths")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter = StepMeter()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        output.rhyme_started = started
        return output

    def add_request(self, request: Any) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            counted = not extra_arguments(request).get(UNCOUNTED)
            self.meter.start(request.request_id, request.num_output_tokens, counted)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.meter.begin_step(scheduler_output.num_scheduled_tokens, self.requests)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts:
            # Before vLLM's own update, which forgets the requests that this step finishes.
            sampled = dict(
                zip(model_runner_output.req_ids, map(len, model_runner_output.sampled_token_ids), strict=False)
            )
            verified = self.meter.verified_drafts(drafts, sampled, self.requests)
            if verified.requests:
                came = self.on_verified(verified)
                self.meter.count_drafts(verified, came.sources, came.accepted)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        seconds = time.perf_counter() - scheduler_output.rhyme_started
        self.meter.end_step([client.outputs for client in outputs.values()], seconds)
        self.on_sampled(model_runner_output.req_ids, model_runner_output.sampled_token_ids)
        return outputs

    def on_sampled(self, names: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Called with what a step sampled, after vLLM has taken it in and freed the requests that have ended."""

    def on_verified(self, drafts: Verified) -> Attribution:
        """Called with the drafts that a step verified, while their requests are known; returns where they came from."""
        raise NotImplementedError("only a scheduler that drafts has drafts to verify")

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.meter.finish(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def read_counters(self) -> dict[str, int | float]:
        """Everything this engine did since it started, as EngineCounters' fields; and KV_CACHE, as of now."""
        return {**self.meter.counters(), KV_CACHE: self.kv_cache_manager.usage}

    def output_lengths(self) -> dict[str, int]:
        """Response tokens so far of each unfinished request."""
        return {request_id: request.num_output_tokens for request_id, request in self.requests.items()}


class MeteredScheduler(StepTiming, Metering, Scheduler):
    """vLLM's scheduler with counters, whose steps can be timed."""

    CALLABLE = (*Metering.CALLABLE, *StepTiming.CALLABLE)


class MeteredAsyncScheduler(StepTiming, Metering, AsyncScheduler):
    """vLLM's asynchronous scheduler with counters, whose steps can be timed."""

    CALLABLE = MeteredScheduler.CALLABLE


def metered_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """vLLM's own choice of scheduler, with counters (named as `scheduler_cls`; vLLM calls it like a class)."""
    cls = MeteredAsyncScheduler if vllm_config.scheduler_config.async_scheduling else MeteredScheduler
    return cls(vllm_config=vllm_config, **kwargs)


class HistoryScheduler(StepTiming, Metering, RowLimit, Scheduler):
    """Drafts from the history of each request's prompt (RhymeRL, sections 5.2 to 5.4)."""

    CALLABLE = (
        *Metering.CALLABLE, *StepTiming.CALLABLE, *RowLimit.CALLABLE, "install_history", "forget_history",
        "take_traces", "install_profile", "take_decisions", "take_sentences", "read_gain",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.histospec = HistoSpecSettings(**self.vllm_config.additional_config[SETTINGS_KEY])
        self.drafting = DraftingSettings(**self.vllm_config.additional_config[DRAFTING_KEY])
        self.drafter = self.make_drafter()
        self.source_names: dict[int, str] = SOURCE_NAMES
        self.traces = DraftTraces()
        self.planner: Any = None
        self._overhead: SpeculationOverhead | None = None
        self._decisions = DecisionLog()
        self._decided: Decision | None = None
        self.gain = GainMeter(self.drafting.probe_share)
        # Of the next decode step, and of the one that was scheduled last.
        self._ticket: Ticket | None = None
        self._scheduled: Ticket | None = None
        self._accepted = 0
        self._sentences: list[str] = []
        # Requests whose drafts a grammar cuts.
        self._ruled: set[str] = set()

    def make_drafter(self) -> Any:
        """What drafts."""
        return HistoryDrafter(self.histospec)

    def make_planner(self, predictor: Predictor) -> Any:
        """What cuts the drafts by step times."""
        return DraftPlanner(predictor, len(SOURCE_NAMES))

    def install_profile(self, text: str) -> str:
        """Plan drafts by the step times of this profile (the text of its file); returns "" or why not."""
        try:
            profile = parse(text, "the profile")
        except ProfileError as error:
            return str(error)
        self._overhead = SpeculationOverhead(profile) if profile.unspeculated else None
        self.planner = self.make_planner(Predictor(StepModel(profile), self._sentences.append))
        self.drafter.plan_with(self.planner)
        return ""

    def take_decisions(self) -> dict[str, list[Any]]:
        """What was decided to draft since the last call, as `DecisionLog.take` gives it."""
        return self._decisions.take()

    def read_gain(self) -> dict[str, Any]:
        """What drafts gain, as the fields of a DraftGain event; empty before it is known."""
        found = self.gain.now()
        return dataclasses.asdict(found) if found is not None else {}

    def take_sentences(self) -> list[str]:
        """What a person should know about the planning since the last call."""
        taken, self._sentences[:] = list(self._sentences), []
        return taken

    def install_history(self, prompt_key: str, path: str) -> str:
        """Map the draft index at `path` for the requests of `prompt_key`; the file may be removed afterwards.

        Returns "" or, when the index is refused, one sentence that says why (the prompt then runs without drafts).
        """
        try:
            self.drafter.install(prompt_key, np.memmap(Path(path), dtype=np.uint8, mode="r"))
        except (IndexBufferError, OSError, ValueError) as error:
            return f"draft index of prompt {prompt_key} refused: {error}"
        return ""

    def take_traces(self, names: list[str]) -> list[dict[str, Any]]:
        """What was drafted of finished requests that asked for it by TRACE, as DraftTraces.take gives it."""
        return self.traces.take(names)

    def forget_history(self, prompt_key: str) -> None:
        """Drop the draft index of a prompt that has no request left."""
        self.drafter.forget(prompt_key)

    def add_request(self, request: Any) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            arguments = extra_arguments(request)
            most_tokens = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
            self.drafter.start(
                request.request_id, arguments.get(PROMPT_KEY), request.all_token_ids[:], request.num_prompt_tokens,
                most_tokens, arguments.get(WINDOW),
            )  # fmt: skip
            if request.structured_output_request is not None:
                self._ruled.add(request.request_id)
            self.traces.start(request.request_id, arguments.get(TRACE))

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Replace the worker's (empty) drafts by ours, for each request that is decoding."""
        if self.forced_drafts is not None:
            self._draft_dummies(draft_token_ids.req_ids, [DUMMY] * self.forced_drafts)
            return
        started = time.perf_counter()
        # Before the next step is planned, so that it is planned by what the last one took.
        if self.planner is not None and (step := self._clock.planned(started)) is not None:
            self.planner.took(*step)
        self._draft(draft_token_ids.req_ids)
        self.meter.add_draft_seconds(time.perf_counter() - started)

    def _draft_dummies(self, names: list[str], draft: list[int]) -> None:
        """While steps are measured nearly all drafts are rejected, so that samples grow by one token."""
        asked = (self.requests.get(name) for name in names)
        requests = [request for request in asked if request is not None and not request.is_finished()]
        self.set_drafts(requests, [[] if request.is_prefill_chunk else list(draft) for request in requests])

    def on_sampled(self, names: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Have the drafter know what was written.

        A request goes on with all that it sampled: what a stop cuts off ends it, and no connector of ours loads KV
        blocks that can fail, whose samples vLLM would drop.
        """
        started = time.perf_counter()
        if tokens:
            self.drafter.append(names, tokens)
        self.meter.add_draft_seconds(time.perf_counter() - started)

    def _draft(self, names: list[str]) -> None:
        requests, running = self.requests, RequestStatus.RUNNING
        decoding = [
            request
            for request_id in names
            if (request := requests.get(request_id)) is not None
            and request.status is running
            and not request.is_prefill_chunk
        ]
        self._ticket = self.gain.ask() if decoding else None
        self.set_drafts(decoding, self._drafts(decoding))
        for request_id in self._ruled:
            request = requests[request_id]
            if request.spec_token_ids:
                request.spec_token_ids = self._grammatical(request, request.spec_token_ids)

    def _grammatical(self, request: Any, draft: list[int]) -> list[int]:
        """Return as much of a draft as the request's grammar allows: vLLM cuts each draft that it is given."""
        super().update_draft_token_ids(DraftTokenIds([request.request_id], [draft]))
        allowed: list[int] = request.spec_token_ids
        return allowed

    def _drafts(self, decoding: list[Any]) -> list[list[int]]:
        if not decoding or (self._ticket is not None and not self._ticket.drafts):
            self.drafter.leave_out()
            return [[] for _ in decoding]
        context = sum([request.num_computed_tokens for request in decoding]) if self.planner is not None else 0
        return self.drafter.draft([request.request_id for request in decoding], context, self.most_drafts())

    def is_timed(self) -> bool:
        """Whether a planner, the figure of the gain, or whoever measures asks how long steps take."""
        return self.planner is not None or self.drafting.probe_share > 0 or super().is_timed()

    def on_scheduled(self, output: Any, before: DecodeStep | None) -> None:
        """Compare what the step before took with what was expected of it, and learn what drafts gain."""
        if before is not None:
            if self._decided is not None:
                self._decisions.add(self._decided, before.seconds, self._accepted)
            if self._scheduled is not None:
                tokens = before.running + self._accepted
                overhead = self._overhead.factor(before.running, before.context) if self._overhead else 1.0
                if said := self.gain.step(self._scheduled.number, before.running, tokens, before.seconds, overhead):
                    self._sentences.append(said)
        # Of what was scheduled now: vLLM may have left samples out, or added a prefill.
        decided = self.drafter.decision
        scheduled = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        fits = decided and (decided.running, decided.drafts) == (len(output.num_scheduled_tokens), scheduled)
        self._decided = decided if fits else None
        self._scheduled, self._ticket = self._ticket, None
        self._accepted = 0

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; what is cached is dropped when there are new weights, and then drafts fare differently too."""
        if self.planner is not None:
            self.planner.policy_updated()
        return super().reset_prefix_cache(*args, **kwargs)

    def on_verified(self, drafts: Verified) -> Attribution:
        self._accepted += sum(drafts.accepted)
        came = self.drafter.verified(drafts)
        if self.traces:
            for name, drafted, accepted, source in zip(*drafts, came.sources, strict=True):
                if name in self.traces:
                    position = self.requests[name].num_output_tokens
                    self.traces.add(name, drafted, accepted, position, self.source_names[source])
        return came

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.drafter.finish(request.request_id)
        self._ruled.discard(request.request_id)
        self.traces.finish(request.request_id)
        return super()._free_request(request, *args, **kwargs)
