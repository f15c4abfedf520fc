"""Adaptive tensor parallelism while a run generates: asks the policy, and moves a node's samples to a tail layout.

Runs beside the samples' home. Nodes are independent; one may switch more than once in a step, to larger engines every
time.

- Nothing switches while prompts of the step are still to come, or while other moves of the node are under way. An
  outlier and a reallocation come first, because they decide on single samples, and a switch on all the others.
- Samples go only if the tail engines have room for all of them. A sample that could not be moved continues at its
  engine and is not tried again. The aligned engines stay as they are, so the next step's prompts go there without any
  moves back.
- **Where devices hold the KV cache of one layout at a time** (`AwakeLayouts`), all samples of the node go or none. The
  devices go to a layout that has samples when the present one has none; with no samples anywhere, to the aligned one.
  So no sample waits for ever at an engine without its KV cache. Memory is taken from the engines of one layout before
  those of another get it, and a node has one handover under way at a time. If it fails, the devices go back; if even
  that fails, some have no owner until the next attempt.
- **In a pipelined run** (`TurnHolds`) aligned engines would begin the next step on devices that the tail layout uses.
  So a node switches when all its engines are done with the same step, except for the samples that move. They would wait
  for weights there anyway. Its engines go on when the tail engines are done. Samples that move are of one turn, with
  one weight version, which the tail engines have too. Engines that were held are always let go, however the switch
  ends.

An engine that is gone has no memory and no turns, and is not asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rhyme_openrlhf.engine.calls import DeviceCalls, P, RemoteMethod, TurnCalls
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.moves.engine_reports import EngineReports, LayoutReports
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.moves.mover import Mover, MoveRecord
from rhyme_openrlhf.scheduling.engine_status import EngineStatus
from rhyme_openrlhf.scheduling.first_layouts import first_layouts
from rhyme_openrlhf.scheduling.layouts import ALIGNED, LayoutPlan
from rhyme_openrlhf.scheduling.move import MOVED, MoveRefused, NotYet
from rhyme_openrlhf.scheduling.stage_course import Layout, Unfinished
from rhyme_openrlhf.scheduling.tp_switch import SwitchCost, decide, in_turn
from rhyme_openrlhf.scheduling.turns import step_of
from rhyme_openrlhf.settings.tp_switch import BY_HISTORY, TpSwitchSettings
from rhyme_openrlhf.telemetry.events import LayoutSwitched


class AwakeLayouts:
    """The layouts of one home's nodes that have the devices.

    `nodes`: of each node the engines of its layouts. `limit_s`: for an engine to give or take.
    """

    def __init__(self, keeper: SampleKeeper, nodes: Mapping[str, Mapping[int, Sequence[int]]], limit_s: float) -> None:
        self._keeper = keeper
        self._nodes = nodes
        self._limit_s = limit_s
        self._awake: dict[str, int] = defaultdict(lambda: ALIGNED)
        self._partly: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def awake(self, node: str) -> int:
        """Return the layout whose engines can generate."""
        return self._awake[node]

    async def hand(self, node: str, layout: int) -> str:
        """Give a node's devices to a layout; "" or why it has them not."""
        async with self._locks[node]:
            before = self._awake[node]
            if before == layout and node not in self._partly:
                return ""
            problem = await self._change(node, before, layout)
            if not problem:
                self._awake[node] = layout
                self._partly.discard(node)
                return ""
            if not (undone := await self._change(node, layout, before)):
                self._partly.discard(node)
                return problem
            self._partly.add(node)
            return f"{problem}; and then {undone}"

    def partly(self, node: str) -> bool:
        """Return whether some engines of the layout that has the devices are without their memory."""
        return node in self._partly

    async def _change(self, node: str, source: int, target: int) -> str:
        problem = "" if source == target else await self._order(node, source, DeviceCalls.sleep_kv)
        return problem or await self._order(node, target, DeviceCalls.wake_kv)

    async def _order(self, node: str, layout: int, method: RemoteMethod[[], None]) -> str:
        engines = [self._keeper.engines[number] for number in self._nodes[node].get(layout, ())]
        asked = (engine.problem(self._limit_s, method) for engine in engines)
        return next(filter(None, await asyncio.gather(*asked)), "")


# An engine answers between two decode steps; a tail engine that is told to load weights when it has loaded them.
ANSWER_SECONDS = 60.0


