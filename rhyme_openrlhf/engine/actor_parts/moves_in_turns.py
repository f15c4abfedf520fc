"""The engine of a pipelined run whose samples can move: callers wait in the samples' home, turns are the engine's.

Invariants: as its two bases'; a sample that came from another engine holds the turn up that it came into, so no weights
load below it (but if it is deferred); a sample that left holds none up. An engine of the tail layout has no turns: it
takes weights when it is told to, and only while it has no sample.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rhyme_openrlhf.engine.actor_parts.moves import MovableEngine  # first: installs the shims where needed
from rhyme_openrlhf.engine.actor_parts.timeline import ELSEWHERE
from rhyme_openrlhf.engine.actor_parts.turns import PipelineEngine, TurnCall
from rhyme_openrlhf.engine.messages import LOADS, Progress, Rest, RunningSamples, SampleRequest, Started
from rhyme_openrlhf.kv.buffer import KvBuffer

# A step's turn, and the place of a prompt in that step.
Group = tuple[int, int]


class MovablePipelineEngine(PipelineEngine, MovableEngine):
    """One vLLM engine of a pipelined run with --move.enable."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        # By prompt group: the call that began here. By place: the call of each sample that is here.
        self._entered: dict[Group, TurnCall] = {}
        self._stays: dict[str, TurnCall] = {}
        self._loads_below: dict[str, list[tuple[int, int]]] = {}
        self._deferred: set[Group] = set()
        self._tail = False
        self._taking = asyncio.Lock()
        await super().__init__(*args, **kwargs)

    async def enter_turn(self, number: int, place: int, samples: int) -> int:
        """Waits until turn `number` has begun, in which so many samples of prompt `place` follow; returns the weights
        that they will have."""
        call = TurnCall(number, place, samples)
        self._entered[number, place] = call
        self._calls.add(call)
        await self._until_begun(call)
        return self.weight_version

    async def start_sample(
        self,
        place: str,
        request: SampleRequest,
        progress: Progress | None = None,
        room: str = "",
        computed: int = 0,
        rest: Rest | None = None,
    ) -> Started:
        """As its base; whatever runs here belongs to a turn."""
        if place in self._expected:
            return await super().start_sample(place, request, progress, room, computed, rest)
        if place in self._here or place in self._finished:
            return Started()
        assert request.group is not None, "a sample of no prompt group was sent to a pipelined engine"
        call = self._entered.get(request.group) if progress is None else None
        if call is None:
            call = self._guest(request.group)
        self._stays[place] = call
        started = await super().start_sample(place, request, progress, room, computed, rest)
        if started.refused:
            self._left(place)
        return started

    async def expect_sample(
        self, place: str, request: SampleRequest, buffer: KvBuffer, first: int, weight_version: int, convoy: str = ""
    ) -> str:
        """As its base at an engine of the tail layout; elsewhere never: there a sample belongs to a turn from its start
        on, so it is started by order."""
        if not self._tail:
            return "a pipelined engine expects no sample before it is started there"
        assert request.group is not None, "a sample of no prompt group was sent to a pipelined engine"
        self._stays.setdefault(place, self._guest(request.group))
        refused = await super().expect_sample(place, request, buffer, first, weight_version, convoy)
        if refused:
            self._left(place)
        return refused

    def _guest(self, group: Group) -> TurnCall:
        if self._tail:
            return TurnCall(group[0], group[1], 1, deferred=group in self._deferred)
        current = self._turns.current
        assert current is not None, "a sample came to an engine that has not begun"
        call = TurnCall(current.number, group[1], 1, deferred=group in self._deferred)
        if not call.deferred:
            self._turns.extend(current, 1)
        return call

    def _over(self, place: str, task: asyncio.Task[Any]) -> None:
        loads = self._loads_below.pop(place, [])
        if loads and not task.cancelled() and task.exception() is None:
            setattr(task.result(), LOADS, loads)
        super()._over(place, task)
        self._left(place)

    def _left(self, place: str) -> None:
        call = self._stays.pop(place, None)
        if call is None:
            return
        call.left -= 1
        self._ended_in_turn(call, 1)
        if call.left == 0:
            self._calls.discard(call)
            if self._entered.get((call.number, call.place)) is call:
                del self._entered[call.number, call.place]

    async def defer(self, number: int, place: int) -> None:
        """As its base, and of samples that came from elsewhere, or will."""
        self._deferred.add((number, place))
        groups = {name: here.request.group for name, here in self._here.items()}
        for name, call in self._stays.items():
            if groups.get(name) == (number, place) and call not in self._calls and not call.deferred:
                call.deferred = True
                self._turns.ended(call.number, call.left)
        await super().defer(number, place)

    # --- two layouts on the same devices

    async def stand_by(self) -> None:
        """As its base: this is an engine of the tail layout."""
        self._tail = True
        await super().stand_by()

    async def take_weights(self, version: int) -> None:
        """Load weights that were offered, if they are newer and no sample is here."""
        async with self._taking:
            if self._tail and not self._here and version > self.weight_version and version in self._segments:
                await self._load(version)

    async def hold_turns(self, number: int) -> bool:
        """Begin nothing behind turn `number` until `release_turns`; False if something has, or that turn has not."""
        self._held = self._turns.is_behind(number)
        return self._held

    async def release_turns(self) -> None:
        """Go on, if it was held."""
        if not self._held:
            return
        self._held = False
        if self._timeline.state == ELSEWHERE:
            self._timeline.enter(self._rests, time.time(), self.weight_version)
        self._advance()

    async def running_samples(self) -> RunningSamples:
        """What runs now."""
        lengths = await self._lengths()
        status = await self.call_scheduler("status")
        current = self._turns.current
        found = []
        for name, here in self._here.items():
            if here.request.group is not None:
                turn, place = here.request.group
                found.append((turn, place, lengths.get(name, 0), int(name.partition(".")[0])))
        number = -1 if current is None else current.number
        return RunningSamples(number, found, self.weight_version, status["free_tokens"])

    def _note_load(self, request_id: str, version: int, tokens: int) -> None:
        super()._note_load(request_id, version, tokens)
        if request_id in self._here:
            self._loads_below.setdefault(request_id, []).append((version, tokens))
