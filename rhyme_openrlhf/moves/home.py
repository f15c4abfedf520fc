"""The home of a run's samples: the actor in which every sample's caller waits while any engine generates it.

Stands where OpenRLHF calls its engines' `generate_responses` (`door`). It sends each prompt to a front, which tokenizes
it and runs the agent or reward call (`front.py`). The front asks for one response at a time, in token ids, and the
keeper has engines generate it. So a sample can move between two tokens, and a round begins where the one before ended.

Invariants:
- A caller gets what its engine's own `generate_responses` would have returned, pickled (`messages.Packed`).
- No user's code runs here, and no tokenizer; outputs are passed on as they came.
- When the call for a prompt ends, also by a failure, none of its samples runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ray

from rhyme_openrlhf.engine.calls import EngineCalls, EnginePort, TurnCalls
from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.engine.port import RayEngine
from rhyme_openrlhf.engine.requests import history_key, visit_of
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.front import PlainFrontActor, RoundRequest, RoundResponse
from rhyme_openrlhf.moves.fronts import FrontLost, Fronts, RayFront
from rhyme_openrlhf.moves.home_watch import HomeWatch
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.scheduling.move import RECOMPUTE, Phase
from rhyme_openrlhf.scheduling.move_costs import MoveCosts
from rhyme_openrlhf.scheduling.turns import step_of
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.events import Event, MoveOutcome, Note, SampleMoved
from rhyme_openrlhf.telemetry.samples import Round

# Instead of the name under which an engine's scheduler would note the drafts of a kept sample.
AT_HOME = "at home"
# An engine continues a sample that was handed over by itself. A call at once would share its processors with the
# sample's first step there.
ASK_AFTER_SECONDS = 0.02
OUTCOMES: Mapping[Phase, MoveOutcome] = {
    Phase.RUNNING: "moved",
    Phase.RECOMPUTED: "recomputed",
    Phase.CANCELLED: "cancelled",
    Phase.LOST: "failed",
}


@dataclass(eq=False)
class _PromptGroup:
    """A prompt that a front answers. `turn`: in a pipelined run, its turn's number and its place in the step.

    `begun`: how many of its samples have asked for their first round; `running`: the tasks of its rounds.
    """

    prompt: str
    turn: tuple[int, int] | None = None
    begun: int = 0
    running: set[asyncio.Task[RoundResponse]] = field(default_factory=set)


class SampleHome:
    """All samples of a run.

    `fronts`: where prompts are answered; `record(event)`: where events go; `plan`: the engines' layouts, None if there
    is one; `node`: where this is, as engines say where they are.
    """

    def __init__(
        self,
        ports: Mapping[int, EnginePort],
        rhyme: RhymeSettings,
        fronts: Fronts,
        record: Any,
        plan: LayoutPlan | None = None,
        node: str = "",
    ) -> None:
        self.rhyme = rhyme
        self._fronts = fronts
        self._record = record
        self._opening = asyncio.Lock()
        self._opened = False
        # By number, those that fronts are answering.
        self._groups: dict[int, _PromptGroup] = {}
        self._calls = itertools.count()
        self._step = 0
        self._traced: frozenset[str] = frozenset()
        spare = [number for number, layout in plan.layouts().items() if layout] if plan is not None else []
        # In a pipelined run the controller has prompt groups of an engine that is gone generated again, as a whole.
        restarts = not rhyme.histopipe.enable
        self._keeper = SampleKeeper(ports, rhyme.move.news_s, self._restarted, restarts, spare)
        self._nodes: dict[int, str] = {}
        self._mover = Mover(
            self._keeper,
            KvBufferStore(),
            self._choose,
            limit_s=rhyme.move.timeout_s,
            record=self._moved,
            ask_after_s=ASK_AFTER_SECONDS,
            nodes=self._nodes,
            here=node,
        )
        # Samples of the step that are still to come.
        self._awaited = 0
        self._watch: HomeWatch | None = None
        if HomeWatch.is_needed(rhyme):
            self._watch = HomeWatch(
                rhyme, plan, self._keeper, self._mover, record, lambda: self._step, lambda: self._awaited <= 0
            )

    @property
    def reports(self) -> EngineReports | None:
        """Reports of the engines; None where nothing moves samples by itself."""
        return None if self._watch is None else self._watch.reports

    async def open(self) -> None:
        """Begin to listen to the engines, unless that is done; needs a running event loop.

        A call that comes meanwhile waits. Raises what an engine or a front raised; a later call then tries again.
        """
        async with self._opening:
            if self._opened:
                return
            await self.start_fronts()
            if self._watch is not None:
                await self._watch.open(self._nodes)
            await self._mover.open()
            self._keeper.start()
            self._opened = True

    async def start_fronts(self) -> None:
        """Have a front on each node that has engines, and wait until they have started. Raises what ended one."""
        await asyncio.gather(*(self._find(number) for number in self._keeper.engines))
        await self._fronts.open(set(self._nodes.values()))

    async def _find(self, number: int) -> None:
        # One that is gone already is on no node.
        with contextlib.suppress(EngineLost):
            self._nodes[number] = await self._keeper.engines[number].call(EngineCalls.node_id)

    def close(self) -> None:
        """Listen no more, and move nothing."""
        self._keeper.stop()
        if self._watch is not None:
            self._watch.close()

    def begin_step(self, step: int, samples: int = 0, lengths: Mapping[str, Sequence[int]] | None = None) -> None:
        """Begin training step `step`, in which `samples` more samples come.

        `lengths`: how long prompts (`prompt_key`) were answered before; None: as was said last.
        """
        self._step = step
        self._awaited += samples
        if lengths is not None and self._watch is not None and self._watch.switcher is not None:
            self._watch.switcher.know_lengths(lengths)

    async def first_engines(self, lengths: Sequence[Sequence[int]], samples: int) -> list[int] | None:
        """Return the engine of each prompt of a step that is about to begin; None: OpenRLHF or dispatch chooses.

        `lengths`: of each prompt's last responses; `samples`: of each prompt.
        """
        if self._watch is None or self._watch.switcher is None:
            return None
        return await self._watch.switcher.first_engines(lengths, samples)

    def trace_prompts(self, keys: list[str]) -> None:
        """Keep the responses to these prompts (`prompt_key`) from now on, and to no others."""
        self._traced = frozenset(keys)

    def unfinished(self, engine: int) -> int:
        """Return the number of samples that are at an engine."""
        return len(self._keeper.samples(engine))

    def running(self, engine: int) -> dict[int, int]:
        """Return the samples at an engine by number, with the known tokens of each, prompt included."""
        return {int(s.name): len(s.request.prompt) + s.known_tokens for s in self._keeper.samples(engine)}

    async def move(self, sample: int, destination: int, cause: str) -> MoveOutcome:
        """Move a sample by its number. Raises MoveRefused, or KeyError for a sample that has ended."""
        return OUTCOMES[(await self._mover.move(self._keeper.sample(str(sample)), destination, cause)).move.phase]

    # --- prompts

    async def generate_in_turn(self, engine: int, number: int, place: int, **arguments: Any) -> list[Any]:
        """`generate_responses` of prompt `place` of a step, once the engine's turn `number` has begun.

        Raises EngineLost if an engine that had one of the samples is gone, or the front that answered the prompt.
        """
        samples = arguments["num_samples"]
        port = self._keeper.engines[engine]
        await port.call(TurnCalls.enter_turn, number, place, samples)
        self._awaited -= samples
        group = _PromptGroup(arguments["prompt"], (number, place))
        try:
            return await self._answered(group, engine, arguments)
        except FrontLost as lost:
            # Its turn may be over by now: the controller has it generated again, in the turn that may have it.
            raise EngineLost(str(lost)) from lost
        finally:
            if group.begun < samples:
                with contextlib.suppress(EngineLost):
                    await port.call(TurnCalls.leave_turn, number, place, samples - group.begun)

    async def generate_responses(self, engine: int, **arguments: Any) -> list[Any]:
        """Return the responses to one prompt, as an engine's method of this name; they begin at `engine`."""
        self._awaited -= arguments["num_samples"]
        while True:
            # Fronts bound how often: one that is gone is asked no more.
            with contextlib.suppress(FrontLost):
                return await self._answered(_PromptGroup(arguments["prompt"]), engine, arguments)

    async def _answered(self, group: _PromptGroup, engine: int, arguments: dict[str, Any]) -> list[Any]:
        """Return a front's responses to a prompt; when the call ends, its samples end with it."""
        number = next(self._calls)
        self._groups[number] = group
        try:
            return await self._fronts.generate_responses(self._nodes.get(engine, ""), number, engine, **arguments)
        finally:
            del self._groups[number]
            for round_ in group.running:
                round_.cancel()

    async def respond(self, call: int, asked: RoundRequest) -> RoundResponse:
        """Return one response of a prompt group, which a front answers as number `call`.

        Raises what the engine raised for this request, and EngineLost when no engine is left to answer it, or nobody
        waits for this prompt group any more.
        """
        over = EngineLost(f"nobody waits for prompt group {call} any more")
        group = self._groups.get(call)
        if group is None:
            raise over
        task = asyncio.create_task(self._respond(group, asked))
        group.running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            group.running.discard(task)
        if task.cancelled():
            raise over
        return task.result()

    async def _respond(self, group: _PromptGroup, asked: RoundRequest) -> RoundResponse:
        group.begun += asked.round == 0
        begins = asked.engine
        if self._watch is not None and self._watch.switcher is not None:
            begins = self._watch.switcher.begins_at(begins)
        noted = Round(begins, 0, len(asked.tokens))
        if prompt_key(group.prompt) in self._traced:
            # Kept; but what was drafted of it is on several engines, and nobody asks them.
            noted.trace = AT_HOME
        history = history_key(group.prompt, visit_of(group.prompt)) if self.rhyme.histospec.enable else None
        request = SampleRequest(asked.tokens, asked.parameters, history, asked.round, asked.multi_modal, group.turn)

        def begun(engine: int, version: int) -> None:
            noted.engine, noted.weight_version = engine, version

        output, last = await self._keeper.generate(request, begins, begun)
        # In a turn, the output says what was loaded below its sample.
        version = None if group.turn is not None else self._keeper.engines[last].weight_version
        return RoundResponse(output, noted, last, version)

    # --- what is recorded

    def _choose(self, context: int, source: int, destination: int) -> Choice:
        known, costs = None, MoveCosts()
        if self.reports is not None:
            near = self._nodes.get(source) == self._nodes.get(destination)
            known, costs = self.reports.destination(destination, context, near), self.reports.costs
        return Choice(*costs.choose(self.rhyme.move.carrier, context, known), known)

    def _moved(self, done: MoveRecord) -> None:
        move, known = done.move, done.choice.destination
        if self.reports is not None and known is not None and done.downtime and move.phase is Phase.RUNNING:
            self.reports.costs.learn(move.carrier, done.tokens, known, done.downtime)
        self._record(
            SampleMoved(
                self._step if done.group is None else step_of(done.group[0]),
                move.sample,
                move.source,
                move.destination,
                done.cause,  # type: ignore[arg-type]
                move.carrier,  # type: ignore[arg-type]
                OUTCOMES[move.phase],
                done.seconds,
                done.tokens,
                done.downtime,
                done.choice.predicted,
            )
        )

    def _restarted(self, sample: KeptSample, lost: int, new: int) -> None:
        tokens = len(sample.request.prompt) + sample.known_tokens
        event: Event = SampleMoved(
            self._step, sample.name, lost, new, "engine_lost", RECOMPUTE, "recomputed", 0.0, tokens
        )
        self._record(event)