class TurnHolds:
    """Holds on the turns of one home's engines."""

    def __init__(self, keeper: SampleKeeper, reports: EngineReports) -> None:
        self._keeper = keeper
        self._reports = reports
        self._loading: dict[int, asyncio.Task[None]] = {}
        # Of each node that is held: for which turn, what is set to let it go, and what does.
        self._held: dict[str, tuple[int, asyncio.Future[None], asyncio.Task[None]]] = {}

    def stop(self) -> None:
        """Let all engines go, and order nothing more."""
        for task in self._loading.values():
            task.cancel()
        for node in self._held:
            self.let_go(node)

    def may_go(self, samples: Sequence[KeptSample], tail: Sequence[int]) -> bool:
        """Return whether a node's samples may go to these tail engines together; bring those to their weights."""
        statuses = self._reports.statuses
        versions = {statuses[s.engine].weight_version for s in samples if s.engine in statuses}
        if len(versions) != 1 or len({turn_of(sample) for sample in samples}) != 1:
            return False
        (version,) = versions
        behind = [engine for engine in tail if engine in statuses and statuses[engine].weight_version != version]
        for engine in behind:
            if engine not in self._loading:
                task = self._loading[engine] = asyncio.create_task(self._tell(engine, TurnCalls.take_weights, version))
                task.add_done_callback(functools.partial(self._loading.pop, engine))
        return not behind

    async def hold(self, node: str, samples: Sequence[KeptSample], engines: Sequence[int]) -> bool:
        """Have none of a node's `engines` go on behind the turn of these samples until they have ended; False: one
        already has. True for a node that is held for this turn."""
        turn = turn_of(samples[0])
        if node in self._held:
            return self._held[node][0] == turn
        ordered: list[int] = []
        try:
            agreed = True
            for engine in engines:
                ordered.append(engine)
                agreed = agreed and await self._hold(engine, turn)
        except asyncio.CancelledError:
            await self._release(ordered)
            raise
        if not agreed:
            await self._release(ordered)
            return False
        given_up = asyncio.get_running_loop().create_future()
        # Never cancelled: before its beginning it would let nobody go.
        task = asyncio.create_task(self._until_over(samples, given_up, ordered))
        self._held[node] = turn, given_up, task
        task.add_done_callback(functools.partial(self._held.pop, node))
        return True

    def let_go(self, node: str) -> None:
        """Do not wait for the samples: none of them has moved."""
        if node in self._held and not (given_up := self._held[node][1]).done():
            given_up.set_result(None)

    async def _until_over(
        self, samples: Sequence[KeptSample], given_up: asyncio.Future[None], engines: Sequence[int]
    ) -> None:
        ended: asyncio.Future[Any] = asyncio.ensure_future(asyncio.wait([sample.answer for sample in samples]))
        await asyncio.wait({ended, given_up}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        await self._release(engines)

    async def _release(self, engines: Sequence[int]) -> None:
        for engine in engines:
            await self._tell(engine, TurnCalls.release_turns)

    async def _hold(self, engine: int, turn: int) -> bool:
        """Return whether an engine stays in the turn, or has ended it and begins none; true of one that is gone."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return bool(await self._keeper.engines[engine].call(TurnCalls.hold_turns, turn))
        except EngineLost:
            return True
        except (OrderFailed, TimeoutError):
            return False

    async def _tell(self, engine: int, method: RemoteMethod[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if problem := await self._keeper.engines[engine].problem(ANSWER_SECONDS, method, *args, **kwargs):
            self._reports.tell(f"adaptive tensor parallelism: {problem}")


def turn_of(sample: KeptSample) -> int:
    """Return the number of the turn that a pipelined run's sample belongs to."""
    assert sample.request.group is not None, "a sample of no prompt group in a pipelined run"
    return sample.request.group[0]


CAUSE = "tp_switch"


class TpSwitcher:
    """The switches of one home.

    `record(event)`; `step()`: the training step; `admitted()`: whether all prompts of it have come. `limit_s`: seconds
    that an engine may take to give its KV cache's memory up, or to take it. `holds`: of a pipelined run, whose engines
    have a next turn.
    """

    def __init__(
        self,
        settings: TpSwitchSettings,
        plan: LayoutPlan,
        keeper: SampleKeeper,
        reports: EngineReports,
        mover: Mover,
        record: Callable[[LayoutSwitched], None],
        step: Callable[[], int],
        admitted: Callable[[], bool],
        limit_s: float = 30.0,
        holds: TurnHolds | None = None,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._keeper = keeper
        self._reports = reports
        self._mover = mover
        self._record = record
        self._step = step
        self._admitted = admitted
        self._holds = holds
        # Of each node the engines of its layouts.
        self._nodes: dict[str, dict[int, list[int]]] = {}
        self._node_of: dict[int, str] = {}
        self._devices = None if plan.both_awake else AwakeLayouts(keeper, self._nodes, limit_s)
        self._lengths: dict[str, tuple[int, ...]] = {}
        self._cost = SwitchCost()
        # Of the last decision: tokens and draft tokens of a sample's decode step.
        self._speculation = (1.0, 0.0)
        self._stuck: set[str] = set()
        # Of the look that is going on, by layout.
        self._newest: dict[int, LayoutReports] = {}
        self._switching: dict[str, asyncio.Task[None]] = {}

    def place(self, nodes: Mapping[int, str]) -> None:
        """Note on which node each engine is."""
        self._node_of.update(nodes)
        for number, node in sorted(nodes.items()):
            self._nodes.setdefault(node, {}).setdefault(self._reports.layout(number), []).append(number)

    def know_lengths(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """Replace the known lengths of earlier responses to prompts (`prompt_key`)."""
        self._lengths = {key: tuple(of_prompt) for key, of_prompt in lengths.items()}

    async def first_engines(self, lengths: Sequence[Sequence[int]], samples: int) -> list[int] | None:
        """Return the engine at which each prompt of a step begins, if some nodes begin it with larger engines.

        Only where the KV caches of all layouts are there, no engine has a sample, and the nodes are alike.
        `lengths`: of each prompt's last responses; `samples`: of each prompt.
        """
        if self._settings.rule != BY_HISTORY or self._settings.samples or self._devices or self._holds:
            return None
        if len(self._nodes) < 2:
            return None
        # Nobody has asked the engines since the last sample ended.
        await self._reports.hear()
        self._newest.clear()
        nodes, predictors = list(self._nodes), self._reports.predictors
        layouts = list(range(len(self._plan.sizes)))
        counts = {tuple(len(of_node.get(layout, ())) for layout in layouts) for of_node in self._nodes.values()}
        if len(counts) != 1 or not all(layout in predictors for layout in layouts):
            return None
        both = [(node, layout) for node in nodes for layout in layouts]
        if any(self._samples(*at) for at in both) or not all(self._is_open(*at, ()) for at in both):
            return None
        statuses = {layout: self._reports.fresh(layout) for layout in layouts}
        found = first_layouts(
            len(nodes),
            self._layouts(nodes[0], layouts, self._speculation),
            lengths,
            samples,
            min(status.free_seats for of_layout in statuses.values() for status in of_layout),
            [min(status.free_tokens for status in statuses[layout]) for layout in layouts],
            self._cost.between([self._reports.transfers.get(at) for at in layouts]),
        )
        if found is None:
            return None
        first_of = dict(zip(nodes, found.layouts, strict=True))
        lent = [engine for node, layout in both if layout < first_of[node] for engine in self._nodes[node][layout]]
        # Until the next look, reallocation must not take them for idle.
        self._reports.lent = frozenset(lent)
        await self._tell(lent, DeviceCalls.lend_devices)
        return [self._nodes[nodes[at]][layouts[found.layouts[at]]][engine] for at, engine in found.engine_of]

    def begins_at(self, engine: int) -> int:
        """Return the engine for a sample that was to begin at `engine`, whose devices another layout with samples may
        have.
        """
        node = self._node_of.get(engine)
        if self._devices is None or node is None or self._devices.awake(node) == self._reports.layout(engine):
            return engine
        busy = {number: len(self._keeper.samples(number)) for number in self._nodes[node][self._devices.awake(node)]}
        lives = [number for number in busy if self._keeper.engines[number].alive]
        # Otherwise the devices are about to come back.
        return min(lives, key=lambda number: busy[number]) if lives and any(busy.values()) else engine

    def stop(self) -> None:
        """Order nothing more."""
        for task in self._switching.values():
            task.cancel()
        if self._holds is not None:
            self._holds.stop()

    def look(self) -> None:
        """Begin the switches that the newest reports make worth it, and give devices to who waits for them."""
        self._reports.lent = frozenset(number for node in self._nodes for number in self._lent(node))
        self._newest.clear()
        for node in self._nodes:
            if node in self._switching:
                continue
            if (layout := self._next_turn(node)) is not None:
                self._begin(node, self._hand(node, layout))
            elif self._admitted() and (order := self._worth_it(node)) is not None:
                source, target, samples = order
                self._begin(node, self._switch(node, source, target, samples))

    def _begin(self, node: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._switching[node] = task
        task.add_done_callback(functools.partial(self._over, node))

    def _over(self, node: str, task: asyncio.Task[None]) -> None:
        del self._switching[node]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._reports.tell(f"adaptive tensor parallelism: {type(error).__name__}: {error}")

    def _samples(self, node: str, layout: int) -> list[KeptSample]:
        return [sample for engine in self._nodes[node].get(layout, ()) for sample in self._keeper.samples(engine)]

    def _lent(self, node: str) -> list[int]:
        """Engines without samples, on devices on which a layout of larger engines has some."""
        last = max((layout for layout in self._nodes[node] if self._samples(node, layout)), default=ALIGNED)
        smaller = [engine for layout, of_layout in self._nodes[node].items() if layout < last for engine in of_layout]
        return [engine for engine in smaller if not self._keeper.samples(engine)]

    # --- one KV cache on each device

    def _next_turn(self, node: str) -> int | None:
        """Return the layout that is to have the devices now; None: that which has them."""
        if self._devices is None:
            return None
        awake = self._devices.awake(node)
        waiting = [layout for layout in self._nodes[node] if self._samples(node, layout)]
        wanted = awake if awake in waiting else min(waiting, default=ALIGNED)
        return None if wanted == awake and not self._devices.partly(node) else wanted

    async def _hand(self, node: str, layout: int) -> None:
        assert self._devices is not None
        if problem := await self._devices.hand(node, layout):
            self._reports.tell(f"adaptive tensor parallelism: the devices of node {node} were not handed on: {problem}")

    async def _hand_with(self, node: str, source: int, target: int) -> str:
        """Hand the devices over in a switch, when its samples are stopped; return "" or why the devices stay."""
        assert self._devices is not None
        if any(not sample.moving for sample in self._samples(node, source)):
            return "a sample of the node cannot go along, and would wait without KV cache"
        if problem := await self._devices.hand(node, target):
            self._reports.tell(f"adaptive tensor parallelism: node {node} was not switched: {problem}")
        return problem

    # --- the policy

    def _worth_it(self, node: str) -> tuple[int, int, list[KeptSample]] | None:
        """Return a switch that pays now: from which layout to which, and of which samples."""
        for source in sorted(self._nodes[node]):
            samples = self._samples(node, source)
            going = [sample for sample in samples if sample.name not in self._stuck]
            if not going or any(sample.moving for sample in samples):
                continue
            if self._devices is not None and (source != self._devices.awake(node) or len(going) < len(samples)):
                continue
            target = self._target(node, source, going)
            if target is not None:
                return source, target, going
        return None

    def _target(self, node: str, source: int, samples: Sequence[KeptSample]) -> int | None:
        here = self._reported(source)
        unfinished = [self._unfinished(sample, here.contexts) for sample in samples]
        targets = [
            layout
            for layout in sorted(self._nodes[node])
            if layout > source
            and (self._holds is None or self._holds.may_go(samples, self._nodes[node][layout]))
            and self._is_open(node, layout, [sample.context for sample in unfinished])
        ]
        if self._settings.samples:
            return max(targets, default=None) if len(samples) <= self._settings.samples else None
        predictors = self._reports.predictors
        targets = [layout for layout in targets if layout in predictors]
        if not targets or source not in predictors:
            return None
        self._speculation = here.speculation
        compared = [source, *targets]
        layouts = self._layouts(node, compared, self._speculation)
        longest = self.longest_allowed(samples)
        # All are on one: that is how they were found.
        on = [sample.engine for sample in samples if sample.engine is not None]
        by_history = self._settings.rule == BY_HISTORY
        cost = self._cost.between([self._reports.transfers.get(at) for at in compared])
        order = decide(0, layouts, unfinished, longest, cost, by_history, on)
        return None if order is None else compared[order.target]

    def _layouts(self, node: str, compared: Sequence[int], speculation: tuple[float, float]) -> list[Layout]:
        """Return these layouts of a node; `speculation`: tokens and draft tokens of a sample's decode step."""
        predictors, engines = self._reports.predictors, self._nodes[node]
        return [
            Layout(
                self._plan.sizes[at],
                len(engines[at]),
                predictors[at].step_seconds,
                *speculation,
                predictors[at].seconds_of,
            )
            for at in compared
        ]

    def _reported(self, layout: int) -> LayoutReports:
        """Made once in a look, for all nodes."""
        if layout not in self._newest:
            self._newest[layout] = LayoutReports(self._reports.fresh(layout))
        return self._newest[layout]

    def _is_open(self, node: str, layout: int, contexts: Sequence[int]) -> bool:
        """Return whether all engines of a layout are there, and have room."""
        numbers = self._nodes[node][layout]
        there = self._reported(layout).of(numbers)
        return len(there) == len(numbers) and all(status.open for status in there) and has_room(contexts, there)

    def longest_allowed(self, samples: Sequence[KeptSample]) -> int:
        """Tokens of the longest response that is allowed to any of these samples."""
        return max(sample.request.parameters.max_tokens or 0 for sample in samples)

    def _unfinished(self, sample: KeptSample, contexts: Mapping[str, int]) -> Unfinished:
        prompt = len(sample.request.prompt)
        context = max(contexts.get(sample.place, 0), prompt + sample.known_tokens)
        return Unfinished(context - prompt, context, self._lengths.get(sample.request.history or "", ()))

    # --- the switch

    async def _switch(self, node: str, source: int, target: int, samples: Sequence[KeptSample]) -> None:
        if self._holds is not None and not await self._holds.hold(node, samples, self._nodes[node][ALIGNED]):
            return
        samples = [sample for sample in samples if not sample.answer.done()]
        began = time.monotonic()
        hand = None if self._devices is None else functools.partial(self._hand_with, node, source, target)
        engines = self._nodes[node][target]
        dealt = in_turn([sample.known_tokens for sample in samples], len(engines))
        orders = [(samples[place], engines[engine]) for place, engine in dealt]
        _, ended = await asyncio.gather(
            self._tell(engines, DeviceCalls.begin_switch), self._mover.move_together(orders, CAUSE, hand)
        )
        moved = [record for (sample, _), one in zip(orders, ended, strict=True) if (record := self._moved(sample, one))]
        took = time.monotonic() - began
        await self._tell(engines, DeviceCalls.end_switch)
        if not moved:
            if self._holds is not None and source == ALIGNED:
                self._holds.let_go(node)
            return
        # Others ran on while the first of them were prepared: what is lost is the time without a token.
        lost = max((record.downtime for record in moved if record.downtime is not None), default=None)
        if lost is not None:
            transfers = self._reports.transfers
            contexts = [record.tokens for record in moved]
            self._cost.learn(lost, transfers.get(source), transfers.get(target), contexts)
        emptied = [engine for engine in self._nodes[node][source] if not self._keeper.samples(engine)]
        await self._tell(emptied, DeviceCalls.lend_devices)
        sizes = self._plan.sizes
        step = self._step() if self._holds is None else step_of(turn_of(orders[0][0]))
        self._record(LayoutSwitched(step, node, sizes[source], sizes[target], len(moved), took))

    def _moved(self, sample: KeptSample, ended: MoveRecord | MoveRefused) -> MoveRecord | None:
        """Return the record of a sample that has moved; another one stays where it is, and is not tried again."""
        if isinstance(ended, NotYet):
            # Its engine has other weights since it reported, and a later look asks again.
            return None
        if isinstance(ended, MoveRefused):
            self._reports.tell(f"adaptive tensor parallelism: {ended}")
        elif ended.move.phase in MOVED:
            return ended
        self._stuck.add(sample.name)
        return None

    async def _tell(self, engines: Sequence[int], method: RemoteMethod[[], None]) -> None:
        for engine in engines:
            # Its timeline only: one that is gone has none.
            with contextlib.suppress(EngineLost, OrderFailed):
                await self._keeper.engines[engine].call(method)


def has_room(contexts: Sequence[int], engines: Sequence[EngineStatus]) -> bool:
    """Return whether engines have seats and KV cache for samples of these contexts, dealt in turn, longest first."""
    own: list[list[int]] = [[] for _ in engines]
    for place, engine in in_turn(contexts, len(engines)):
        own[engine].append(contexts[place])
    return all(len(of) <= e.free_seats and sum(of) <= e.free_tokens for of, e in zip(own, engines, strict=True))
