"""The part of the scheduler that drafts: it asks the source for drafts between two steps, and keeps them within a step.

With a profile (`install_profile`) a planner decides how much of the drafts the next step verifies. It knows step times
from the profile and from this engine's own steps. Without a profile the source's fixed rules decide. Now and then
drafts are left out for a few steps to measure what they gain; where they gain nothing they stay out (drafting/gain.py).

A row is one token whose logits a step computes: one for each running sample, and one for each draft token. Logits,
probabilities and log-probabilities are all [rows, vocabulary], so rows decide what the sampler needs beside the KV
cache. On a GPU the worker reserves that memory for `most_rows` rows before vLLM sizes the KV cache
(engine/patches/rejection_sampling.py). Without a GPU nothing is reserved, and only vLLM's own limit of tokens a step
holds.

Invariants:
- A draft only ever proposes; vLLM's rejection sampler decides.
- Every draft of every source reaches a request through `_set_drafts`, so no step verifies more than there are rows for.
- A draft is only ever cut at its end.
- Every token is known when drafts are made: scheduling is synchronous, or drafts come after it (`draft_late`).

Checked against vLLM 0.29.0 and 0.32.0 `v1/core/sched/scheduler.py` (num_spec_tokens_to_schedule,
update_draft_token_ids) and `v1/spec_decode/llm_base_proposer.py` (K = 0).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from rhyme_openrlhf.drafting.budget import share
from rhyme_openrlhf.drafting.combined import HistoryAndModel
from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.drafting.gain import GainMeter, Ticket
from rhyme_openrlhf.drafting.planner import Cut, Decision, DecisionLog
from rhyme_openrlhf.drafting.source import DraftSource, Verified, WorkerProposals
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.engine.arguments import DRAFTING_KEY, SETTINGS_KEY
from rhyme_openrlhf.engine.calls import SchedulerDrafting
from rhyme_openrlhf.engine.patches.late_drafts import Room, Sampled
from rhyme_openrlhf.engine.requests import PROMPT_KEY, TRACE, WINDOW
from rhyme_openrlhf.engine.rows import most_rows
from rhyme_openrlhf.engine.scheduler_parts import DecodeStep, Part
from rhyme_openrlhf.engine.scheduler_parts.clock import StepClock, Timing
from rhyme_openrlhf.engine.scheduler_parts.meter import DraftTraces, Meter, extra_arguments
from rhyme_openrlhf.history.index import IndexBufferError
from rhyme_openrlhf.latency.predictor import Predictor, SpeculationOverhead
from rhyme_openrlhf.latency.profile import ProfileError, parse
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.settings.drafting import BOTH, HISTORY, VLLM_METHODS, DraftingSettings, HistoSpecSettings

# By `--drafting.source`: what makes an engine's source of the settings.
SOURCES: dict[str, Callable[[HistoSpecSettings, DraftingSettings], DraftSource]] = {
    HISTORY: lambda histospec, _: HistoryDrafter(histospec),
    **dict.fromkeys(VLLM_METHODS, lambda _, drafting: WorkerProposals(drafting.source, drafting.tokens)),
    **dict.fromkeys(
        BOTH,
        lambda histospec, drafting: HistoryAndModel(
            histospec, drafting.method, drafting.tokens, timed=drafting.probe_share > 0
        ),
    ),
}
# Steps that room is kept for ahead of their tickets: the one that is filled next, the one after it, and one to spare.
ROOM_AHEAD = 3
# A draft token of a measured step: any token of any vocabulary.
DUMMY = 1
NO_TOKENS = np.empty(0, np.int32)
D = TypeVar("D")


class Ahead(NamedTuple):
    """Requests of a scheduled step with room for drafts: which of them still run, their names, and all their tokens."""

    running: NDArray[np.bool_]
    names: list[str]
    context: int


class Drafting(Part):
    """The drafts of one engine (RhymeRL, sections 5.2 to 5.4; RLHFSpec, 5.2 and 5.3)."""

    calls = SchedulerDrafting

    def __init__(self, scheduler: Any, clock: StepClock, meter: Meter, timing: Timing) -> None:
        self._scheduler, self._clock, self._meter, self._timing = scheduler, clock, meter, timing
        config = scheduler.vllm_config
        self.histospec = HistoSpecSettings(**config.additional_config[SETTINGS_KEY])
        self.settings = DraftingSettings(**config.additional_config[DRAFTING_KEY])
        self._most_rows = most_rows(config)
        # For FULL CUDA graphs vLLM pads a request that joins a decode batch with one token to the longest draft. An
        # arrival would add rows that no source proposed. vLLM does not pad where draft lengths are looked up.
        # The length that is looked up is what the worker proposes, which may be less than history's longest draft.
        most = scheduler.num_spec_tokens
        if self.settings.method:
            most = min(most, self.settings.tokens)
        scheduler.dynamic_sd_lookup = [most] * (scheduler.max_num_running_reqs + 1)
        self._overhead: SpeculationOverhead | None = None
        self._traces = DraftTraces()
        self._decisions = DecisionLog()
        self._sentences: list[str] = []
        # Requests whose drafts a grammar cuts.
        self._ruled: set[str] = set()
        # Steps are scheduled ahead; and requests whose tokens under way vLLM drops.
        self._late = bool(config.scheduler_config.async_scheduling)
        self._dropped: set[str] = set()
        self.use(SOURCES[self.settings.source](self.histospec, self.settings))

    def use(self, source: DraftSource) -> None:
        """Draft from this source, while no request runs."""
        self.source = source
        # The first step behind an interval without drafts has none if nothing was proposed in the step before it.
        self.gain = GainMeter(self.settings.probe_share, int(source.from_worker))
        self._decided: Decision | None = None
        # Of the next decode step, and of the one that was scheduled last.
        self._ticket: Ticket | None = None
        self._scheduled: Ticket | None = None
        self._accepted = 0
        # Whether the worker proposes behind the step that was scheduled last.
        self._passes = False

    # --- what the engine's actor calls

    def row_limit(self) -> int | None:
        """Return the rows that memory is reserved for; None where none is."""
        return self._most_rows

    def install_profile(self, text: str) -> str:
        """Plan drafts by the step times of this profile (the text of its file); returns "" or why not."""
        try:
            profile = parse(text, "the profile")
        except ProfileError as error:
            return str(error)
        self._overhead = SpeculationOverhead(profile) if profile.unspeculated else None
        self.source.plan_by(Predictor(StepModel(profile), self._sentences.append))
        return ""

    def install_history(self, prompt_key: str, path: str) -> str:
        """Map the draft index at `path` for the requests of `prompt_key`; the file may be removed afterwards.

        Returns "" or, when the index is refused, one sentence that says why (the prompt then runs without drafts).
        """
        try:
            self.source.install(prompt_key, np.memmap(Path(path), dtype=np.uint8, mode="r"))
        except (IndexBufferError, OSError, ValueError) as error:
            return f"draft index of prompt {prompt_key} refused: {error}"
        return ""

    def forget_history(self, prompt_key: str) -> None:
        """Drop the draft index of a prompt that has no request left."""
        self.source.forget(prompt_key)

    def take_traces(self, names: list[str]) -> list[dict[str, Any]]:
        """Return what was drafted of finished requests that asked for it by TRACE, as DraftTraces.take gives it."""
        return self._traces.take(names)

    def take_decisions(self) -> dict[str, list[Any]]:
        """Return what was decided to draft since the last call, as `DecisionLog.take` gives it."""
        return self._decisions.take()

    def take_sentences(self) -> list[str]:
        """Return what a person should know about the planning since the last call."""
        taken, self._sentences[:] = list(self._sentences), []
        return taken

    def read_gain(self) -> dict[str, Any]:
        """Return what drafts gain, as the fields of a DraftGain event; empty before it is known."""
        found = self.gain.now()
        return dataclasses.asdict(found) if found is not None else {}

    def switch_drafts(self, on: bool) -> None:
        """Draft, from nothing known so far, while no request runs; or leave drafts out until the next such call."""
        if on:
            self.use(SOURCES[self.settings.source](self.histospec, self.settings))
        else:
            self.gain.stop()

    # --- a decode step, from its drafts to what became of them

    def draft(self, proposed: DraftTokenIds) -> None:
        """Give each request that decodes its draft for the next step; `proposed`: what vLLM's worker proposes."""
        names = proposed.req_ids
        if self._timing.forced_drafts is not None:
            self._draft_dummies(names, [DUMMY] * self._timing.forced_drafts)
            return
        started = time.perf_counter()
        requests, running = self._scheduler.requests, RequestStatus.RUNNING
        self.source.proposed(names, proposed.draft_token_ids)
        decoding = [
            request
            for request_id in names
            if (request := requests.get(request_id)) is not None
            and request.status is running
            and not request.is_prefill_chunk
        ]
        decoding_names = [request.request_id for request in decoding]
        self._plan(bool(decoding), started)
        drafts = self._asked(self.source.draft, decoding_names, self._context_of(decoding_names))
        self._set_drafts(decoding, drafts or [[] for _ in decoding])
        for request_id in self._ruled:
            self._cut_by_grammar(requests[request_id])
        self._meter.add_draft_seconds(time.perf_counter() - started)

    def _plan(self, decodes: bool, started: float) -> None:
        """Learn from the step before, and decide whether the next one, which `decodes` or not, has drafts."""
        # Before the next step is planned, so that it is planned by what the last one took.
        if self.source.planner is not None and (step := self._clock.planned(started)) is not None:
            self.source.planner.took(*step)
        self._ticket = self.gain.ask() if decodes else None

    # --- where steps are scheduled before their drafts are known (LateEngineScheduler)

    def keep_room(self, requests: Sequence[Any]) -> None:
        """Keep room for drafts with these requests, alike for all; none where a grammar would have to see them.

        There is none either while drafts are left out. Room takes no KV block that another sample may need: where free
        blocks are few, a sample's room ends with the blocks that it has.
        """
        forced = self._timing.forced_drafts
        if forced is None and not self.gain.drafts_soon(ROOM_AHEAD):
            for request in requests:
                request.spec_token_ids = []
            return
        each = max(self._decode_tokens() // max(len(self._scheduler.running), 1) - 1, 0)
        if forced is not None:
            each = min(each, forced)
        for request in requests:
            request.spec_token_ids = [] if request.request_id in self._ruled else request.spec_token_ids[:each]
        cache, block = self._scheduler.kv_cache_manager, self._scheduler.block_size
        if cache.block_pool.get_num_free_blocks() < len(requests) * (2 + each // block):
            for request in requests:
                # One more token is the step's own.
                has = block * min(map(len, cache.get_block_ids(request.request_id)))
                del request.spec_token_ids[max(has - request.num_computed_tokens - 1, 0) :]

    def look_ahead(self, room: Room) -> Ahead:
        """Prepare a scheduled step's drafts as far as that needs no tokens, while the step before it runs."""
        requests = self._scheduler.requests
        running = np.fromiter(map(requests.__contains__, room.requests), np.bool_, len(room.requests))
        names = room.requests if running.all() else list(itertools.compress(room.requests, running))
        context = self._context_of(names)
        if names and self._timing.forced_drafts is None:
            self.source.prepare(names, context, self._most_drafts())
        return Ahead(running, names, context)

    def _context_of(self, names: Iterable[str]) -> int:
        """Return the tokens of these requests; 0 where no planner asks."""
        if self.source.planner is None:
            return 0
        requests = self._scheduler.requests
        return sum([requests[name].num_computed_tokens for name in names])

    def draft_late(self, output: Any, room: Room, ahead: Ahead) -> Cut:
        """Return a draft for each room that a scheduled step has, within that room; `ahead`: by `look_ahead`."""
        started = time.perf_counter()
        running, names, context = ahead
        if self._dropped:
            self._start_anew(output.num_scheduled_tokens)
        if (each := self._timing.forced_drafts) is not None:
            drafts = Cut(np.full(len(names), each), np.full(len(names) * each, DUMMY, np.int32))
        else:
            self._plan(bool(names) or self._decodes(output), started)
            asked = self._asked(self.source.draft_flat, names, context)
            drafts = asked or Cut(np.zeros(len(names), np.int64), NO_TOKENS)
        drafts = drafts.within(self._most_drafts())
        if len(names) < len(running):
            lengths = np.zeros(len(running), np.int64)
            lengths[running] = drafts.lengths
            drafts = Cut(lengths, drafts.flat)
        drafts = drafts.to(np.minimum(drafts.lengths, room.lengths))
        self._meter.add_draft_seconds(time.perf_counter() - started)
        return drafts

    def leave_out_late(self, output: Any) -> None:
        """Plan a scheduled step that has no room for drafts."""
        started = time.perf_counter()
        if self._timing.forced_drafts is None:
            self._plan(self._decodes(output), started)
            self.source.leave_out()
        self._meter.add_draft_seconds(time.perf_counter() - started)

    @staticmethod
    def _decodes(output: Any) -> bool:
        # A sample that decodes without room has one token.
        return 1 in output.num_scheduled_tokens.values()

    @property
    def drops(self) -> bool:
        """Return whether tokens under way are dropped, because there are new weights."""
        return bool(self._dropped)

    def _start_anew(self, scheduled: Iterable[str]) -> None:
        """Begin those texts again whose requests go on behind new weights: vLLM drops what was under way for them."""
        for name in self._dropped.intersection(scheduled):
            if (request := self._scheduler.requests.get(name)) is not None:
                self.source.finish(name)
                self._start(request)
            self._dropped.discard(name)

    def _asked(self, draft: Callable[[list[str], int, int], D], decoding: list[str], context: int) -> D | None:
        """Return what the source's method drafts for these requests; None in a step without drafts."""
        if self._ticket is None or not self._ticket.drafts:
            self.source.leave_out()
            return None
        return draft(decoding, context, self._most_drafts())

    def _draft_dummies(self, names: Iterable[str], draft: list[int]) -> None:
        """Give each decoding sample dummies: nearly all are rejected, so that samples grow by one token."""
        asked = (self._scheduler.requests.get(name) for name in names)
        requests = [request for request in asked if request is not None and not request.is_finished()]
        self._set_drafts(requests, [[] if request.is_prefill_chunk else list(draft) for request in requests])

    def _most_drafts(self) -> int:
        """Return the draft tokens that fit into the next step beside its running samples."""
        # Past its tokens a step vLLM leaves running requests out of the step. A step that is scheduled already has its
        # prompts.
        tokens: int = self._scheduler.max_num_scheduled_tokens if self._late else self._decode_tokens()
        if self._most_rows is not None:
            tokens = min(tokens, self._most_rows)
        return max(tokens - len(self._scheduler.running), 0)

    def _decode_tokens(self) -> int:
        """Return the tokens of a step that samples and their drafts may take: half where a prompt needs the others.

        vLLM schedules running requests first, in the order in which they came.
        """
        scheduler = self._scheduler
        seat = len(scheduler.running) < scheduler.max_num_running_reqs
        prompts = (seat and scheduler.waiting) or any(request.is_prefill_chunk for request in scheduler.running)
        return int(scheduler.max_num_scheduled_tokens // (2 if prompts else 1))

    def _fitting(self, drafts: Sequence[list[int]]) -> Sequence[list[int]]:
        """Return the drafts of a step, cut so that all of them fit."""
        most = self._most_drafts()
        if sum(map(len, drafts)) <= most:
            return drafts
        lengths = share([len(draft) for draft in drafts], most)
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def _set_drafts(self, requests: Iterable[Any], drafts: Sequence[list[int]]) -> None:
        """Give each request its draft for the next step."""
        for request, draft in zip(requests, self._fitting(drafts), strict=True):
            request.spec_token_ids = draft

    def _cut_by_grammar(self, request: Any) -> None:
        """Leave of a draft what the request's grammar allows: vLLM cuts each draft that it is given."""
        if draft := request.spec_token_ids:
            Scheduler.update_draft_token_ids(self._scheduler, DraftTokenIds([request.request_id], [draft]))

    def is_timed(self) -> bool:
        return self.source.planner is not None or self.settings.probe_share > 0

    def scheduled(self, output: Any, before: DecodeStep | None) -> None:
        """Compare what the step before took with what was expected of it, and learn what drafts gain."""
        if before is not None:
            self.source.took(self._passes, before.running, before.seconds)
            if self._decided is not None:
                self._decisions.add(self._decided, before.seconds, self._accepted)
            if self._scheduled is not None:
                tokens = before.running + self._accepted
                overhead = self._overhead.factor(before.running, before.context) if self._overhead else 1.0
                if said := self.gain.step(self._scheduled.number, before.running, tokens, before.seconds, overhead):
                    self._sentences.append(said)
                if self._scheduled.drafts and (planner := self.source.planner) is not None:
                    # Without drafts, each of these samples would have needed a step for each of its tokens.
                    plain = planner.predictor.step_seconds(before.running, before.context, 0) / overhead
                    self.gain.expect(before.seconds, tokens / before.running * plain)
        # Of what was scheduled now: vLLM may have left samples out, or added a prefill.
        decided = self.source.decision
        drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        fits = decided and (decided.running, decided.drafts) == (len(output.num_scheduled_tokens), drafts)
        self._decided = decided if fits else None
        self._scheduled, self._ticket = self._ticket, None
        self._accepted = 0
        proposes = self._scheduled is None or (self._scheduled.drafts and self.source.wants_proposals)
        if self.source.from_worker and not proposes:
            # The worker proposes nothing, but a draft model keeps its KV cache up to date.
            output.num_spec_tokens_to_schedule = 0
        self._passes = proposes

    def computing(self) -> None:
        self.source.computing()

    def verified(self, drafts: Verified) -> None:
        self._accepted += int(drafts.accepted.sum())
        came = self.source.verified(drafts)
        self._meter.count_drafts(drafts, came, self.source.names)
        if self._traces:
            for place, name in enumerate(drafts.requests):
                if name in self._traces:
                    position = self._scheduler.requests[name].num_output_tokens
                    drafted, accepted = int(drafts.drafted[place]), int(drafts.accepted[place])
                    self._traces.add(name, drafted, accepted, position, self.source.names[came.sources[place]])

    def sampled(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Give the sampled tokens to the source.

        A request goes on with all that it sampled. A stop that cuts tokens off ends the request. vLLM would drop
        samples whose KV blocks failed to load, but no connector of ours loads blocks that can fail.
        """
        started = time.perf_counter()
        if tokens:
            if self._dropped:
                kept = [(name, new) for name, new in zip(requests, tokens, strict=True) if name not in self._dropped]
                requests, tokens = [name for name, _ in kept], [new for _, new in kept]
            self.source.append(requests, tokens)
        self._meter.add_draft_seconds(time.perf_counter() - started)

    def sampled_late(self, sampled: Sampled) -> None:
        """Give the tokens of a step to the source, before vLLM's scheduler has taken them in."""
        if self._dropped:
            self.sampled(sampled.requests, core.split(sampled.tokens, sampled.counts))
            return
        started = time.perf_counter()
        self.source.append_flat(*sampled)
        self._meter.add_draft_seconds(time.perf_counter() - started)

    # --- requests and weights

    def added(self, request: Any) -> None:
        self._start(request)
        if request.structured_output_request is not None:
            self._ruled.add(request.request_id)
        self._traces.start(request.request_id, extra_arguments(request).get(TRACE))

    def _start(self, request: Any) -> None:
        arguments = extra_arguments(request)
        most_tokens = min(self._scheduler.max_model_len, request.num_prompt_tokens + request.max_tokens)
        self.source.start(
            request.request_id, arguments.get(PROMPT_KEY), request.all_token_ids[:], request.num_prompt_tokens,
            most_tokens, arguments.get(WINDOW),
        )  # fmt: skip

    def freed(self, request_id: str) -> None:
        self.source.finish(request_id)
        self._ruled.discard(request_id)
        self._dropped.discard(request_id)
        self._traces.finish(request_id)

    def resets(self, running: bool) -> None:
        """Doubt what was accepted so far, because there are new weights."""
        self.source.policy_updated()
        if running and self._late:
            # Those that were stopped for a move are in no queue.
            requests = self._scheduler.requests.items()
            self._dropped.update(name for name, one in requests if one.status == RequestStatus.RUNNING)
