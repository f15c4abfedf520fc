"""The home of a run's samples: the actor in which every sample's caller waits while any engine generates it.

Stands where OpenRLHF calls its engines' `generate_responses` (`door`). What surrounds a sample (its agent or reward
call, its identity, the rounds of a conversation) runs here, and asks engines for one response at a time through the
keeper. So a sample can move between two tokens, and a round begins where the round before ended.

Invariant: a caller gets what its engine's own `generate_responses` would have returned. The one exception is notes on
drafts of kept samples, which are not made because they would be on several engines.
"""

from __future__ import annotations

import asyncio
import contextlib

import openrlhf.trainer.ray.vllm_engine as upstream  # isort: skip
import time

import ray  # isort: skip
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.engine.calls import EngineCalls, EnginePort, TurnCalls
from rhyme_openrlhf.engine.checked_agent import CheckedAgent
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, check_response
from rhyme_openrlhf.engine.messages import LOADS, SampleRequest
from rhyme_openrlhf.engine.port import RayEngine
from rhyme_openrlhf.engine.requests import (  # first: installs the shims where needed
    SampleIdentity,
    current_sample,
    history_key,
    leave_out_unread,
    request_seed,
    visit_of,
)
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.home_watch import HomeWatch
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Convoy, Mover, MoveRecord
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.scheduling.move import RECOMPUTE, Phase
from rhyme_openrlhf.scheduling.move_costs import MoveCosts
from rhyme_openrlhf.scheduling.turns import step_of
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.events import Event, MoveOutcome, SampleMoved
from rhyme_openrlhf.telemetry.samples import ROUNDS, Round


@dataclass(frozen=True)
class _InTurn:
    """The running task's turn number, place of its prompt, and weights of the turn, in a pipelined run."""

    group: tuple[int, int]
    weight_version: int


_in_turn: ContextVar[_InTurn | None] = ContextVar("in_turn", default=None)
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


