"""Our plug-in of vLLM's scheduler: one class that overrides vLLM's methods once and tells its parts what happens.

An engine has a meter and timing always. It has drafting where it speculates, moves where its samples can move, and
pacing where it runs on another machine's clock. What a part is told: scheduler_parts/__init__.py. vLLM has a second
scheduler for asynchronous scheduling, so the class has a twin with that one as its base.

Invariants: scheduling decisions are vLLM's own; the order of parts is the order in which they hear of a step. Checked
against vLLM 0.29.0 and 0.32.0 `v1/core/sched/scheduler.py`, `v1/core/sched/async_scheduler.py`, `v1/engine/core.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rhyme_openrlhf.drafting.source import Int64s
from rhyme_openrlhf.engine.arguments import MOVES_KEY, PACE_KEY, SETTINGS_KEY
from rhyme_openrlhf.engine.calls import names
from rhyme_openrlhf.engine.patches import late_drafts, queues
from rhyme_openrlhf.engine.patches.core_channel import EngineCoreAccess  # adds the channel to this process's EngineCore
from rhyme_openrlhf.engine.patches.late_drafts import Sampled
from rhyme_openrlhf.engine.patches.second_runner import drafts_of
from rhyme_openrlhf.engine.requests import FIRST
from rhyme_openrlhf.engine.scheduler_parts import Part
from rhyme_openrlhf.engine.scheduler_parts.clock import Pacing, StepClock, Timing, content_of
from rhyme_openrlhf.engine.scheduler_parts.drafting import Drafting
from rhyme_openrlhf.engine.scheduler_parts.meter import Meter, StatusFigures, extra_arguments
from rhyme_openrlhf.engine.scheduler_parts.moves import Moves


class EngineScheduler(Scheduler):
    """vLLM's scheduler and the parts that this engine needs."""

    drafting_part: ClassVar[type[Drafting]] = Drafting
    moves_part: ClassVar[type[Moves]] = Moves

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.parts: list[Part] = []
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config
        self.core = EngineCoreAccess()
        """The engine core around this scheduler."""
        self.clock = StepClock()
        self.meter = Meter(self)
        self.timing = Timing(self.clock)
        self.pacing = Pacing(self.clock, settings[PACE_KEY]) if settings.get(PACE_KEY) else None
        self.drafting: Drafting | None = None
        self.moves: Moves | None = None
        # A paced step's time is part of what the meter counts.
        self.parts += [self.pacing] if self.pacing is not None else []
        self.parts += [self.meter, self.timing]
        if SETTINGS_KEY in settings:
            self.drafting = self.drafting_part(self, self.clock, self.meter, self.timing)
            self.parts.append(self.drafting)
        if settings.get(MOVES_KEY):
            figures = StatusFigures()
            self.moves = self.moves_part(self, self.core, self.meter, figures, self.drafting)
            self.parts += [figures, self.moves]
        self.calls: dict[str, Callable[..., Any]] = {
            name: getattr(part, name) for part in self.parts if part.calls is not None for name in names(part.calls)
        }
        """What the engine's owner may call (engine/patches/core_channel.py)."""

    # --- requests

    def add_request(self, request: Any) -> None:
        """Add a request, unless a part adds it by itself."""
        is_new = request.request_id not in self.requests
        if not (is_new and any(part.takes(request) for part in self.parts)):
            self.take_in(request)

    def take_in(self, request: Any) -> None:
        """Add a request to vLLM's own scheduler, and tell the parts of it."""
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            if extra_arguments(request).get(FIRST):
                queues.put_first(self, request)
            for part in self.parts:
                part.added(request)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        for part in self.parts:
            part.freed(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Any]:
        """End requests, and tell the parts of it."""
        ids = {request_ids} if isinstance(request_ids, str) else request_ids
        ids = ids if ids is None else list(ids)
        for part in self.parts:
            part.finishes(ids)
        return super().finish_requests(ids, finished_status)

    def has_requests(self) -> bool:
        """Return whether there is work; a part of an engine without any may look out for some."""
        return super().has_requests() or any(part.looks_out() for part in self.parts)

    # --- a decode step

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a decode step, between what the parts do before and after."""
        for part in self.parts:
            part.before_schedule()
        now = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        output.rhyme_started = now
        self.tell_scheduled(output)
        return output

    def tell_scheduled(self, output: Any) -> None:
        """Tell the parts of a step that is scheduled, with its drafts."""
        before = None
        if any([part.is_timed() for part in self.parts]):
            before = self.clock.scheduled(content_of(output, self.requests, output.rhyme_started))
        else:
            self.clock.skipped()
        for part in self.parts:
            part.scheduled(output, before)

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Make the step's grammar masks. vLLM asks for them when the step's forward pass has begun."""
        for part in self.parts:
            part.computing()
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what a step computed, and tell the parts of it."""
        sampling, tokens = model_runner_output.req_ids, model_runner_output.sampled_token_ids
        self.meter.begin_step(scheduler_output.num_scheduled_tokens, self.requests)
        # Before vLLM's own update, which forgets the requests that this step finishes.
        self.tell_verified(scheduler_output, sampling, tokens)
        results = super().update_from_output(scheduler_output, model_runner_output)
        for part in self.parts:
            part.finished_step(scheduler_output, results)
        self.tell_sampled(sampling, tokens)
        if not self.running:
            self.clock.interrupted()
        return results

    def tell_verified(self, scheduler_output: Any, sampling: list[str], tokens: Sequence[Sequence[int]]) -> None:
        """Tell the parts of the drafts that a step verified; `tokens`: what it sampled for each request."""
        if drafts := scheduler_output.scheduled_spec_decode_tokens:
            self.tell_outcomes(drafts, sampling, np.fromiter(map(len, tokens), np.int64, len(tokens)))

    def tell_outcomes(
        self, drafts: dict[str, list[int]], sampling: list[str], counts: Int64s, lengths: Int64s | None = None
    ) -> None:
        """Tell the parts what became of drafts; `counts`: tokens that their step sampled for each request.

        `lengths`: of the drafts, if none of them is padded.
        """
        verified = self.meter.verified_drafts(drafts, sampling, counts, self.requests, lengths)
        if verified.requests:
            for part in self.parts:
                part.verified(verified)

    def tell_sampled(self, sampling: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Tell the parts of the tokens that a step sampled."""
        for part in self.parts:
            part.sampled(sampling, tokens)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Give requests the drafts for the next step: what this engine's source drafts, if it has one."""
        if self.drafting is None:
            super().update_draft_token_ids(draft_token_ids)
        else:
            self.drafting.draft(draft_token_ids)

    # --- weights

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache, because there are new weights."""
        for part in self.parts:
            part.resets(reset_running_requests)
        return super().reset_prefix_cache(reset_running_requests, reset_connector)


class AsyncEngineScheduler(EngineScheduler, AsyncScheduler):
    """The same on vLLM's asynchronous scheduler."""


