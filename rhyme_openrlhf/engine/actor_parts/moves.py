"""Our rollout engine with samples that can move: it is told of each sample, and told of others what became of them.

The caller's await is not here but with the sample's keeper (moves/keeper.py), which asks `collect` for news: so nothing
but the KV cache and the latest tokens dies with an engine. A sample has another name for every stay at an engine, its
place; all calls name places, and every order may be given twice.

Invariants: blocks of a reservation are written only while nothing can take them away (within one call of the scheduler,
which voids them all at a weight load; of one sample, releasing and moving in exclude each other, and of all of them
weight loads do); a sample that is stopped is told of with every token its engine has made.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.engine.actor import EngineCoreError, RhymeRolloutActor, speculation_arguments
from rhyme_openrlhf.settings.config import RhymeSettings

from openrlhf.utils.vlm_utils import dedup_media_tokens  # isort: skip
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine.actor_parts.arrivals import ExpectingEngine
from rhyme_openrlhf.engine.actor_parts.node_buffers import NodeBuffers
from rhyme_openrlhf.engine.actor_parts.orders_lock import OrdersLock
from rhyme_openrlhf.engine.messages import (
    ARRIVED,
    Arrival,
    Exported,
    Grown,
    News,
    Progress,
    Rest,
    SampleRequest,
    Started,
    Stopped,
)
from rhyme_openrlhf.engine.patches.resumed_outputs import ResumedOutputs, generated
from rhyme_openrlhf.engine.request_keys import MOVES_KEY, PROMPT_KEY, WINDOW
from rhyme_openrlhf.kv.buffer import KvBuffer, KvLayout
from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus, SampleStatus
from rhyme_openrlhf.weights.buckets import Segment

# vLLM's word for a request that was ended from outside.
ABORTED = "abort"
# The engine core and vLLM's frontend differ by the steps whose output is on its way between them.
CATCH_UP_SECONDS = 10.0
CATCH_UP_POLL_SECONDS = 0.001


@dataclass
class _Here:
    """A sample that is here: its request, how many of its tokens its keeper knows, and the task that generates it."""

    request: SampleRequest
    told: int
    task: asyncio.Task[Any] | None = None


class MovableEngine(ExpectingEngine, NodeBuffers, RhymeRolloutActor):
    """One vLLM engine whose samples can move."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self._here: dict[str, _Here] = {}
        self._finished: dict[str, Any] = {}
        self._news = asyncio.Event()
        self._dead = False
        self._orders = OrdersLock()
        self._expected: dict[str, str] = {}
        await super().__init__(*args, **kwargs)
        self._outputs = ResumedOutputs(self.llm)

    @staticmethod
    def plugins(rhyme: RhymeSettings) -> dict[str, Any]:
        """The run's, with schedulers that know moves; they must know every token when they stop a sample.

        Sets, for the processes vLLM is about to start, that they use model runner V1: moves read its requests' states
        (engine/kv_copies.py), and V2, which vLLM 0.29.0 takes on a GPU without speculation, has others.
        """
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        plugins = speculation_arguments(rhyme)
        return plugins | {
            "additional_config": plugins["additional_config"] | {MOVES_KEY: True},
            "async_scheduling": False,
        }

    # --- what every sample needs

    async def start_sample(
        self,
        place: str,
        request: SampleRequest,
        progress: Progress | None = None,
        room: str = "",
        computed: int = 0,
        rest: Rest | None = None,
    ) -> Started:
        """Begin a sample, or go on with one that has come to `progress`.

        `room`: the reservation it takes up, in which the KV cache of the first `computed` tokens lies once `rest` is
        copied in.
        """
        if (gone_on := await self.go_on(place, progress)) is not None:
            if progress is not None and place in self._here:
                self._here[place].told = len(progress.tokens)
            return gone_on
        if place in self._here or place in self._finished:
            return Started()
        if refused := self._refuses(progress):
            return Started(refused)
        here = self._here[place] = _Here(request, len(progress.tokens) if progress else 0)
        async with self._orders.of(place):
            # A load may have come meanwhile.
            if refused := self._refuses(progress):
                del self._here[place]
                return Started(refused)
            # Not waited for: the scheduler meets both between the same two steps, the rest first.
            importing = None if rest is None else asyncio.create_task(self._import(room, rest))
            arrival = None if progress is None else Arrival(progress.tokens, room, computed, progress.generator)
            here.task = self._begin_sample(place, request, progress, arrival)
            while room and not here.task.done() and self._outputs.state(place) is None:
                await asyncio.sleep(CATCH_UP_POLL_SECONDS)
        # Outside of the lock: others that come are not to wait for the end of this step, one after the other.
        return Started(not_carried="" if importing is None else await importing)

    def _begin_sample(
        self, place: str, request: SampleRequest, progress: Progress | None, arrival: Arrival | None
    ) -> asyncio.Task[Any]:
        task = asyncio.create_task(self._generate(place, request, progress, arrival))
        task.add_done_callback(functools.partial(self._over, place))
        return task

    async def expect_sample(
        self, place: str, request: SampleRequest, buffer: KvBuffer, first: int, weight_version: int, convoy: str = ""
    ) -> str:
        """Begin this sample when it is handed over in `buffer`, whose rows from `first` on are then copied into the
        reservation of its name; "" or why not. Those of a `convoy` begin together.
        """
        if place in self._here:
            return ""
        here = self._here[place] = _Here(request, 0)
        async with self._orders.of(place):
            progress = Progress(weight_version=weight_version)
            if refused := self._refuses(progress):
                del self._here[place]
                return refused
            arrival = Arrival((), place, buffer=buffer.to_plain(), first=first, convoy=convoy)
            self._outputs.hold(place)
            here.task = self._begin_sample(place, request, progress, arrival)
            return await self.expect(place)

    def _refuses(self, progress: Progress | None) -> str:
        """Why a sample that has come to `progress` cannot go on here now, or ""."""
        if progress is None:
            # It waits for weights here, and begins with them.
            return ""
        if not self._may_start.is_set():
            return f"engine {self.index} loads weights"
        if progress.weight_version not in (None, self.weight_version):
            return f"engine {self.index} has weight version {self.weight_version}, not {progress.weight_version}"
        return ""

    async def _import(self, room: str, rest: Rest) -> str:
        answer: str = await self.call_scheduler("import_rows", room, rest.buffer.to_plain(), rest.first, rest.end)
        return answer

    def _over(self, place: str, task: asyncio.Task[Any]) -> None:
        """A sample's task is done: its keeper is to know the output, or what ended it."""
        del self._here[place]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineDeadError):
            # Its keeper learns that from `collect`, for all samples at once.
            self._dead = True
        elif error is not None:
            self._finished[place] = error
        elif not task.cancelled() and task.result().outputs[0].finish_reason != ABORTED:
            self._finished[place] = task.result()
        self._news.set()

    async def _generate(
        self, place: str, request: SampleRequest, progress: Progress | None, arrival: Arrival | None
    ) -> Any:
        if request.history is None:
            return await self._output(place, request, progress, arrival)
        self._in_flight.begin(request.history)
        try:
            return await self._output(place, request, progress, arrival)
        finally:
            await self._in_flight.end(request.history)

    async def _output(
        self, place: str, request: SampleRequest, progress: Progress | None, arrival: Arrival | None
    ) -> Any:
        if progress is None:
            await self._may_start.wait()
        tokens = list(request.prompt)
        if request.multi_modal and self._mm_pad_token_ids:
            tokens = dedup_media_tokens(tokens, self._mm_pad_token_ids)
        prompt = TokensPrompt(prompt_token_ids=tokens, cache_salt=f"weights-{self.weight_version}")
        if request.multi_modal:
            prompt["multi_modal_data"] = request.multi_modal
        parameters = request.parameters.clone()
        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        extra = dict(parameters.extra_args or {})
        if request.history is not None:
            extra[PROMPT_KEY], fetch = self._in_flight.round(request.history, request.round)
            await self._wait_for_history(fetch)
        if progress is not None and arrival is not None:
            extra[ARRIVED] = arrival.to_plain()
            extra[WINDOW] = progress.window
            if arrival.buffer is None:
                self._outputs.expect(place, progress)
        parameters.extra_args = extra
        self._started(place)
        try:
            outputs = [output async for output in self.llm.generate(prompt, parameters, request_id=place)]
        finally:
            self._ended(place)
        return outputs[-1]

    async def collect(self, wait_s: float) -> News:
        """What became of samples since the last call; waits up to `wait_s` seconds for one to finish.

        What is told is told once: there is one keeper. Raises EngineCoreError when vLLM's process is gone.
        """
        self._news.clear()
        if not self._finished and not self._dead:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
        await self.alive()
        if self._dead:
            raise EngineCoreError(self._core_died())
        finished, self._finished = self._finished, {}
        grown = {}
        for place, here in self._here.items():
            state = self._outputs.state(place)
            if state is not None:
                tokens, log_probs = generated(state, here.told)
                grown[place] = Grown(here.told, tokens, log_probs)
                here.told += len(tokens)
        return News(finished, grown, self.weight_version, self._may_start.is_set())

    async def discard_sample(self, place: str) -> None:
        """End a sample here, if it is; nothing more is told of it."""
        here = self._here.get(place)
        if here is not None:
            await self._when_known(place)
            await self.llm.abort(place)
            if here.task is not None:
                await asyncio.wait([here.task], timeout=CATCH_UP_SECONDS)
        self._expected.pop(place, None)
        self._finished.pop(place, None)

    # --- source

    async def stop_sample(
        self, place: str, buffer: KvBuffer | None = None, first: int = 0, hand_over: bool = False
    ) -> Stopped | None:
        """Generate no more for a sample, and keep it; None if it is not here, or has finished.

        With a `buffer` its blocks from number `first` on are copied there, and with `hand_over` the engine that expects
        the sample goes on with it. Raises TimeoutError if vLLM's frontend does
        not get to know its last tokens.
        """
        plain = None if buffer is None else buffer.to_plain()
        state = await self._when_known(place)
        if state is None:
            return None
        limit = asyncio.get_running_loop().time() + CATCH_UP_SECONDS
        answer = await self.call_scheduler("stop_sample", state.request_id, plain, first, hand_over)
        while answer is None or state.detokenizer.num_output_tokens() < answer["output"]:
            if self._outputs.state(place) is not state:
                # It finished; or the frontend met a stop string in tokens that were on their way.
                return None
            if asyncio.get_running_loop().time() > limit:
                raise TimeoutError(f"waited {CATCH_UP_SECONDS:g} s for the last tokens of sample {place}")
            await asyncio.sleep(CATCH_UP_POLL_SECONDS)
            if answer is None:
                answer = await self.call_scheduler("stop_sample", state.request_id, plain, first, hand_over)
        tokens, log_probs = generated(state)
        progress = Progress(tokens, log_probs, answer["generator"], answer["window"], self.weight_version)
        return Stopped(progress, answer["computed"], answer["blocks"], answer["problem"], answer["at"])

    async def resume_sample(self, place: str) -> bool:
        """Go on with a sample that may be stopped; False if it is not here, or has finished."""
        state = await self._when_known(place)
        return state is not None and await self.call_scheduler("resume_sample", state.request_id)

    async def _when_known(self, place: str) -> Any:
        """What vLLM's frontend keeps of a sample that is here; None when there is none (any more)."""
        limit = asyncio.get_running_loop().time() + CATCH_UP_SECONDS
        while (state := self._outputs.state(place)) is None and place in self._here:
            if asyncio.get_running_loop().time() > limit:
                raise TimeoutError(f"waited {CATCH_UP_SECONDS:g} s for sample {place} to begin")
            await asyncio.sleep(CATCH_UP_POLL_SECONDS)
        return state

    async def status(self) -> EngineStatus:
        """What this engine is doing now (scheduling/engine_status.py); figures over time are since the last call."""
        answer = await self.call_scheduler("status")
        found = [SampleStatus(self._outputs.name_of(name), *rest) for name, *rest in answer["samples"]]
        mean = answer["decode"]
        return EngineStatus(
            self.index,
            tuple(sample for sample in found if sample.place in self._here),
            answer["free_tokens"],
            answer["free_seats"],
            self.weight_version,
            self._may_start.is_set(),
            answer["decode_steps"],
            answer["step_tokens"],
            answer["tokens_per_second"],
            answer["tokens_per_step"],
            None if mean is None else DecodeMean(*mean),
        )

    # --- the KV cache

    async def kv_layout(self) -> KvLayout | str:
        """The layout of this engine's KV cache, or one sentence why its blocks cannot be moved."""
        if not await self.call_scheduler("can_carry_kv"):
            return f"engine {self.index} has more than one kind of attention"
        plain = (await self.llm.collective_rpc("rhyme_kv_layout"))[0]
        return plain if isinstance(plain, str) else KvLayout(**plain)

    async def export_kv(self, place: str, buffer: KvBuffer) -> Exported | None:
        """Copy those blocks of a running sample that change no more to the first rows of a buffer, between two steps.

        None if it is not here, or has finished.
        """
        state = await self._when_known(place)
        if state is None:
            return None
        answer = await self.call_scheduler("export_full", state.request_id, buffer.to_plain())
        return None if answer is None else Exported(*answer)

    async def import_kv(self, room: str, buffer: KvBuffer, first: int, end: int) -> str:
        """Copy rows `first` to `end` of the buffer into the blocks of a reservation; "" or why not."""
        return await self._import(room, Rest(buffer, first, end))

    async def hold_room(self, room: str, tokens: int) -> str:
        """Hold a seat and the blocks of `tokens` tokens; "" or why not."""
        if not self._may_start.is_set():
            return f"engine {self.index} loads weights"
        return await self.call_scheduler("hold_room", room, tokens)

    async def release_room(self, room: str) -> None:
        """Give a reservation up, if there is one; and end the sample that took it up, if there is one."""
        await self.discard_sample(room)
        async with self._orders.of(room):
            await self.call_scheduler("release_room", room)

    async def withdraw_sample(self, place: str) -> bool:
        """End a sample here, if it is; False if it has finished."""
        if place in self._finished:
            return False
        await self.discard_sample(place)
        return True

    # --- weights

    async def load_weights(self, segment: Segment) -> float:
        """As its base, while no KV block is being moved in."""
        async with self._orders.all():
            return await super().load_weights(segment)

    async def pause_generation(self) -> None:
        """As its base, while no KV block is being moved in."""
        async with self._orders.all():
            await super().pause_generation()
