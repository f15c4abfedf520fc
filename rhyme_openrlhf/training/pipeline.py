"""The controller of the streaming pipeline: hands steps to engines ahead of time and collects what they finish.

Two steps are with the engines at any time: one that is being completed and the next, so that an engine which is done
with the one goes on with the other. When a step is complete its batch is the trainer's, and the step after the next is
handed out; an engine cannot need it before, because its weights are made from that batch.

Invariants: a step's batch is its own prompts; the trainer gets prompt groups of one step at a time, in the order in
which they end, and a step's end after all of them; rollout stages in the record follow each other without gaps, so an
engine's states add up to wall time; every wait is bounded by --limits.stage_s without any news.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray

from rhyme_openrlhf.rollout.checked_reward import RewardLateError
from rhyme_openrlhf.rollout.engine import EngineCoreError
from rhyme_openrlhf.rollout.lost_engines import LostEngine
from rhyme_openrlhf.rollout.pipeline_engine import TurnReport
from rhyme_openrlhf.rollout.pipeline_generator import DrawnStep, HandedStep, PipelineSamplesGenerator
from rhyme_openrlhf.rollout.pipeline_watch import PipelineWatch
from rhyme_openrlhf.rollout.sample_turns import TURNS
from rhyme_openrlhf.rollout.samples_generator import leave_out
from rhyme_openrlhf.scheduling.step_buffer import PromptGroup
from rhyme_openrlhf.scheduling.step_plan import StepPlacement
from rhyme_openrlhf.scheduling.turns import MOST_OFF_POLICY, training_turn
from rhyme_openrlhf.telemetry.events import (
    DraftBudget,
    DraftGain,
    EngineInterval,
    EngineStep,
    Event,
    Note,
    RolloutFinished,
    RolloutStarted,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.training.recorder import RunServices
from rhyme_openrlhf.training.step_planner import StepPlanner, rank_groups_event
from rhyme_openrlhf.training.trainer_async import GENERATOR

SOURCE = "rollout"
# The step that is being completed, and those that may begin while its training is awaited.
STEPS_AHEAD = 1 + MOST_OFF_POLICY
# How often the controller looks up from waiting for samples.
POLL_SECONDS = 5.0
# An engine tells its timeline and counters between two decode steps.
ENGINE_TIMEOUT_SECONDS = 120.0


class PipelineWaitError(RuntimeError):
    """Nothing has come from the engines for too long; the message says what is waited for and who owes it."""


class NoRewardError(RuntimeError):
    """No prompt group of a step has got its rewards."""


@dataclass(frozen=True)
class StepEnd:
    """All prompt groups of a step have been sent, `prompts` of them: what OpenRLHF's trainer gets beside the samples.

    `excluded`: prompt groups of this step and those before that were left out, because a reward did not come.
    """

    step: int
    prompts: int
    client_states: dict[str, Any]
    seconds: float
    excluded: int = 0


@dataclass
class _InFlight:
    """A step that engines have: what they still owe, and the prompt groups that ended, in that order."""

    drawn: DrawnStep
    placement: StepPlacement
    handed: HandedStep
    ended: list[PromptGroup] = field(default_factory=list)
    sent: int = 0
    counters: EngineCounters = EngineCounters()
    retried: set[int] = field(default_factory=set)
    excluded: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.ended) + len(self.excluded) == len(self.drawn.prompts) and not self.handed.reports

    def owed(self) -> list[int]:
        """The places whose prompt groups have not ended."""
        done = {group.place for group in self.ended} | self.excluded
        return [place for place in range(len(self.drawn.prompts)) if place not in done]


class Pipeline:
    """One run's controller. `put(item)` gives the trainer a PromptGroup, a StepEnd or, from `evaluate(version)`, an
    evaluation; `training_news()` gives the seconds of each training step since it was asked last."""

    def __init__(
        self,
        generator: PipelineSamplesGenerator,
        services: RunServices,
        planner: StepPlanner,
        put: Callable[[Any], None],
        evaluate: Callable[[int], None] | None,
        training_news: Callable[[], list[float]],
        generate_kwargs: dict[str, Any],
    ) -> None:
        self._generator = generator
        self._services = services
        self._planner = planner
        self._put = put
        self._evaluate = evaluate
        self._training_news = training_news
        self._generate_kwargs = generate_kwargs
        self._engines = generator.vllm_engines
        self._flying: list[_InFlight] = []
        self._stage_began = 0.0
        self._news_at = 0.0
        self._excluded = self._excluded_before = 0
        self._watch = PipelineWatch(self._engines, services)

    def run(self, drawn_steps: Iterator[DrawnStep]) -> None:
        """Generate every step. Raises what generating a sample raised, or PipelineWaitError."""
        coming = next(drawn_steps, None)
        first_version = 0 if coming is None else coming.step - 1
        ray.get([engine.begin_rollout.remote() for engine in self._engines], timeout=ENGINE_TIMEOUT_SECONDS)
        self._watch.start()
        try:
            while coming is not None or self._flying:
                while coming is not None and len(self._flying) < STEPS_AHEAD:
                    following = next(drawn_steps, None)
                    self._hand(coming, first_version, last=following is None)
                    coming = following
                if not self._flying[0].complete:
                    self._collect()
                # One at a time: an evaluation of its weights comes before the end of the next.
                if self._flying[0].complete:
                    self._finish()
        finally:
            self._watch.stop()

    # --- handing out

    def _hand(self, drawn: DrawnStep, first_version: int, last: bool) -> None:
        for seconds in self._training_news():
            self._planner.trained(seconds)
        turn = training_turn(drawn.step, first_version)
        # Its weights are the last ones that this step may begin with, so its turn comes right before this one.
        if self._evaluate is not None and turn.oldest == drawn.step - STEPS_AHEAD > first_version:
            self._evaluate(turn.oldest)
        leave_out(self._engines, self._services)
        left = self._left()
        placement = self._planner.place(drawn, len(left))
        engine_of = [left[engine] for engine in placement.engine_of]
        handed = self._generator.hand(drawn, turn, engine_of, **self._generate_kwargs)
        if last:
            for engine in self._engines:
                engine.no_more_turns.remote()
        self._flying.append(_InFlight(drawn, placement, handed))
        self._news_at = time.time()
        if len(self._flying) == 1:
            self._begin_stage(time.time(), ())

    def _begin_stage(self, at: float, before: tuple[Event, ...]) -> None:
        """The oldest step is the one that is being completed from `at` on; `before` happened at the same moment."""
        self._stage_began = at
        if not self._flying:
            self._services.record_all(list(before), SOURCE)
            return
        drawn = self._flying[0].drawn
        samples = len(drawn.prompts) * self._generator.args.rollout.n_samples_per_prompt
        self._services.record_all(
            [*before, RolloutStarted(drawn.step, drawn.epoch, len(drawn.prompts), samples)], SOURCE
        )
        self._watch.begin(drawn.step, samples)

    # --- collecting

    def _collect(self) -> None:
        """Wait for something to end, and take it in."""
        owners = {ref: step for step in self._flying for ref in (*step.handed.calls, *step.handed.reports)}
        ready, _ = ray.wait(list(owners), num_returns=1, timeout=POLL_SECONDS)
        if not ready:
            self._check_wait()
        for ref in ready:
            self._news_at = time.time()
            step = owners[ref]
            # Asked for at an engine that was found to be gone meanwhile, it is forgotten.
            if ref in step.handed.reports or ref in step.handed.calls:
                self._take(step, ref)
        self._send(self._flying[0])

    def _take(self, step: _InFlight, ref: Any) -> None:
        handed = step.handed
        try:
            answer = ray.get(ref)
        except (ray.exceptions.RayActorError, EngineCoreError):
            if not self._make_up_for_lost():
                raise
        except RewardLateError as error:
            self._try_again(step, handed.calls.pop(ref), error)
        else:
            if ref in handed.reports:
                self._take_report(step, handed.reports.pop(ref), answer)
            else:
                self._take_group(step, handed.calls.pop(ref), answer)

    # --- what goes wrong

    def _left(self) -> list[int]:
        """The engines that are there."""
        return [number for number, engine in enumerate(self._engines) if not isinstance(engine, LostEngine)]

    def _make_up_for_lost(self) -> bool:
        """Have others generate what engines that are gone owe, from its beginning: their weights may be had by it, as
        `EngineTurns.extend` says. Whether an engine that owed something is gone. Raises RuntimeError if none is left.
        """
        leave_out(self._engines, self._services)
        left, found = self._left(), False
        for step in self._flying:
            handed = step.handed
            places = [place for place in step.owed() if handed.engine_of[place] not in left]
            for refs in (handed.calls, handed.reports):
                engines = {ref: handed.engine_of[of] if refs is handed.calls else of for ref, of in refs.items()}
                for ref in [ref for ref, engine in engines.items() if engine not in left]:
                    found = True
                    del refs[ref]
            load = Counter(handed.engine_of[place] for place in step.owed())
            again: dict[int, list[int]] = defaultdict(list)
            for place in places:
                engine = min(left, key=lambda number: (load[number], number))
                load[engine] += 1
                again[engine].append(place)
            for engine, of in again.items():
                self._generator.hand_again(step.drawn, handed, of, engine, **self._generate_kwargs)
        return found

    def _try_again(self, step: _InFlight, place: int, error: RewardLateError) -> None:
        """A prompt group's reward did not come: it is generated once more, then left out."""
        number, reason = step.drawn.step, (str(error).strip().splitlines() or ["no message"])[-1].strip()
        if place not in step.retried:
            step.retried.add(place)
            text = (
                f"prompt group {place} of step {number} is generated again, because its reward did not come: {reason}"
            )
            self._services.record(Note("warning", text), SOURCE)
            engine = step.handed.engine_of[place]
            self._generator.hand_again(step.drawn, step.handed, [place], engine, **self._generate_kwargs)
            return
        step.excluded.add(place)
        self._excluded += 1
        text = (
            f"prompt group {place} of step {number} is not trained on, because its reward did not come twice "
            f"({self._excluded} left out in this run): {reason}"
        )
        self._services.record(Note("error", text), SOURCE)
        if len(step.excluded) == len(step.drawn.prompts):
            raise NoRewardError(f"no prompt group of step {number} has got its rewards: {reason}")

    def _send(self, step: _InFlight) -> None:
        """Give the trainer what has ended of the step that is being completed."""
        for group in step.ended[step.sent :]:
            self._put(group)
        step.sent = len(step.ended)

    def _take_group(self, step: _InFlight, place: int, responses: list[dict[str, Any]]) -> None:
        samples = self._generator.experiences(responses, **self._generate_kwargs)
        versions = tuple(tuple(turn.weight_version for turn in getattr(sample, TURNS)) for sample in samples)
        step.ended.append(PromptGroup(step.drawn.step, place, len(step.drawn.prompts), samples, versions))
        self._planner.ended(step.drawn, place, [int(sample.response_length.item()) for sample in samples])

    def _take_report(self, step: _InFlight, engine: int, report: TurnReport) -> None:
        step.counters += report.counters
        number = step.drawn.step
        events: list[Event] = [EngineStep(number, engine, report.counters, report.weight_version)]
        if report.decisions.get("running"):
            events.append(DraftBudget(number, engine, **report.decisions))
        if report.gain:
            events.append(DraftGain(number, engine, **report.gain))
        events += [Note("warning", f"engine {engine}: {problem}") for problem in report.problems]
        self._services.record_all(events, SOURCE)

    def _check_wait(self) -> None:
        limit = self._services.settings.limits.stage_s
        if time.time() - self._news_at <= limit:
            return
        oldest = self._flying[0]
        number, left = oldest.drawn.step, len(oldest.owed())
        raise PipelineWaitError(
            f"nothing has come from the engines for {limit:g} s (--limits.stage_s): {left} prompt groups of step "
            f"{number} are missing, whose engines need weight version {oldest.handed.turn.oldest} or newer; the "
            f"trainer, which owes weights, has the batches up to step {number - 1}"
        )

    # --- a complete step

    def _finish(self) -> None:
        step, ended = self._flying.pop(0), time.time()
        drawn, seconds = step.drawn, ended - self._stage_began
        self._send(step)
        states = {**drawn.client_states, GENERATOR: drawn.generator}
        self._excluded_before += len(step.excluded)
        self._put(StepEnd(drawn.step, len(step.ended), states, seconds, self._excluded_before))
        samples = [sample for group in step.ended for sample in group.samples]
        lengths = {group.place: [int(s.response_length.item()) for s in group.samples] for group in step.ended}
        finished = rollout_finished(drawn, seconds, samples)
        began = self._stage_began
        self._begin_stage(ended, (finished,))
        self._record_intervals(drawn.step, began, ended)
        event = rank_groups_event(drawn.step, step.placement, lengths)
        if event is not None:
            self._services.record(event, SOURCE)
        tokens = statistics.fmean(float(sample.total_length.item()) for sample in samples)
        self._planner.observe(step.counters, tokens - finished.length_mean)

    def _record_intervals(self, step: int, began: float, ended: float) -> None:
        timelines = ray.get(
            [engine.stage_intervals.remote(began, ended) for engine in self._engines],
            timeout=ENGINE_TIMEOUT_SECONDS,
        )
        events: list[Event] = [
            EngineInterval(engine, one.state, one.start, one.end, step, one.weight_version, one.cause)
            for engine, timeline in enumerate(timelines)
            for one in timeline or ()  # None: it is gone
        ]
        self._services.record_all(events, SOURCE)


def rollout_finished(drawn: DrawnStep, seconds: float, samples: list[Any]) -> RolloutFinished:
    """The event of a complete step; `seconds` since the step before it was."""
    lengths = [int(sample.response_length.item()) for sample in samples]
    rewards = [sample.rewards.item() for sample in samples if sample.rewards is not None]
    truncated = sum(bool(sample.truncated.item()) for sample in samples)
    return RolloutFinished.of(drawn.step, drawn.epoch, seconds, lengths, rewards, truncated)