class SampleHome:
    """All samples of a run.

    `record(event)`: where events go. `agent`, `reward`: OpenRLHF's --train.agent_func_path and --reward.remote_url.
    `plan`: the engines' layouts, None if there is one. `node`: where this is, as engines say where they are.
    """

    def __init__(
        self,
        ports: Mapping[int, EnginePort],
        rhyme: RhymeSettings,
        run_seed: int,
        agent: str | None,
        reward: Any,
        record: Any,
        plan: LayoutPlan | None = None,
        node: str = "",
    ) -> None:
        self.rhyme = rhyme
        self._run_seed = run_seed
        self._record = record
        self._step = 0
        self._traced: frozenset[str] = frozenset()
        if agent:
            self.executor: Any = CheckedAgent(upstream._load_agent_executor(agent), agent)
        else:
            self.executor = CheckedExecutor(reward, rhyme.limits.reward_s)
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
                rhyme, plan, self._keeper, self._carry, record, lambda: self._step, lambda: self._awaited <= 0
            )

    @property
    def reports(self) -> EngineReports | None:
        """Reports of the engines; None where nothing moves samples by itself."""
        return None if self._watch is None else self._watch.reports

    async def open(self) -> None:
        """Begin to listen to the engines, unless that is done; needs a running event loop."""
        if self._nodes:
            return
        for number, engine in self._keeper.engines.items():
            # One that is gone already is on no node.
            with contextlib.suppress(EngineLost):
                self._nodes[number] = await engine.port.call(EngineCalls.node_id)
        self._keeper.start()
        await self._mover.open()
        if self._watch is not None:
            await self._watch.open(self._nodes)

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
        return OUTCOMES[(await self._carry(sample, destination, cause)).move.phase]

    async def _carry(self, sample: int, destination: int, cause: str, convoy: Convoy | None = None) -> MoveRecord:
        return await self._mover.move(self._keeper.sample(str(sample)), destination, cause, convoy=convoy)

    async def generate_in_turn(self, engine: int, number: int, place: int, **arguments: Any) -> list[dict[str, Any]]:
        """`generate_responses` of prompt `place` of a step, once the engine's turn `number` has begun.

        Raises EngineLost if an engine that had one of the samples is gone.
        """
        port = self._keeper.engines[engine].port
        # The engine's last news may be from before it had these weights.
        version = await port.call(TurnCalls.enter_turn, number, place, arguments["num_samples"])
        _in_turn.set(_InTurn((number, place), version))
        return await self.generate_responses(engine, **arguments)

    async def generate_responses(
        self,
        engine: int,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """Return the responses to one prompt, as an engine's method of this name; they begin at `engine`."""
        visit = visit_of(prompt)
        prompt = str(prompt)

        async def one(sample: int) -> dict[str, Any]:
            identity = SampleIdentity(prompt, visit, sample)
            current_sample.set(identity)
            response: dict[str, Any] = await self.executor.execute(
                prompt=prompt,
                label=label,
                sampling_params=sampling_params,
                max_length=max_length,
                hf_tokenizer=hf_tokenizer,
                llm_engine=_Conversation(self, engine, identity),
                images=images,
            )
            check_response(response)
            response[ROUNDS] = identity.rounds
            return response

        self._awaited -= num_samples
        # gather() runs each coroutine in a task with its own copy of the context.
        return list(await asyncio.gather(*(one(sample) for sample in range(num_samples))))

    async def respond(
        self, identity: SampleIdentity, engine: int, tokens: list[int], parameters: Any, multi_modal: Any
    ) -> tuple[Any, int]:
        """vLLM's output for one round that begins at `engine`, and the engine at which it ended."""
        if self._watch is not None and self._watch.switcher is not None:
            engine = self._watch.switcher.begins_at(engine)
        parameters = parameters.clone()
        if type(self.executor) is CheckedExecutor:
            leave_out_unread(parameters)
        if self.rhyme.run.reproducible:
            parameters.seed = request_seed(self._run_seed, identity, len(tokens))
        of = _in_turn.get()
        version = self._keeper.engines[engine].weight_version if of is None else of.weight_version
        noted = Round(engine, version, len(tokens))
        key = prompt_key(identity.prompt)
        if key in self._traced:
            # Kept; but what was drafted of it is on several engines, and nobody asks them.
            noted.trace = AT_HOME
        history = history_key(identity.prompt, identity.visit) if self.rhyme.histospec.enable else None
        group = None if of is None else of.group
        request = SampleRequest(tuple(tokens), parameters, history, len(identity.rounds), multi_modal, group)
        identity.rounds.append(noted)
        output, last = await self._keeper.generate(request, engine)
        if of is None:
            noted.end(self._keeper.engines[last].weight_version, output.outputs[0])
        else:
            # The engine may have gone on to its next turn by now; what was loaded below the sample is noted.
            noted.loads = getattr(output, LOADS, [])
            noted.end(noted.loads[-1][0] if noted.loads else noted.weight_version, output.outputs[0])
        return output, last

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


class _Conversation:
    """A stand-in for an executor's engine: each round begins where the one before ended."""

    def __init__(self, home: SampleHome, engine: int, identity: SampleIdentity) -> None:
        self._home = home
        self._engine = engine
        self._identity = identity

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Return one response, as OpenRLHF's engine actor gives it."""
        output, self._engine = await self._home.respond(
            self._identity, self._engine, prompt_token_ids, sampling_params, multi_modal_data
        )
        return output


SOURCE = "home"
# One call for each prompt waits in it at the same time; Ray's own limit would be 1000.
CALLS_AT_ONCE = 1_000_000


class PlainHomeActor(SampleHome):
    """`engines`: handles of engine actors; `recorder`: the run's, which is told without waiting."""

    def __init__(
        self,
        engines: list[Any],
        rhyme: RhymeSettings,
        run_seed: int,
        agent: str | None,
        reward: Any,
        recorder: Any,
        plan: LayoutPlan | None = None,
    ) -> None:
        ports = {number: RayEngine(number, handle) for number, handle in enumerate(engines)}

        def record(event: Event) -> None:
            recorder.write.remote(event, SOURCE, time.time())

        node = ray.get_runtime_context().get_node_id()
        super().__init__(ports, rhyme, run_seed, agent, reward, record, plan, node)


# On the caller's node, and not counted: it waits for engines and reward functions.
HomeActor = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(PlainHomeActor)


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
