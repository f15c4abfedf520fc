"""The engine of the streaming pipeline: it has its turns ahead of time and goes from one to the next by itself.

Prompts come before their turn and wait here, in the engine's actor, not in vLLM. Which turn begins and which weights
are loaded before it is decided by `scheduling/turns.py`. RhymeRL 4.2 (worker-controlled weight updates) and figure 10.

Invariants: as `RhymeRolloutActor`'s; a turn's samples are all generated with one weight version, but for deferred ones,
which hold up no turn and go on through loads (each is noted with the tokens until then); a turn is over when its last
sample needs the engine no more, so rewards do not hold it up (an agent may come back for another turn of its
conversation: there it is over when its calls are); what goes wrong between two turns fails the calls that wait.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rhyme_openrlhf.engine.actor import RhymeRolloutActor, WeightLoadError  # first: installs the shims where needed
from rhyme_openrlhf.engine.actor_parts.caused_timeline import CausedTimeline
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, RewardLateError
from rhyme_openrlhf.engine.messages import Loaded, RunningSamples, TurnReport
from rhyme_openrlhf.engine.seeding import current_sample
from rhyme_openrlhf.scheduling.turns import AwaitWeights, Begin, EngineTurns, Load, Turn
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import Round
from rhyme_openrlhf.weights.buckets import Segment


@dataclass(eq=False)
class TurnCall:
    """The call of prompt `place` of a step: samples of turn `number` that still need the engine; `idle` once none does.

    `deferred`: the turn does not wait for it.
    """

    number: int
    place: int
    left: int
    deferred: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)


# The call that the running task belongs to.
_current: ContextVar[TurnCall | None] = ContextVar("pipeline_call", default=None)


class PipelineEngine(RhymeRolloutActor):
    """One vLLM engine of a pipelined run."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self._turns = EngineTurns()
        self._segments: dict[int, Segment] = {}
        self._loads: dict[int, asyncio.Future[Loaded | None]] = {}
        self._scored: dict[int, list[int]] = {}
        self._begun: dict[int, asyncio.Future[None]] = {}
        self._reports: dict[int, asyncio.Future[TurnReport]] = {}
        self._to_trace: dict[int, frozenset[str]] = {}
        self._before_turn = EngineCounters()
        self._reported_turn = True
        self._last_turn = False
        # Of each running request: its call and what is noted of it.
        self._samples: dict[str, tuple[TurnCall, Round]] = {}
        self._calls: set[TurnCall] = set()
        self._going_on: asyncio.Task[None] | None = None
        self._held = False
        await super().__init__(*args, **kwargs)
        self._timeline: CausedTimeline = CausedTimeline(time.time())

    # --- what the controller tells

    async def hand_turn(self, turn: Turn, samples: int | None, traced: list[str]) -> None:
        """A turn to come, of so many samples (None: until `close_turn`); their calls are sent when this has returned.

        Of the samples of the `traced` prompts (`prompt_key`) it is noted what was drafted.
        """
        self._turns.hand(turn, samples)
        self._expect(turn, traced)
        self._advance()

    def _expect(self, turn: Turn, traced: list[str]) -> None:
        loop = asyncio.get_running_loop()
        self._to_trace[turn.number] = frozenset(traced)
        self._begun[turn.number] = loop.create_future()
        self._reports[turn.number] = loop.create_future()

    async def extend_turn(self, turn: Turn, samples: int, traced: list[str]) -> tuple[int, bool]:
        """More samples of a training step than were handed, because they could not be generated elsewhere, or not as
        they should. As `EngineTurns.extend`: number of the turn their calls are to be sent for, and whether it is new.
        """
        number, new = self._turns.extend(turn, samples)
        if new:
            self._expect(turn, traced)
        self._advance()
        return number, new

    async def close_turn(self, number: int) -> None:
        """All prompts of a turn have been answered of which it was not known how many there would be."""
        self._turns.close(number)
        self._advance()

    async def no_more_turns(self) -> None:
        """The last turn of the run has been handed: from its end on the engine only waits for others."""
        self._last_turn = True
        self._advance()

    async def begin_rollout(self) -> None:
        """The first rollout begins: what was done before (a weight check, step times) is none of it."""
        await super().begin_rollout()
        self._before_turn = self._reported

    async def running_samples(self) -> RunningSamples:
        """What runs now."""
        lengths = await self._lengths()
        current = self._turns.current
        found = [(call.number, call.place, lengths.get(name, 0), -1) for name, (call, _) in self._samples.items()]
        return RunningSamples(-1 if current is None else current.number, found, self.weight_version)

    async def _lengths(self) -> dict[str, int]:
        """Response tokens so far of each running request."""
        states = self.llm.output_processor.request_states
        lengths = await self.call_scheduler("output_lengths")
        return {str(states[name].external_req_id): tokens for name, tokens in lengths.items() if name in states}

    async def defer(self, number: int, place: int) -> None:
        """Turn `number` is not to wait for the samples of prompt `place` any more; they go on."""
        for call in self._calls:
            if (call.number, call.place) == (number, place) and not call.deferred:
                call.deferred = True
                self._turns.ended(number, call.left)
        self._advance()

    async def generate_in_turn(self, number: int, place: int, **arguments: Any) -> list[dict[str, Any]]:
        """`generate_responses(**arguments)`, once turn `number` has begun. Raises what a sample raised.

        When a reward came late, then only after the other samples have ended too: weights must not load below them.
        """
        call = TurnCall(number, place, arguments["num_samples"])
        self._calls.add(call)
        try:
            await self._until_begun(call)
            _current.set(call)
            return await self.generate_responses(**arguments)
        except RewardLateError:
            await call.idle.wait()
            raise
        finally:
            self._calls.discard(call)
            self._ended_in_turn(call, call.left)

    async def _until_begun(self, call: TurnCall) -> None:
        self._turns.add(call.number, call.left)
        # A turn that was extended when it was over has been reported.
        if call.number in self._begun:
            await asyncio.shield(self._begun[call.number])

    async def turn_report(self, number: int) -> TurnReport:
        """What the engine did in a turn; waits until the turn is over."""
        report = await asyncio.shield(self._reports[number])
        del self._reports[number]
        return report

    def stage_intervals(self, start: float, end: float) -> list[Any]:
        """The engine's timeline (`TimelineInterval`s) up to `end`, as far as it was not asked for before."""
        return self._timeline.take(start, end)

    # --- what the trainer tells

    async def offer_weights(self, segment: Segment, score: list[int]) -> Loaded | None:
        """Weights that may be loaded from now on. Returns when they are loaded; None if newer ones were instead.

        With `score`, the log-probabilities of these tokens are asked for before and after.
        """
        version = segment.version
        loaded = self._loads[version] = asyncio.get_running_loop().create_future()
        self._segments[version] = segment
        if score:
            self._scored[version] = score
        self._turns.offer(version)
        self._advance()
        return await asyncio.shield(loaded)

    # --- from turn to turn

    def _advance(self) -> None:
        if self._going_on is None or self._going_on.done():
            self._going_on = asyncio.create_task(self._go_on())
            self._going_on.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for the task itself: those who wait for a turn or for weights hear what it failed with."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        everybody: list[asyncio.Future[Any]] = [*self._begun.values(), *self._reports.values(), *self._loads.values()]
        for waiting in everybody:
            if not waiting.done():
                waiting.set_exception(error)

    async def _go_on(self) -> None:
        while True:
            if self._turns.over and not self._reported_turn:
                await self._report_turn()
            if self._held:
                return
            match self._turns.next():
                case Load(version):
                    await self._load(version)
                case Begin(turn):
                    self._begin(turn)
                case AwaitWeights():
                    self._timeline.because("weights", time.time())
                    return
                case None:
                    if self._turns.over and self._last_turn:
                        self._timeline.because("tail", time.time())
                    return

    def _begin(self, turn: Turn) -> None:
        self._turns.begun(turn)
        self._reported_turn = False
        self._traced = self._to_trace.pop(turn.number)
        self._begun[turn.number].set_result(None)

    async def _report_turn(self) -> None:
        """The current turn has ended: note what was done in it, before anything else is."""
        turn = self._turns.current
        assert turn is not None
        self._reported_turn = True
        self._timeline.because("weights", time.time())
        report = await self.report_since()
        del self._begun[turn.number]
        self._reports[turn.number].set_result(report)

    async def report_since(self) -> TurnReport:
        """What the engine did since it reported last."""
        totals, decisions, gain, sentences = await asyncio.gather(
            self._totals(),
            self._planning("take_decisions", {}),
            self._planning("read_gain", {}),
            self._planning("take_sentences", []),
        )
        counters, self._before_turn = totals - self._before_turn, totals
        problems = [*self._history.take_problems(), *sentences]
        return TurnReport(self.weight_version, counters, decisions, gain, problems)

    async def _load(self, version: int) -> None:
        tokens, replaced = self._scored.pop(version, None), self.weight_version
        before = await self.score(tokens) if tokens else None
        limit = self.rhyme.weights.timeout_s
        try:
            async with asyncio.timeout(limit):
                seconds = await self._load_below_deferred(version)
        except TimeoutError:
            raise WeightLoadError(
                f"engine {self.index} did not load weight version {version} within {limit:g} s (--weights.timeout_s)"
            ) from None
        self._turns.loaded(version)
        after = await self.score(tokens) if tokens else None
        for other in [known for known in self._loads if known <= version]:
            done = self._loads.pop(other)
            done.set_result(Loaded(seconds, replaced, before, after) if other == version else None)
            del self._segments[other]

    async def _load_below_deferred(self, version: int) -> float:
        if not self._running:
            return await self.load_weights(self._segments[version])
        await self.pause_generation()
        try:
            seconds = await self.load_weights(self._segments[version])
            for name, tokens in (await self._lengths()).items():
                self._note_load(name, version, tokens)
        finally:
            await self.resume_generation()
        return seconds

    def _note_load(self, request_id: str, version: int, tokens: int) -> None:
        """Weights were loaded when a sample had so many tokens."""
        if request_id in self._samples:
            self._samples[request_id][1].loads.append((version, tokens))

    # --- samples

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """One request, as the engine's own method; in a single-turn task its sample then needs the engine no more."""
        try:
            return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        finally:
            call = _current.get()
            if call is not None and type(self.executor) is CheckedExecutor:
                call.left -= 1
                self._ended_in_turn(call, 1)
                if call.left == 0:
                    call.idle.set()

    def _started(self, request_id: str) -> None:
        super()._started(request_id)
        call, identity = _current.get(), current_sample.get()
        if call is not None and identity is not None:
            self._samples[request_id] = (call, identity.rounds[-1])
        # Inside of a turn an engine is idle when an agent's samples are all elsewhere.
        self._timeline.because("tail", time.time())

    def _ended(self, request_id: str) -> None:
        self._samples.pop(request_id, None)
        super()._ended(request_id)

    def _ended_in_turn(self, call: TurnCall, samples: int) -> None:
        if samples and not call.deferred:
            self._turns.ended(call.number, samples)
            self._advance()