class LateEngineScheduler(AsyncEngineScheduler):
    """The same with drafts that are made when the tokens of the step before are known (patches/late_drafts.py).

    `schedule` keeps room for them. Parts hear of a step in the order that synchronous scheduling has. In `fill`, for
    which a GPU waits: what the step before verified and sampled, and the drafts. When the forward pass has begun: the
    step with its drafts.

    While drafts are left out, `fill` waits for nothing, so steps follow each other as without speculation. Parts then
    hear of what a step sampled when vLLM takes it in.

    Raises ValueError for vLLM's executors that cannot fill a step, and for pipelines.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.drafting is not None
        self._drafting = self.drafting
        parallel = self.parallel_config
        if not late_drafts.fills(self.vllm_config):
            raise ValueError(
                f"--drafting.runner v2-async goes with vLLM's executors {', '.join(late_drafts.EXECUTORS)} "
                "(VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1), and this engine has another one "
                f"('{parallel.distributed_executor_backend}'): take --drafting.runner v1"
            )
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                "--drafting.runner v2-async needs the tokens of each step before the next one begins, and stages of a "
                "pipeline begin earlier: take an engine of one stage"
            )
        # Steps whose tokens the parts have not heard of, as they were scheduled and as they were filled: two at most.
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._heard_of: Any = None
        # Whether the parts are still to hear of the last of them.
        self._untold = False
        late_drafts.offer(self.vllm_config, self)

    def tell_scheduled(self, output: Any) -> None:
        """Tell nothing: the step's drafts are still to come."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a decode step, when the parts have heard of the one before."""
        self._tell_filled()
        self._heard_of = None
        return super().schedule(*args, **kwargs)

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Make the step's grammar masks; its forward pass has begun."""
        self._tell_filled()
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what a step computed, when the parts have heard of the one that runs."""
        self._tell_filled()
        # Of steps that another one followed they heard in `fill`.
        if self._under_way and self._under_way[0][0] is scheduler_output:
            self._heard(late_drafts.sampled_of(model_runner_output))
        return super().update_from_output(scheduler_output, model_runner_output)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Any]:
        """End requests, when the parts have heard of the step that has them."""
        self._tell_filled()
        return super().finish_requests(request_ids, finished_status)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        requests = [self.requests[name] for name in scheduler_output.num_scheduled_tokens]
        self._drafting.keep_room([request for request in requests if request.spec_token_ids])

    def fill(self, output: Any, sampled: Callable[[], Sampled]) -> Any:
        """Return the scheduled step with its drafts, when the step before has `sampled`."""
        self._tell_filled()
        room = late_drafts.room_of(output)
        verifies = any(step.scheduled_spec_decode_tokens for _, step in self._under_way)
        if room.requests or verifies or self._drafting.drops:
            # What needs no tokens is done before they are there.
            ahead = self._drafting.look_ahead(room)
            tokens = sampled()
            if self._under_way:
                self._heard(tokens)
            step = late_drafts.filled(output, room, self._drafting.draft_late(output, room, ahead))
        else:
            self._drafting.leave_out_late(output)
            step = output
        self._under_way.append((output, step))
        self._untold = True
        return step

    def _tell_filled(self) -> None:
        if self._untold:
            self._untold = False
            super().tell_scheduled(self._under_way[-1][1])

    def _heard(self, sampled: Sampled) -> None:
        _, step = self._under_way.popleft()
        drafts, lengths = step.scheduled_spec_decode_tokens, drafts_of(step).lengths
        self.tell_outcomes(drafts, sampled.requests, sampled.counts, lengths)
        self._drafting.sampled_late(sampled)
        # Freeing its hundreds of small objects can wait until the next forward pass.
        self._heard_of = step

    def tell_verified(self, scheduler_output: Any, sampling: list[str], tokens: Sequence[Sequence[int]]) -> None:
        """Tell nothing, as `tell_sampled`."""

    def tell_sampled(self, sampling: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Tell of the tokens those parts that did not hear of them with the drafts."""
        for part in self.parts:
            if part is not self._drafting:
                part.sampled(sampling, tokens)


def scheduler_class(vllm_config: Any) -> type[EngineScheduler]:
    """Return the class of an engine's scheduler, asynchronous if vLLM chose so."""
    if not vllm_config.scheduler_config.async_scheduling:
        return EngineScheduler
    return LateEngineScheduler if SETTINGS_KEY in vllm_config.additional_config else AsyncEngineScheduler


def engine_scheduler(vllm_config: Any, **kwargs: Any) -> EngineScheduler:
    """Return an engine's scheduler (`scheduler_cls` names it)."""
    return scheduler_class(vllm_config)(vllm_config=vllm_config, **kwargs)
