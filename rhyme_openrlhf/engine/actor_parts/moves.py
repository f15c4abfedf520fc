"""The samples of one engine where samples can move: it registers each, and reports outcomes to their keeper.

The caller's await is with the sample's keeper (moves/keeper.py), which polls `collect` for news. So only the KV cache
and the latest tokens die with an engine. A sample has another name for every stay at an engine, its place. All calls
name places, and every order may be given twice.

In a move that hands over, a sample is expected before its engine has stopped it. Its request waits in the engine core
(engine/scheduler_parts/moves.py), which continues it as soon as it is handed over. The resulting output is held back
from its keeper until `start_sample` brings the missing piece: log-probabilities of the tokens generated elsewhere.

Invariants:
- Blocks of a reservation are written only while nothing can take them away: within one call of the scheduler, which
  voids them all at a weight load. Releasing one sample and moving it in exclude each other, and weight loads exclude
  moving in.
- The report of a stopped sample has every token that its engine has made.
- An expected sample is reported only after its start.
- A core that continued with other tokens than the keeper knows counts as one that did not continue.
- Its keeper hears of a weight load as soon as samples may start with the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine import requests
from rhyme_openrlhf.engine.actor_parts.part import Engine, Part
from rhyme_openrlhf.engine.arguments import moving_arguments
from rhyme_openrlhf.engine.calls import SchedulerMoves, WorkerCalls
from rhyme_openrlhf.engine.messages import (
    ARRIVED,
    LOADS,
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
from rhyme_openrlhf.engine_errors import EngineCoreError
from rhyme_openrlhf.kv.buffer import KvBuffer, KvLayout
from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus, SampleStatus

# vLLM's word for a request that was ended from outside.
ABORTED = "abort"
# The engine core and vLLM's frontend differ by the steps whose output is on its way between them.
CATCH_UP_SECONDS = 10.0
POLL_SECONDS = 0.001
# Between two looks at vLLM's process, of a sample that waits for weights.
LOOK_SECONDS = 1.0
# Only a record waits for it.
FIRST_TOKEN_POLL_SECONDS = 0.02


class SampleStays(Protocol):
    """Listener to each stay of a sample at this engine: its turns, in a pipelined run."""

    @property
    def expects_samples(self) -> bool:
        """Return whether samples may be expected here before they are started."""

    def comes(self, place: str, group: tuple[int, int] | None, begins: bool) -> None:
        """Take a sample up; `begins`: it has generated nothing elsewhere. Said twice it is the same."""

    def goes(self, place: str) -> list[tuple[int, int]]:
        """Let a sample go; return the weights that were loaded below it, with its tokens then."""


@dataclass
class _Here:
    """A sample that is here: its request, how many of its tokens its keeper knows, and the task that generates it."""

    request: SampleRequest
    told: int
    task: asyncio.Task[Any] | None = None


class Moves(Part):
    """The samples of one engine. `stays`: their listener, or None.

    By place: `here` has those that are here, `finished` those that the next news reports, `expected` vLLM's names of
    those that are to come by a handover.
    """

    def __init__(self, engine: Engine, stays: SampleStays | None = None) -> None:
        super().__init__(engine)
        self._stays = stays
        self.here: dict[str, _Here] = {}
        self.finished: dict[str, Any] = {}
        self.expected: dict[str, str] = {}
        self._news = asyncio.Event()
        self._told = News({}, {}, -1, True)
        self._dead = False

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments of an engine whose samples can move."""
        return moving_arguments(self.engine.rhyme)

    def opened(self) -> None:
        """Have the keeper hear of the new weights now."""
        self._news.set()

    async def has_started(self) -> None:
        """Take up vLLM's frontend."""
        self._outputs = ResumedOutputs(self.engine.llm)

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
        copied in. In a pipelined run, every sample at an engine belongs to a turn. The answer comes when the sample's
        weights are certain.
        """
        if (gone_on := await self.go_on(place, progress)) is not None:
            if progress is not None and place in self.here:
                self.here[place].told = len(progress.tokens)
            return gone_on
        if place in self.here or place in self.finished:
            return Started(weight_version=self.engine.weight_version)
        if self._stays is not None:
            self._stays.comes(place, request.group, begins=progress is None)
        started = await self._start(place, request, progress, room, computed, rest)
        if started.refused and self._stays is not None:
            self._stays.goes(place)
        if not started.refused and progress is None:
            # Outside of the lock, for which a weight load waits.
            await self._until_open()
        return dataclasses.replace(started, weight_version=self.engine.weight_version)

    async def start_samples(self, samples: Mapping[str, tuple[SampleRequest, Progress | None]]) -> list[Started]:
        """Begin samples by place, or go on with them without reservations, as `start_sample` does."""
        return await asyncio.gather(*(self.start_sample(place, *one) for place, one in samples.items()))

    async def _until_open(self) -> None:
        """Wait until samples may start. Raises EngineCoreError when vLLM's process is gone, which opens no more."""
        while not self.engine.is_open:
            await self.engine.alive()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.engine.until_open(), LOOK_SECONDS)

    async def _start(
        self,
        place: str,
        request: SampleRequest,
        progress: Progress | None,
        room: str,
        computed: int,
        rest: Rest | None,
    ) -> Started:
        if refused := self._refuses(progress):
            return Started(refused)
        here = self.here[place] = _Here(request, len(progress.tokens) if progress else 0)
        async with self.engine.orders.of(place):
            # A load may have come meanwhile.
            if refused := self._refuses(progress):
                del self.here[place]
                return Started(refused)
            # Not waited for: the scheduler meets both between the same two steps, the rest first.
            importing = None if rest is None else asyncio.create_task(self._import(room, rest))
            arrival = None if progress is None else Arrival(progress.tokens, room, computed, progress.generator)
            here.task = self._begin_sample(place, request, progress, arrival)
            while room and not here.task.done() and self._outputs.state(place) is None:
                await asyncio.sleep(POLL_SECONDS)
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
        if self._stays is not None:
            if not self._stays.expects_samples:
                return "a pipelined engine expects no sample before it is started there"
            self._stays.comes(place, request.group, begins=False)
        if place in self.here:
            return ""
        refused = await self._expect(place, request, buffer, first, weight_version, convoy)
        if refused and self._stays is not None:
            self._stays.goes(place)
        return refused

    async def _expect(
        self, place: str, request: SampleRequest, buffer: KvBuffer, first: int, weight_version: int, convoy: str
    ) -> str:
        here = self.here[place] = _Here(request, 0)
        async with self.engine.orders.of(place):
            progress = Progress(weight_version=weight_version)
            if refused := self._refuses(progress):
                del self.here[place]
                return refused
            arrival = Arrival((), place, buffer=buffer.to_plain(), first=first, convoy=convoy)
            self._outputs.hold(place)
            here.task = self._begin_sample(place, request, progress, arrival)
            return await self._until_expected(place)

    def _refuses(self, progress: Progress | None) -> str:
        """Return why a sample that has come to `progress` cannot go on here now, or ""."""
        if progress is None:
            # It waits for weights here, and begins with them.
            return ""
        if not self.engine.is_open:
            return f"engine {self.engine.index} loads weights"
        here = self.engine.weight_version
        if progress.weight_version not in (None, here):
            return f"engine {self.engine.index} has weight version {here}, not {progress.weight_version}"
        return ""

    async def _import(self, room: str, rest: Rest) -> str:
        answer: str = await self.engine.scheduler(
            SchedulerMoves.import_rows, room, rest.buffer.to_plain(), rest.first, rest.end
        )
        return answer

    def _over(self, place: str, task: asyncio.Task[Any]) -> None:
        """Note a sample's end: its keeper is to know the output, or what ended it."""
        loads = [] if self._stays is None else self._stays.goes(place)
        del self.here[place]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineDeadError | EngineCoreError):
            # Its keeper learns that from `collect`, for all samples at once.
            self._dead = True
        elif error is not None:
            self.finished[place] = error
        elif not task.cancelled() and task.result().outputs[0].finish_reason != ABORTED:
            self.finished[place] = task.result()
            if loads:
                setattr(task.result(), LOADS, loads)
        self._news.set()

    async def _generate(
        self, place: str, request: SampleRequest, progress: Progress | None, arrival: Arrival | None
    ) -> Any:
        if request.history is None:
            return await self._output(place, request, progress, arrival)
        self.engine.histories.begin(request.history)
        try:
            return await self._output(place, request, progress, arrival)
        finally:
            await self.engine.histories.end(request.history)

    async def _output(
        self, place: str, request: SampleRequest, progress: Progress | None, arrival: Arrival | None
    ) -> Any:
        if progress is None:
            await self.engine.until_open()
        padding = self.engine.media_padding()
        prompt = requests.prompt_of(request.prompt, self.engine.weight_version, request.multi_modal, padding)
        parameters = requests.final_only(request.parameters)
        extra = dict(parameters.extra_args or {})
        if request.history is not None:
            extra[requests.PROMPT_KEY], fetch = self.engine.histories.round(request.history, request.round)
            await self.engine.until_drafted_alike(fetch)
        if progress is not None and arrival is not None:
            extra[ARRIVED] = arrival.to_plain()
            extra[requests.WINDOW] = progress.window
            if arrival.buffer is None:
                self._outputs.expect(place, progress)
        parameters.extra_args = extra
        self.engine.started(place)
        try:
            return await requests.generate(self.engine.llm, prompt, parameters, place)
        finally:
            self.engine.ended(place)

    async def collect(self, wait_s: float, heard: int = 0) -> News:
        """Return news since that of number `heard`; wait up to `wait_s` seconds for a sample to finish, or new weights.

        There is one keeper. What it has not heard, because a connection broke, it is told again. Raises EngineCoreError
        when vLLM's process is gone.
        """
        self._news.clear()
        if not self.finished and not self._dead and self._told.number != heard + 1 and self._knows_weights():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
        await self.engine.alive()
        if self._dead:
            raise EngineCoreError(self.engine.core_died)
        if self._told.number == heard + 1:
            return self._told
        finished, self.finished = self.finished, {}
        grown = {}
        for place, here in self.here.items():
            state = self._outputs.state(place)
            if state is not None:
                tokens, log_probs = generated(state, here.told)
                grown[place] = Grown(here.told, tokens, log_probs)
                here.told += len(tokens)
        self._told = News(finished, grown, self.engine.weight_version, self.engine.is_open, heard + 1)
        return self._told

    def _knows_weights(self) -> bool:
        return (self._told.weight_version, self._told.open) == (self.engine.weight_version, self.engine.is_open)

    async def discard_sample(self, place: str) -> None:
        """End a sample here, if it is here, and report nothing more about it."""
        here = self.here.get(place)
        if here is not None:
            await self._when_known(place)
            await self.engine.llm.abort(place)
            if here.task is not None:
                await asyncio.wait([here.task], timeout=CATCH_UP_SECONDS)
        self.expected.pop(place, None)
        self.finished.pop(place, None)

    # --- source

    async def stop_sample(
        self, place: str, buffer: KvBuffer | None = None, first: int = 0, hand_over: bool = False
    ) -> Stopped | None:
        """Generate no more for a sample, and keep it; None if it is not here, or has finished.

        With a `buffer` its blocks from number `first` on are copied there, and with `hand_over` the engine that expects
        the sample goes on with it. Raises TimeoutError if vLLM's frontend does not get to know its last tokens.
        """
        plain = None if buffer is None else buffer.to_plain()
        state = await self._when_known(place)
        if state is None:
            return None
        limit = asyncio.get_running_loop().time() + CATCH_UP_SECONDS
        scheduler, order = self.engine.scheduler, SchedulerMoves.stop_sample
        answer = await scheduler(order, state.request_id, plain, first, hand_over)
        while answer is None or state.detokenizer.num_output_tokens() < answer["output"]:
            if self._outputs.state(place) is not state:
                # It finished; or the frontend met a stop string in tokens that were on their way.
                return None
            if asyncio.get_running_loop().time() > limit:
                raise TimeoutError(f"waited {CATCH_UP_SECONDS:g} s for the last tokens of sample {place}")
            await asyncio.sleep(POLL_SECONDS)
            if answer is None:
                answer = await self.engine.scheduler(
                    SchedulerMoves.stop_sample, state.request_id, plain, first, hand_over
                )
        tokens, log_probs = generated(state)
        progress = Progress(tokens, log_probs, answer["generator"], answer["window"], self.engine.weight_version)
        age = time.monotonic() - answer["at"]
        return Stopped(progress, answer["computed"], answer["blocks"], answer["problem"], age)

    async def resume_sample(self, place: str) -> bool:
        """Go on with a sample that may be stopped; False if it is not here, or has finished."""
        state = await self._when_known(place)
        return state is not None and await self.engine.scheduler(SchedulerMoves.resume_sample, state.request_id)

    async def _when_known(self, place: str) -> Any:
        """Return the state that vLLM's frontend keeps of a sample that is here; None when there is none (any more)."""
        limit = asyncio.get_running_loop().time() + CATCH_UP_SECONDS
        while (state := self._outputs.state(place)) is None and place in self.here:
            if asyncio.get_running_loop().time() > limit:
                raise TimeoutError(f"waited {CATCH_UP_SECONDS:g} s for sample {place} to begin")
            await asyncio.sleep(POLL_SECONDS)
        return state

    async def _until_expected(self, place: str) -> str:
        """Wait until the engine core expects a sample that has just begun here; "" or why it does not."""
        state = await self._when_known(place)
        limit = asyncio.get_running_loop().time() + CATCH_UP_SECONDS
        while state is not None and not await self.engine.scheduler(SchedulerMoves.expects, state.request_id):
            if asyncio.get_running_loop().time() > limit:
                raise TimeoutError(f"waited {CATCH_UP_SECONDS:g} s for the engine core to expect sample {place}")
            await asyncio.sleep(POLL_SECONDS)
            state = self._outputs.state(place)
        if state is None:
            return f"sample {place} was given up before it was expected"
        self.expected[place] = state.request_id
        return ""

    async def go_on(self, place: str, progress: Progress | None) -> Started | None:
        """Return the outcome of a sample that was expected here and has come to `progress`; None: it is to be started.

        With None, nothing is left of it here.
        """
        request_id = self.expected.pop(place, None)
        if request_id is None:
            return None
        gone_on = await self.engine.scheduler(SchedulerMoves.gone_on, request_id)
        refused = self._refuses(progress)
        if gone_on is None or refused or progress is None or gone_on[0] != len(progress.tokens):
            await self.discard_sample(place)
            return Started(refused) if refused else None
        ended_by_text = self._outputs.release(place, progress)
        if ended_by_text:
            await self.engine.llm.engine_core.abort_requests_async(ended_by_text)
        return Started(not_carried=gone_on[1], weight_version=self.engine.weight_version)

    async def first_token_age(self, place: str, wait_s: float) -> float | None:
        """Return the seconds since a sample that moved here got its first token; None if it has none after `wait_s`."""
        limit = asyncio.get_running_loop().time() + wait_s
        state = self._outputs.state(place)
        if state is None:
            return None
        while (at := await self.engine.scheduler(SchedulerMoves.take_first_token, state.request_id)) is None:
            if place not in self.here or asyncio.get_running_loop().time() > limit:
                return None
            await asyncio.sleep(FIRST_TOKEN_POLL_SECONDS)
        return time.monotonic() - at

    async def hold_room(self, room: str, tokens: int) -> str:
        """Hold a seat and the blocks of `tokens` tokens; "" or why not."""
        if not self.engine.is_open:
            return f"engine {self.engine.index} loads weights"
        return await self.engine.scheduler(SchedulerMoves.hold_room, room, tokens)

    async def release_room(self, room: str) -> None:
        """Give a reservation up, if there is one; and end the sample that took it up, if there is one."""
        await self.discard_sample(room)
        async with self.engine.orders.of(room):
            await self.engine.scheduler(SchedulerMoves.release_room, room)

    async def withdraw_sample(self, place: str) -> bool:
        """End a sample here, if it is; False if it has finished."""
        if place in self.finished:
            return False
        await self.discard_sample(place)
        return True

    async def kv_layout(self) -> KvLayout | str:
        """Return the layout of this engine's KV cache, or one sentence why its blocks cannot be moved."""
        if not await self.engine.scheduler(SchedulerMoves.can_carry_kv):
            return f"engine {self.engine.index} has more than one kind of attention"
        plain = (await self.engine.workers(WorkerCalls.rhyme_kv_layout))[0]
        return plain if isinstance(plain, str) else KvLayout(**plain)

    async def export_kv(self, place: str, buffer: KvBuffer) -> Exported | None:
        """Copy those blocks of a running sample that change no more to the first rows of a buffer, between two steps.

        None if it is not here, or has finished.
        """
        state = await self._when_known(place)
        if state is None:
            return None
        answer = await self.engine.scheduler(SchedulerMoves.export_full, state.request_id, buffer.to_plain())
        return None if answer is None else Exported(*answer)

    async def import_kv(self, room: str, buffer: KvBuffer, first: int, end: int) -> str:
        """Copy rows `first` to `end` of the buffer into the blocks of a reservation; "" or why not."""
        return await self._import(room, Rest(buffer, first, end))

    async def status(self) -> EngineStatus:
        """Return this engine's state (scheduling/engine_status.py); figures over time are since the last call."""
        answer = await self.engine.scheduler(SchedulerMoves.status)
        found = [SampleStatus(self._outputs.name_of(name), *rest) for name, *rest in answer["samples"]]
        mean = answer["decode"]
        return EngineStatus(
            self.engine.index,
            tuple(sample for sample in found if sample.place in self.here),
            answer["free_tokens"],
            answer["free_seats"],
            self.engine.weight_version,
            self.engine.is_open,
            answer["decode_steps"],
            answer["step_tokens"],
            answer["tokens_per_second"],
            answer["tokens_per_step"],
            None if mean is None else DecodeMean(*mean),
        )
