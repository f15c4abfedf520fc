"""An engine's turns in the streaming pipeline: it has them ahead of time and goes from one to the next by itself.

Prompts come before their turn and wait here, in the engine's actor, not in vLLM. `scheduling/turns.py` decides which
turn begins and which weights are loaded before it. RhymeRL 4.2 (worker-controlled weight updates) and figure 10. Where
samples can move, their callers wait in the samples' home, and the part that has the samples reports each stay here
(`SampleStays`).

Invariants:
- A turn's samples are all generated with one weight version. The exception is deferred samples, which hold up no turn
  and go on through loads; each load is noted with the tokens until then.
- A turn is over when its last sample needs the engine no more, so rewards do not hold it up. A turn of agents is over
  when their calls are, because an agent may come back for another round of its conversation.
- A sample from another engine holds up the turn that it joined, unless it is deferred, so no weights load under it. A
  sample that left holds up none.
- An engine of a tail layout has no turns: it loads weights on order, and only while it has no sample.
- A failure between two turns fails the calls that wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine.actor_parts.part import Engine, Part
from rhyme_openrlhf.engine.actor_parts.timeline import ELSEWHERE, CausedTimeline
from rhyme_openrlhf.engine.calls import SchedulerMeter, SchedulerMoves
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, RewardLateError
from rhyme_openrlhf.engine.messages import Loaded, RunningSamples, TurnReport
from rhyme_openrlhf.engine.requests import current_sample
from rhyme_openrlhf.engine_errors import EngineCoreError, WeightLoadError
from rhyme_openrlhf.scheduling.turns import AwaitWeights, Begin, EngineTurns, Load, Turn
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import Round
from rhyme_openrlhf.weights.buckets import Segment

# For how many numbers of turns an engine's answers can be asked for once more.
KEPT_TURNS = 8
# A step's turn, and the place of a prompt in that step.
Group = tuple[int, int]


@dataclass(eq=False)
class TurnCall:
    """The call of prompt `place` of a step: samples of turn `number` that still need the engine; `idle` once none does.

    `deferred`: the turn does not wait for it. `given_up`: no more of its samples come.
    """

    number: int
    place: int
    left: int
    deferred: bool = False
    given_up: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)


# The call that the running task belongs to.
_current: ContextVar[TurnCall | None] = ContextVar("pipeline_call", default=None)


class Turns(Part):
    """The turns of one engine of a pipelined run."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._turns = EngineTurns()
        self._segments: dict[int, Segment] = {}
        self._loads: dict[int, asyncio.Future[Loaded | None]] = {}
        self._scored: dict[int, list[int]] = {}
        self._begun: dict[int, asyncio.Future[None]] = {}
        self._reports: dict[int, asyncio.Future[TurnReport]] = {}
        # Of each prompt that was added to a step's turn, by that turn, place and attempt: the turn that it got into.
        self._extended: dict[tuple[int, int, int], int] = {}
        self._to_trace: dict[int, frozenset[str]] = {}
        self._before_turn = EngineCounters()
        self._reported_turn = True
        self._last_turn = False
        # Of each running request: its call and what is noted of it.
        self._samples: dict[str, tuple[TurnCall, Round]] = {}
        self._calls: set[TurnCall] = set()
        self._going_on: asyncio.Task[None] | None = None
        self._held = False
        # Where samples can move. By prompt group: the call that began here. By place: the call of each sample that is
        # here, and its group.
        self._entered: dict[Group, TurnCall] = {}
        self._stays: dict[str, tuple[TurnCall, Group]] = {}
        self._loads_below: dict[str, list[tuple[int, int]]] = {}
        self._deferred: set[Group] = set()
        self._tail = False
        self._taking = asyncio.Lock()

    async def has_started(self) -> None:
        """Begin to note time with causes of its own."""
        self.engine.timeline = CausedTimeline(time.time())

    # --- what the controller tells

    async def hand_turn(self, turn: Turn, samples: int | None, traced: list[str]) -> None:
        """Append a turn of `samples` samples (None: until `close_turn`), as `extend_turn` does with whole prompts."""
        self._turns.hand(turn, samples)
        self._expect(turn, traced)
        self._advance()

    def _expect(self, turn: Turn, traced: list[str]) -> None:
        loop = asyncio.get_running_loop()
        self._to_trace[turn.number] = frozenset(traced)
        self._begun[turn.number] = loop.create_future()
        self._reports[turn.number] = loop.create_future()

    async def extend_turn(self, turn: Turn, prompts: Sequence[tuple[int, int]], samples: int, traced: list[str]) -> int:
        """Add prompts of a training step, `samples` samples each; their calls are sent when this has returned.

        Each prompt is given by its place in the step and the number of the attempt to generate it; what is known is not
        added again. The drafts of samples of the `traced` prompts (`prompt_key`) are noted. Return the number of the
        turn for which the calls are to be sent (`EngineTurns.extend`).
        """
        keys = [(turn.number, *prompt) for prompt in prompts]
        if new := [key for key in keys if key not in self._extended]:
            number, is_new = self._turns.extend(turn, len(new) * samples)
            self._extended.update(dict.fromkeys(new, number))
            if is_new:
                self._expect(turn, traced)
            self._advance()
        return self._extended[keys[-1]]

    async def close_turn(self, number: int) -> None:
        """Close a turn of open size: all its prompts have been answered."""
        self._turns.close(number)
        self._advance()

    async def no_more_turns(self) -> None:
        """Note that the run's last turn has been handed: after it the engine only waits for others."""
        self._last_turn = True
        self._advance()

    def rollout_begun(self) -> None:
        """Begin the first rollout: what was done before (a weight check, step times) is none of it."""
        self._before_turn = self.engine.counted

    async def running_samples(self) -> RunningSamples:
        """Return what runs now."""
        lengths = await self._lengths()
        found = [(call.number, call.place, lengths.get(name, 0), -1) for name, (call, _) in self._samples.items()]
        free_tokens = 0
        if self.engine.rhyme.samples_move:
            free_tokens = (await self.engine.scheduler(SchedulerMoves.status))["free_tokens"]
            found += [
                (turn, place, lengths.get(name, 0), int(name.partition(".")[0]))
                for name, (_, (turn, place)) in self._stays.items()
            ]
        current = self._turns.current
        number = -1 if current is None else current.number
        return RunningSamples(number, found, self.engine.weight_version, free_tokens)

    async def _lengths(self) -> dict[str, int]:
        """Response tokens so far of each running request."""
        states = self.engine.llm.output_processor.request_states
        lengths = await self.engine.scheduler(SchedulerMeter.output_lengths)
        return {str(states[name].external_req_id): tokens for name, tokens in lengths.items() if name in states}

    async def defer(self, number: int, place: int) -> None:
        """Let turn `number` wait no more for the samples of prompt `place`, here or to come; they go on."""
        self._deferred.add((number, place))
        for call, group in self._stays.values():
            if group == (number, place) and call not in self._calls and not call.deferred:
                call.deferred = True
                self._turns.ended(call.number, call.left)
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
            return await self.engine.generate_responses(**arguments)
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
        """Return what the engine did in a turn; wait until the turn is over. Safe to ask twice."""
        return await asyncio.shield(self._reports[number])

    def stage_intervals(self, start: float, end: float) -> list[Any]:
        """Return the engine's timeline (`TimelineInterval`s) up to `end`, from where the last call stopped."""
        return self.engine.timeline.take(start, end)

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
        if self._tail:
            # Nobody moves to weights that are older than the two newest, and a node keeps no more.
            self._forget_weights(version - 2)
        self._advance()
        return await asyncio.shield(loaded)

    # --- from turn to turn

    def _advance(self) -> None:
        if self._going_on is None or self._going_on.done():
            self._going_on = asyncio.create_task(self._go_on())
            self._going_on.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Pass the failure of the task, which nobody awaits, to the calls that wait for a turn or for weights."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, EngineDeadError):
            error = EngineCoreError(self.engine.core_died)
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
                    await self._load(version, partial(self._is_next, Load(version)))
                case Begin(turn):
                    self._begin(turn)
                case AwaitWeights():
                    self.engine.timeline.because("weights", time.time())
                    return
                case None:
                    if self._turns.over and self._last_turn:
                        self.engine.timeline.because("tail", time.time())
                    return

    def _is_next(self, load: Load) -> bool:
        return self._turns.next() == load

    def _begin(self, turn: Turn) -> None:
        self._turns.begun(turn)
        self._reported_turn = False
        self.engine.traced = self._to_trace.pop(turn.number)
        self._begun[turn.number].set_result(None)

    async def _report_turn(self) -> None:
        """Note what was done in the current turn, which has ended, before anything else is done."""
        turn = self._turns.current
        assert turn is not None
        self._reported_turn = True
        self.engine.timeline.because("weights", time.time())
        report = await self.report_since()
        del self._begun[turn.number]
        self._reports[turn.number].set_result(report)
        oldest = turn.number - KEPT_TURNS
        self._reports = {number: one for number, one in self._reports.items() if number > oldest}
        self._extended = {key: number for key, number in self._extended.items() if number > oldest}

    async def report_since(self) -> TurnReport:
        """Return what the engine did since it reported last."""
        totals, (decisions, gain, sentences) = await asyncio.gather(self.engine.totals(), self.engine.planning())
        counters, self._before_turn = totals - self._before_turn, totals
        problems = [*self.engine.histories.feed.take_problems(), *sentences]
        return TurnReport(self.engine.weight_version, counters, decisions, gain, problems)

    async def _load(self, version: int, is_due: Callable[[], bool]) -> None:
        tokens, replaced = self._scored.get(version), self.engine.weight_version
        before = await self.engine.score(tokens) if tokens else None
        # A sample may have come meanwhile; an order to begin it that is under way ends first.
        async with self.engine.orders.all():
            pass
        if not is_due():
            return
        limit = self.engine.rhyme.weights.timeout_s
        try:
            async with asyncio.timeout(limit):
                seconds = await self._load_below_deferred(version)
        except TimeoutError:
            raise WeightLoadError(
                f"engine {self.engine.index} did not load weight version {version} within {limit:g} s "
                "(--weights.timeout_s)"
            ) from None
        self._turns.loaded(version)
        self._scored.pop(version, None)
        after = await self.engine.score(tokens) if tokens else None
        self._loads.pop(version).set_result(Loaded(seconds, replaced, before, after))
        del self._segments[version]
        self._forget_weights(version)

    def _forget_weights(self, newest: int) -> None:
        """Say of offered weights up to this version that they are not loaded."""
        for version in [known for known in self._loads if known <= newest]:
            self._loads.pop(version).set_result(None)
            del self._segments[version]
            self._scored.pop(version, None)

    async def _load_below_deferred(self, version: int) -> float:
        if not self.engine.running:
            return await self.engine.load_weights(self._segments[version])
        await self.engine.pause_generation()
        try:
            seconds = await self.engine.load_weights(self._segments[version])
            for name, tokens in (await self._lengths()).items():
                self._note_load(name, version, tokens)
        finally:
            await self.engine.resume_generation()
        return seconds

    def _note_load(self, request_id: str, version: int, tokens: int) -> None:
        """Note weights that were loaded when a sample had `tokens` tokens."""
        if request_id in self._samples:
            self._samples[request_id][1].loads.append((version, tokens))
        if request_id in self._stays:
            self._loads_below.setdefault(request_id, []).append((version, tokens))

    # --- samples

    def answered(self) -> None:
        """Note in a single-turn task that the current task's sample needs the engine no more."""
        call = _current.get()
        if call is not None and type(self.engine.executor) is CheckedExecutor:
            call.left -= 1
            self._ended_in_turn(call, 1)
            if call.left == 0:
                call.idle.set()

    def sample_started(self, request_id: str) -> None:
        """Note which call a request belongs to."""
        call, identity = _current.get(), current_sample.get()
        if call is not None and identity is not None:
            self._samples[request_id] = (call, identity.rounds[-1])
        # Inside of a turn an engine is idle when an agent's samples are all elsewhere.
        self.engine.timeline.because("tail", time.time())

    def sample_ended(self, request_id: str) -> None:
        """Forget the request."""
        self._samples.pop(request_id, None)

    def _ended_in_turn(self, call: TurnCall, samples: int) -> None:
        if samples and not call.deferred:
            self._turns.ended(call.number, samples)
            self._advance()

    # --- samples that can move (`SampleStays`)

    async def enter_turn(self, number: int, place: int, samples: int) -> None:
        """Wait until turn `number` has begun, in which `samples` samples of prompt `place` follow."""
        call = self._entered.get((number, place))
        # Asked again before any sample came, it is the same call.
        if call is None or call.left != samples or any(call is other for other, _ in self._stays.values()):
            call = self._entered[number, place] = TurnCall(number, place, samples)
            self._calls.add(call)
        await self._until_begun(call)

    async def leave_turn(self, number: int, place: int, samples: int) -> None:
        """Expect no more `samples` samples of a prompt that entered: they need no engine, or their callers are gone."""
        call = self._entered.get((number, place))
        # Told twice over a broken connection, it is done once.
        if call is not None and not call.given_up:
            call.given_up = True
            self._leave(call, samples)

    @property
    def expects_samples(self) -> bool:
        """Return whether samples may be expected here before they are started: only where they belong to no turn."""
        return self._tail

    def comes(self, place: str, group: Group | None, begins: bool) -> None:
        """Take a sample up; `begins`: it has generated nothing elsewhere, so it may be one of a call that entered."""
        assert group is not None, "a sample of no prompt group was sent to a pipelined engine"
        if place not in self._stays:
            call = self._entered.get(group) if begins else None
            self._stays[place] = (call or self._guest(group), group)

    def _guest(self, group: Group) -> TurnCall:
        deferred = group in self._deferred
        if self._tail:
            return TurnCall(group[0], group[1], 1, deferred)
        current = self._turns.current
        assert current is not None, "a sample came to an engine that has not begun"
        if not deferred:
            self._turns.extend(current, 1)
        return TurnCall(current.number, group[1], 1, deferred)

    def goes(self, place: str) -> list[tuple[int, int]]:
        """Let a sample go, however its stay ended; return what was loaded below it: version, and its tokens then."""
        call, _ = self._stays.pop(place, (None, None))
        if call is not None:
            self._leave(call, 1)
        return self._loads_below.pop(place, [])

    def _leave(self, call: TurnCall, samples: int) -> None:
        call.left -= samples
        self._ended_in_turn(call, samples)
        if call.left == 0:
            self._calls.discard(call)
            if self._entered.get((call.number, call.place)) is call:
                del self._entered[call.number, call.place]

    # --- two layouts on the same devices

    def is_tail(self) -> None:
        """Have no turns from now on: this is an engine of a tail layout."""
        self._tail = True

    async def take_weights(self, version: int) -> None:
        """Load weights that were offered, if they are newer and no sample is here."""
        async with self._taking:
            newer = version > self.engine.weight_version
            if self._tail and not self._stays and newer and version in self._segments:
                await self._load(version, lambda: not self._stays)

    async def hold_turns(self, number: int) -> bool:
        """Begin nothing behind turn `number` until `release_turns`; False if something has, or that turn has not."""
        self._held = self._turns.is_behind(number)
        return self._held

    async def release_turns(self) -> None:
        """Go on, if it was held."""
        if not self._held:
            return
        self._held = False
        if self.engine.timeline.state == ELSEWHERE:
            self.engine.timeline.enter(self.engine.rests, time.time(), self.engine.weight_version)
        self._advance()
