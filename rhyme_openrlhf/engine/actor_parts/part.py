"""The base of an engine actor's parts, the protocol of the engine that they see, and the order of its orders.

An actor (engine/actor.py) knows no part by name. `factory.parts_of` attaches the parts that a run's settings ask for.
Each answers the calls of one protocol of calls.py. The methods of `Part` notify it of the engine's events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rhyme_openrlhf.engine.actor_parts.histories import Histories
from rhyme_openrlhf.engine.actor_parts.timeline import EngineTimeline
from rhyme_openrlhf.engine.calls import Caller, RanksCaller
from rhyme_openrlhf.engine.requests import Seeds
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.weights.buckets import Segment


class OrdersLock:
    """Orders about samples run beside each other, one at a time of each sample; what excludes them all runs alone.

    A weight load excludes them all. It begins when the orders that have begun are over; later ones wait for it. Of one
    engine, and used from one event loop.
    """

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._all_held = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def of(self, place: str) -> AsyncIterator[None]:
        """Hold the lock for an order about the sample of this place."""
        await self._until(lambda: not self._all_held and place not in self._held)
        self._held.add(place)
        try:
            yield
        finally:
            self._held.discard(place)
            self._tell()

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Hold the lock without any order under way."""
        await self._until(lambda: not self._all_held)
        self._all_held = True
        try:
            await self._until(lambda: not self._held)
            yield
        finally:
            self._all_held = False
            self._tell()

    async def _until(self, free: Callable[[], bool]) -> None:
        # Nothing runs between an answer that it is free and what the caller then notes.
        while not free():
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Engine(Protocol):
    """An engine's actor as a part sees it (engine/actor.py describes each method).

    `running`: vLLM's names of the samples that run; `rests`: the timeline's state while nothing runs; `traced`: the
    prompts whose samples' drafts are noted; `counted`: totals of before the rollout.
    """

    llm: Any
    rhyme: RhymeSettings
    index: int
    executor: Any
    seeds: Seeds
    histories: Histories
    weight_version: int
    timeline: EngineTimeline
    rests: str
    orders: OrdersLock
    running: set[str]
    traced: frozenset[str]
    counted: EngineCounters

    @property
    def scheduler(self) -> Caller: ...
    @property
    def workers(self) -> RanksCaller: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def core_died(self) -> str: ...
    async def alive(self) -> None: ...
    # Samples.
    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any: ...
    async def generate_responses(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]: ...
    async def score(self, token_ids: list[int]) -> list[float]: ...
    async def until_open(self) -> None: ...
    async def until_drafted_alike(self, fetch: asyncio.Task[None] | None) -> None: ...
    def media_padding(self) -> Any: ...
    def started(self, request_id: str) -> None: ...
    def ended(self, request_id: str) -> None: ...
    # Weights.
    async def load_weights(self, segment: Segment) -> float: ...
    async def pause_generation(self) -> None: ...
    async def resume_generation(self) -> None: ...
    # What it did.
    async def totals(self) -> EngineCounters: ...
    async def planning(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]: ...


class Part:
    """A part of an engine's actor; told of what happens there, and does nothing then unless it says otherwise."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's engine arguments that this part needs."""
        return {}

    async def before_start(
        self, arguments: dict[str, Any], start: Callable[[RhymeSettings, dict[str, Any]], Awaitable[None]]
    ) -> None:
        """Do what comes before the engine's own start; `start` begins an engine of other settings and arguments."""

    async def has_started(self) -> None:
        """React to the engine's start, after its first requests were answered."""

    def sample_started(self, request_id: str) -> None:
        """React to a sample's request that goes to vLLM."""

    def sample_ended(self, request_id: str) -> None:
        """React to the end of a sample's request."""

    def answered(self) -> None:
        """React to the end of the current task's call of `generate`, successful or not."""

    def opened(self) -> None:
        """React to a weight load or a pause that is over: samples may start."""

    def rollout_begun(self) -> None:
        """Begin a rollout: earlier work no longer counts."""
