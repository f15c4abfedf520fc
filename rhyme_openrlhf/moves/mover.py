"""Carries moves out: takes the steps that the state machine (scheduling/move.py) orders, at engines behind ports.

Moves that go together (a convoy) go to engines on the same devices as those that they come from. While some samples run
at one of them and some at the other, both are slow. So the plan is: prepare all, stop all, hand the devices over where
they hold the KV cache of one layout only, start all. Their destination hears of no stop before all have been made: it
begins with all of them in one step. A move alone is a plan of one.

Invariants:
- Every call has a limit, and ends when its engine is known to be gone.
- A move leaves neither reservation nor buffer nor stopped sample at an engine that answers, however it ends. `_undo`
  ends the moves of a caller that is cancelled.
- A sample is moved by one move at a time.
- A convoy waits for no stop longer than STOP_SECONDS, and not for moves that are over.
- A convoy hands the devices over once, after the stops and before the first start. If that fails, none is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rhyme_openrlhf.engine.calls import DeviceCalls, P, R, RemoteMethod, SampleCalls
from rhyme_openrlhf.engine.messages import Rest, Stopped
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.kv.buffer import KvBuffer, KvBufferStore, KvLayout
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.scheduling.move import (
    KV_TRANSFER,
    MOVED,
    Cleanup,
    Move,
    MoveRefused,
    Phase,
    Place,
    Reply,
    Step,
    ask,
)
from rhyme_openrlhf.scheduling.move_costs import Destination


@dataclass(frozen=True)
class Choice:
    """The way a sample is carried, its expected downtime, and the grounds of that (None: not known)."""

    carrier: str
    predicted: float | None = None
    destination: Destination | None = None


@dataclass(frozen=True)
class MoveRecord:
    """A move that is over. `seconds`: all of it; `tokens`: of context.

    `downtime`: seconds from the stop at the source to the first token elsewhere (or to the order to resume), None where
    that is not known. `group`: as in SampleRequest.
    """

    move: Move
    cause: str
    seconds: float
    downtime: float | None
    tokens: int
    choice: Choice
    group: tuple[int, int] | None = None


# Stopped samples generate nothing. A stop is made within a step of its engine. A stop that takes longer than any step
# means that the engine has failed, and the others go on without it.
STOP_SECONDS = 1.0
_BEFORE_STOP, _BEFORE_START = frozenset({Step.STOP, Step.START}), frozenset({Step.START})


@dataclass
class _Way:
    """One move under way: `left` is the sample's place at the source, `room` the one at the destination.

    `buffers`: by engine, what the source writes and the destination reads; of one node they have one together.
    `staged`: blocks that were copied out while it ran, `arrived`: those of them that are at the destination already;
    `stopped_at`: when, by this process's monotonic clock; `computed`: tokens whose KV cache has arrived. `near`: both
    engines are on one node; `in_turns`: they never have their KV caches at once; `convoy`: the name of those that go
    together, "" of one alone. `tidying`: what is left to do of a move that is over.
    """

    move: Move
    sample: KeptSample
    left: str
    room: str
    choice: Choice
    near: bool
    in_turns: bool
    convoy: str
    buffers: dict[int, KvBuffer] = field(default_factory=dict)
    staged: int = 0
    arrived: int = 0
    stopped: Stopped | None = None
    stopped_at: float = 0.0
    computed: int = 0
    downtime: float | None = None
    tidying: asyncio.Task[None] | None = None


class Mover:
    """Moves the samples of a keeper. `choose(context, source, destination)` says how a sample of that many tokens
    is carried.

    `limit_s`: seconds that one call to an engine may take. `record`: told of each move that is over. `ask_after_s`:
    seconds after which an engine is asked whether it has gone on with what was handed over to it. `nodes`: where
    engines are, as far as that is known, and `here`, where the store is; who is not among them is here.
    """

    def __init__(
        self,
        keeper: SampleKeeper,
        store: KvBufferStore,
        choose: Callable[[int, int, int], Choice],
        limit_s: float,
        record: Callable[[MoveRecord], None] = lambda record: None,
        ask_after_s: float = 0.0,
        nodes: Mapping[int, str] = MappingProxyType({}),
        here: str = "",
    ) -> None:
        self._keeper = keeper
        self._store = store
        self._choose = choose
        self._limit_s = limit_s
        self._record = record
        self._ask_after_s = ask_after_s
        self._nodes = nodes
        self._here = here
        self._layouts: dict[int, KvLayout | str] = {}
        self._tidying: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Ask engines beforehand what their KV caches are made of: in its first move that would cost a step of each."""

        async def ask(engine: int) -> None:
            # One that does not answer is asked again when a sample moves.
            with contextlib.suppress(TimeoutError, OrderFailed, EngineLost):
                async with asyncio.timeout(self._limit_s):
                    await self._layout(engine)

        await asyncio.gather(*(ask(engine) for engine in self._keeper.engines))

    async def move(self, sample: KeptSample, destination: int, cause: str) -> MoveRecord:
        """Move a sample; returns when that is over, well or not. Raises MoveRefused when it must not begin."""
        (done,) = await self.move_together([(sample, destination)], cause)
        if isinstance(done, MoveRefused):
            raise done
        return done

    async def move_together(
        self,
        orders: Sequence[tuple[KeptSample, int]],
        cause: str,
        hand_over: Callable[[], Awaitable[str]] | None = None,
    ) -> list[MoveRecord | MoveRefused]:
        """Move samples to their destinations together; return how each move ended, or why it must not begin.

        All are prepared, then all stopped, and then all started. `hand_over` hands the devices over in between, where
        source and destination never have their KV caches at once; it returns "" or why none can be started.
        """
        began, convoy = time.monotonic(), uuid.uuid4().hex if len(orders) > 1 else ""
        ways: list[_Way | MoveRefused] = []
        for sample, destination in orders:
            try:
                ways.append(self._begin(sample, destination, convoy, hand_over is not None))
            except MoveRefused as refused:
                ways.append(refused)
        going = [way for way in ways if isinstance(way, _Way)]
        stops: list[asyncio.Task[None]] = []
        try:
            await asyncio.gather(*(self._go(way, _BEFORE_STOP) for way in going))
            stops = [asyncio.create_task(self._go(way, _BEFORE_START)) for way in going]
            problem = await self._when_stopped(going, stops, hand_over)
            both = zip(going, stops, strict=True)
            ended = iter(await asyncio.gather(*(self._finish(way, stop, problem, cause, began) for way, stop in both)))
        finally:
            for stop in stops:
                stop.cancel()
            for way in going:
                self._undo(way)
        return [next(ended) if isinstance(way, _Way) else way for way in ways]

    @staticmethod
    async def _when_stopped(
        going: list[_Way], stops: list[asyncio.Task[None]], hand_over: Callable[[], Awaitable[str]] | None
    ) -> str:
        """Hand the devices over once all are stopped that will be in time; return "" or why none can be started."""

        def are_ready() -> bool:
            return any(way.move.step is Step.START for way in going)

        late = (await asyncio.wait(stops, timeout=STOP_SECONDS))[1] if stops else set()
        while hand_over is not None and late and not are_ready():
            late = (await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED))[1]
        return await hand_over() if hand_over is not None and are_ready() else ""

    def _begin(self, sample: KeptSample, destination: int, convoy: str, in_turns: bool) -> _Way:
        engine = sample.engine
        if engine is None:
            raise MoveRefused(f"sample {sample.name} is on no engine")
        choice = self._choose(len(sample.request.prompt) + sample.known_tokens, engine, destination)
        near = self._node(engine) == self._node(destination)
        move = ask(
            sample.name,
            self._place(engine),
            self._place(destination),
            choice.carrier,
            moving=sample.moving,
            # Where both engines never have their KV caches at once nothing can wait for it.
            hands_over=near and not in_turns,
        )
        sample.moving, sample.incoming = True, sample.new_place()
        return _Way(move, sample, sample.place, sample.incoming, choice, near, in_turns, convoy)

    async def _go(self, way: _Way, until: Collection[Step] = ()) -> None:
        """Take the steps before one of these, or all; tidy up behind a move that is over."""
        while not way.move.over and way.move.step not in until:
            way.move = way.move.after(*await self._take(way.move, way))
        if way.move.over and way.tidying is None:
            self._settle(way)
            way.tidying = self._beside(self._clean_up(way.move, way))

    async def _finish(
        self, way: _Way, stopping: asyncio.Task[None], problem: str, cause: str, began: float
    ) -> MoveRecord:
        """Start a sample that is stopped, unless there is a problem; return how its move ended."""
        await stopping
        if problem and not way.move.over:
            way.move = way.move.after(Reply.REFUSED, problem)
        await self._go(way)
        assert way.tidying is not None
        await asyncio.wait([way.tidying], timeout=self._limit_s)
        if way.move.phase in MOVED and way.stopped is not None:
            way.downtime = await self._until_first_token(way.move, way)
        tokens = len(way.sample.request.prompt) + way.sample.known_tokens
        seconds, group = time.monotonic() - began, way.sample.request.group
        done = MoveRecord(way.move, cause, seconds, way.downtime, tokens, way.choice, group)
        self._record(done)
        return done

    def _undo(self, way: _Way) -> None:
        """Have the sample of a move that ends here go on at one engine, and nothing left at the other."""
        if way.tidying is None:
            way.move = way.move.after(Reply.GIVEN_UP, "the mover was stopped")
            self._beside(self._go(way))

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work that is not cancelled together with the caller."""
        task = asyncio.create_task(work)
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)
        return task

    def _node(self, engine: int) -> str:
        return self._nodes.get(engine, self._here)

    def _place(self, engine: int) -> Place:
        known = self._keeper.engines[engine]
        return Place(engine, known.weight_version, known.alive and known.open)

    def _settle(self, way: _Way) -> None:
        """Note for the sample's keeper where the sample is now, and remove its buffers here."""
        move, sample = way.move, way.sample
        for where, buffer in way.buffers.items():
            if self._node(where) == self._here:
                self._store.remove(buffer)
        sample.moving = False
        if move.phase in MOVED:
            sample.settle(move.destination, way.room)
        else:
            sample.settle(sample.engine, sample.place)
        if sample.answer.done():
            return
        here = sample.engine
        if move.phase is Phase.LOST or (here is not None and not self._keeper.engines[here].alive):
            self._keeper.restart(sample)

    async def _take(self, move: Move, way: _Way) -> tuple[Reply, str]:
        """Take the next step: the reply, and why if it is not DONE."""
        if way.sample.answer.done():
            return Reply.ENDED, "the sample ended"
        step: Any = {
            Step.RESERVE: self._reserve,
            Step.STAGE: self._stage,
            Step.EXPECT: self._expect,
            Step.STOP: self._stop,
            Step.TRANSFER: self._transfer,
            Step.START: self._start,
            Step.WITHDRAW: self._withdraw,
            Step.RESUME: self._resume,
        }[move.step]  # type: ignore[index]
        try:
            async with asyncio.timeout(self._limit_s):
                return await step(move, way)
        except TimeoutError:
            return Reply.LATE, f"{move.step} was not answered within {self._limit_s:g} s"
        except (OSError, OrderFailed) as error:
            return Reply.FAILED, str(error)
        except EngineLost as lost:
            reply = Reply.SOURCE_LOST if lost.engine == move.source else Reply.DESTINATION_LOST
            return reply, f"engine {lost.engine} was lost"

    async def _call(self, engine: int, method: RemoteMethod[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._keeper.engines[engine].call(method, *args, **kwargs)

    # --- steps

    async def _reserve(self, move: Move, way: _Way) -> tuple[Reply, str]:
        # What it grows by on the way is added when it is stopped.
        tokens = len(way.sample.request.prompt) + way.sample.known_tokens + 1
        refused = await self._call(move.destination, SampleCalls.hold_room, way.room, tokens)
        return (Reply.REFUSED if refused else Reply.DONE), refused

    async def _stage(self, move: Move, way: _Way) -> tuple[Reply, str]:
        layouts = [await self._layout(engine) for engine in (move.source, move.destination)]
        for layout in layouts:
            if isinstance(layout, str):
                return Reply.FAILED, layout
        layout = layouts[0]
        assert isinstance(layout, KvLayout)
        if layout != layouts[1]:
            return Reply.FAILED, f"the KV caches differ: {layout} and {layouts[1]}"
        rows = -(-way.sample.request.longest // layout.block_size)
        way.buffers[move.source] = await self._make_buffer(move.source, layout, rows)
        if way.near:
            way.buffers[move.destination] = way.buffers[move.source]
        else:
            way.buffers[move.destination] = await self._make_buffer(move.destination, layout, rows)
        # Those that are full and final, while the source generates on.
        exported = await self._call(move.source, SampleCalls.export_kv, way.left, way.buffers[move.source])
        if exported is None:
            return Reply.GONE, "the sample ended"
        problem = exported.problem or await self._bring(move, way, 0, exported.blocks)
        if exported.blocks and not problem and not way.in_turns:
            there = way.buffers[move.destination]
            problem = await self._call(move.destination, SampleCalls.import_kv, way.room, there, 0, exported.blocks)
            way.arrived = exported.blocks
        if problem:
            return Reply.FAILED, problem
        way.staged = exported.blocks
        return Reply.DONE, ""

    async def _layout(self, engine: int) -> KvLayout | str:
        if engine not in self._layouts:
            self._layouts[engine] = await self._call(engine, SampleCalls.kv_layout)
        return self._layouts[engine]

    async def _make_buffer(self, engine: int, layout: KvLayout, rows: int) -> KvBuffer:
        if self._node(engine) == self._here:
            return self._store.make(layout, rows)
        return await self._call(engine, DeviceCalls.make_kv_buffer, layout, rows)

    async def _bring(self, move: Move, way: _Way, first: int, end: int) -> str:
        """Between nodes: what the source has written of blocks `first` to `end` to the destination; "" or why not."""
        if way.near or end <= first:
            return ""
        source, buffers = self._keeper.engines[move.source].port, way.buffers
        theirs, ours = buffers[move.source], buffers[move.destination]
        return await self._call(move.destination, DeviceCalls.fetch_kv_rows, source, theirs, ours, first, end)

    async def _expect(self, move: Move, way: _Way) -> tuple[Reply, str]:
        version = self._keeper.engines[move.source].weight_version
        request, buffer = way.sample.request, way.buffers[move.source]
        refused = await self._call(
            move.destination, SampleCalls.expect_sample, way.room, request, buffer, way.staged, version, way.convoy
        )
        return (Reply.REFUSED if refused else Reply.DONE), refused

    async def _stop(self, move: Move, way: _Way) -> tuple[Reply, str]:
        carried = (way.buffers[move.source], way.staged, move.expected) if move.carrier == KV_TRANSFER else ()
        way.stopped = await self._call(move.source, SampleCalls.stop_sample, way.left, *carried)
        if way.stopped is None:
            return Reply.GONE, "the sample ended"
        # By this clock alone: those of two nodes may differ by anything.
        way.stopped_at = time.monotonic() - way.stopped.age
        way.sample.known = way.stopped.progress
        return Reply.DONE, ""

    async def _transfer(self, move: Move, way: _Way) -> tuple[Reply, str]:
        stopped = way.stopped
        assert stopped is not None
        if stopped.computed <= 0:
            return Reply.FAILED, "nothing of its KV cache is computed"
        if stopped.problem:
            return Reply.FAILED, stopped.problem
        if problem := await self._bring(move, way, way.staged, stopped.blocks):
            return Reply.FAILED, problem
        way.computed = stopped.computed
        return Reply.DONE, ""

    async def _start(self, move: Move, way: _Way) -> tuple[Reply, str]:
        sample = way.sample
        if move.expected and move.phase is Phase.TRANSFERRED:
            await asyncio.sleep(self._ask_after_s)
        computed = way.computed if move.carrier == KV_TRANSFER else 0
        if way.stopped is None:
            sample.known = self._keeper.restartable(sample)
        rest = None
        if computed and way.stopped is not None and way.stopped.blocks > way.arrived:
            rest = Rest(way.buffers[move.destination], way.arrived, way.stopped.blocks)
        started = await self._call(
            move.destination, SampleCalls.start_sample, way.room, sample.request, sample.known, way.room, computed, rest
        )
        if started.refused:
            return Reply.REFUSED, started.refused
        return (Reply.RECOMPUTING if started.not_carried else Reply.DONE), started.not_carried

    async def _withdraw(self, move: Move, way: _Way) -> tuple[Reply, str]:
        withdrawn = await self._call(move.destination, SampleCalls.withdraw_sample, way.room)
        if withdrawn:
            way.sample.ahead.clear()
        return (Reply.DONE, "") if withdrawn else (Reply.REFUSED, "it has finished there")

    async def _resume(self, move: Move, way: _Way) -> tuple[Reply, str]:
        resumed = await self._call(move.source, SampleCalls.resume_sample, way.left)
        if way.stopped is not None:
            way.downtime = time.monotonic() - way.stopped_at
        return (Reply.DONE, "") if resumed else (Reply.GONE, "the sample ended")

    async def _until_first_token(self, move: Move, way: _Way) -> float | None:
        try:
            async with asyncio.timeout(self._limit_s):
                age = await self._call(move.destination, SampleCalls.first_token_age, way.room, self._limit_s / 2)
        except (TimeoutError, OrderFailed, EngineLost):
            return None
        seconds = 0.0 if age is None else time.monotonic() - age - way.stopped_at
        # Not known where the answer to the stop took longer than the stop.
        return seconds if seconds > 0 else None

    async def _clean_up(self, move: Move, way: _Way) -> None:
        orders: dict[Cleanup, tuple[int, RemoteMethod[..., None], Any]] = {
            Cleanup.RELEASE: (move.destination, SampleCalls.release_room, way.room),
            Cleanup.DISCARD: (move.source, SampleCalls.discard_sample, way.left),
        }
        todo = [orders[cleanup] for cleanup in move.cleanup]
        for engine, buffer in way.buffers.items():
            if self._node(engine) != self._here:
                todo.append((engine, DeviceCalls.remove_kv_buffer, buffer))
        if way.sample.answer.cancelled() and move.may_generate == move.destination:
            # Aborted with the last order on its way: the abort went to the source.
            todo.append((move.destination, SampleCalls.discard_sample, way.room))
        for engine, method, argument in todo:
            # Without a limit: an engine that is only slow, or not reached for a while, must keep nothing.
            with contextlib.suppress(TimeoutError, OrderFailed, EngineLost):
                await self._call(engine, method, argument)