SOURCE = "home"
# One call for each prompt waits in it at the same time; Ray's own limit would be 1000.
CALLS_AT_ONCE = 1_000_000


class PlainHomeActor(SampleHome):
    """`engines`: handles of engine actors; `recorder`: the run's, which is told without waiting.

    `more`: the seed, agent, reward and tokenizer of `Front`, the last as a reference in a list, which Ray leaves alone.
    """

    def __init__(
        self,
        engines: list[Any],
        rhyme: RhymeSettings,
        run_seed: int,
        agent: str | None,
        reward: Any,
        tokenizer: list[Any],
        recorder: Any,
        plan: LayoutPlan | None = None,
    ) -> None:
        ports = {number: RayEngine(number, handle) for number, handle in enumerate(engines)}
        context = ray.get_runtime_context()

        def record(event: Event) -> None:
            recorder.write.remote(event, SOURCE, time.time())

        def front(node: str) -> RayFront:
            return RayFront(node, FrontActor, context.current_actor, rhyme, run_seed, agent, reward, *tokenizer)

        fronts = Fronts(front, lambda sentence: record(Note("warning", sentence)))
        super().__init__(ports, rhyme, fronts, record, plan, context.get_node_id())


# On the caller's node, and not counted: it waits for engines and fronts.
HomeActor = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(PlainHomeActor)
FrontActor = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(PlainFrontActor)


def door(home: Any, engine: int) -> Any:
    """Return the part of an engine's handle that OpenRLHF's dispatch uses; behind it is the home."""

    def generate_responses(**arguments: Any) -> Any:
        return home.generate_responses.remote(engine, **arguments)

    def unfinished() -> Any:
        return home.unfinished.remote(engine)

    return SimpleNamespace(
        generate_responses=SimpleNamespace(remote=generate_responses),
        get_num_unfinished_requests=SimpleNamespace(remote=unfinished),
    )
