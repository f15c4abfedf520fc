"""The controller of the streaming pipeline: hands steps to engines ahead of time and collects what they finish.

Two steps are with the engines at any time: one that is being completed and the next, so that an engine which is done
with the one goes on with the other. When a step is complete its batch is the trainer's, and the step after the next is
handed out; an engine cannot need it before, because its weights are made from that batch.

Invariants: a step's batch is its own prompts, or with --histopipe.defer what the ledger (`scheduling/deferral.py`)
says; the trainer gets prompt groups of one batch at a time, in the order in which they end, and a step's end after all
of them; rollout stages in the record follow each other without gaps, so an engine's states add up to wall time; every
wait is bounded by --limits.stage_s without any news.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray

from rhyme_openrlhf.engine.checked_reward import RewardLateError
from rhyme_openrlhf.engine.lost_engines import LostEngine
from rhyme_openrlhf.engine.messages import TurnReport
from rhyme_openrlhf.engine.port import EngineLost
from rhyme_openrlhf.pipeline.engine_loss import LOST, EngineLoss
from rhyme_openrlhf.pipeline.events import ENGINE_TIMEOUT_SECONDS, stage_intervals, turn_events
from rhyme_openrlhf.pipeline.generator import DrawnStep, PipelineSamplesGenerator
from rhyme_openrlhf.pipeline.outlier_watch import Outlier, OutlierWatch
from rhyme_openrlhf.pipeline.prompt_filter import score_range, teaches_nothing
from rhyme_openrlhf.pipeline.step_buffer import PromptGroup
from rhyme_openrlhf.pipeline.step_in_flight import Key, StepEnd, StepInFlight
from rhyme_openrlhf.pipeline.step_planner import StepPlanner, rank_groups_event
from rhyme_openrlhf.pipeline.watch import PipelineWatch
from rhyme_openrlhf.scheduling.deferral import BatchLedger
from rhyme_openrlhf.scheduling.turns import MOST_OFF_POLICY, training_turn
from rhyme_openrlhf.telemetry.events import Event, Note, RolloutStarted, SampleMoved
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import ROUNDS
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.training.samples_generator import Swapped, rollout_finished
from rhyme_openrlhf.training.trainer_async import GENERATOR

SOURCE = "rollout"
# The step that is being completed, and those that may begin while its training is awaited.
STEPS_AHEAD = 1 + MOST_OFF_POLICY
# How often the controller looks up from waiting for samples.
POLL_SECONDS = 5.0


class PipelineWaitError(RuntimeError):
    """Nothing has come from the engines for too long; the message says what is waited for and who owes it."""


class NoRewardError(RuntimeError):
    """No prompt group of a step has got its rewards."""


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
        self._flying: list[StepInFlight] = []
        # Steps that are complete but for deferred prompt groups.
        self._late: list[StepInFlight] = []
        self._ledger: BatchLedger[Key] = BatchLedger(None)
        self._groups: dict[Key, PromptGroup] = {}
        self._sent: set[Key] = set()
        self._left_out: set[Key] = set()
        self._stage_began = 0.0
        self._news_at = 0.0
        self._excluded_before = 0
        self._score_range = score_range(generator.args)
        self._outliers: OutlierWatch | None = None
        if services.settings.histopipe.defer or services.settings.samples_move:
            self._outliers = OutlierWatch(self._engines, planner.beta, generator.args.rollout.n_samples_per_prompt)
        self._loss = EngineLoss(generator, services, generate_kwargs)
        self._watch = PipelineWatch(self._engines, services)

    def run(self, drawn_steps: Iterator[DrawnStep]) -> None:
        """Generate every step. Raises what generating a sample raised, or PipelineWaitError."""
        coming = next(drawn_steps, None)
        first_version = 0 if coming is None else coming.step - 1
        self._ledger = BatchLedger(None, first_version)
        ray.get([engine.begin_rollout.remote() for engine in self._engines], timeout=ENGINE_TIMEOUT_SECONDS)
        self._watch.start()
        try:
            while coming is not None or self._flying:
                while coming is not None and len(self._flying) < STEPS_AHEAD:
                    following = next(drawn_steps, None)
                    self._hand(coming, first_version, last=following is None)
                    coming = following
                batch = self._batch()
                if batch is None:
                    self._collect()
                    batch = self._batch()
                # One at a time: an evaluation of its weights comes before the end of the next.
                if batch is not None:
                    self._finish(batch)
        finally:
            self._watch.stop()

    # --- handing out

    def _hand(self, drawn: DrawnStep, first_version: int, last: bool) -> None:
        for seconds in self._training_news():
            self._planner.trained(seconds)
        turn = training_turn(drawn.step, first_version)
        # Its weights are the last ones that this step may begin with, so its turn comes right before this one.
        if turn.oldest == drawn.step - STEPS_AHEAD > first_version:
            self._have_evaluated(turn.oldest)
        left = self._loss.look()
        placement = self._planner.place(drawn, len(left))
        engine_of = [left[engine] for engine in placement.engine_of]
        lengths = self._planner.last_lengths()
        handed = self._generator.hand(drawn, turn, engine_of, lengths, **self._generate_kwargs)
        if last:
            for engine in self._engines:
                engine.no_more_turns.remote()
        self._flying.append(StepInFlight(drawn, placement, handed))
        self._ledger.add(drawn.step, [(drawn.step, place) for place in range(len(drawn.prompts))], drawn.epoch)
        self._news_at = time.time()
        if len(self._flying) == 1:
            self._begin_stage(time.time(), ())
        for engine, error in handed.unreached.items():
            if not isinstance(self._engines[engine], LostEngine) and not self._goes_on_after(error):
                raise error

    def _have_evaluated(self, version: int) -> None:
        if self._evaluate is None:
            return
        try:
            self._evaluate(version)
        except LOST as error:
            if not self._goes_on_after(error):
                raise
            text = f"weight version {version} is not evaluated, because an engine was lost meanwhile"
            self._services.record(Note("warning", text), SOURCE)

    def _goes_on_after(self, error: Exception) -> bool:
        return self._loss.goes_on_after(error, (*self._flying, *self._late))

    def _begin_stage(self, at: float, before: tuple[Event, ...]) -> None:
        """The oldest step is the one that is being completed from `at` on; `before` happened at the same moment."""
        self._stage_began = at
        if not self._flying:
            self._services.record_all(list(before), SOURCE)
            return
        drawn, prompts = self._flying[0].drawn, self._flying[0].prompts
        samples = prompts * self._generator.args.rollout.n_samples_per_prompt
        self._services.record_all([*before, RolloutStarted(drawn.step, drawn.epoch, prompts, samples)], SOURCE)
        self._watch.begin(drawn.step, samples)

    # --- collecting

    def _collect(self) -> None:
        """Wait for something to end, and take it in."""
        steps = [*self._flying, *self._late]
        owners = {ref: step for step in steps for ref in (*step.handed.calls, *step.handed.reports)}
        poll = POLL_SECONDS if self._outliers is None else self._outliers.look_seconds
        ready, _ = ray.wait(list(owners), num_returns=1, timeout=poll)
        if not ready:
            self._check_wait()
        for ref in ready:
            self._news_at = time.time()
            step = owners[ref]
            # Asked for at an engine that was found to be gone meanwhile, it is forgotten.
            if ref in step.handed.reports or ref in step.handed.calls:
                self._take(step, ref)
        self._late = [step for step in self._late if step.handed.calls]
        if self._outliers is not None and len(self._flying) == STEPS_AHEAD:
            self._judge_lengths(self._outliers, self._flying[0])
        self._send(self._ledger.newly_certain(self._flying[0].drawn.step))

    def _take(self, step: StepInFlight, ref: Any) -> None:
        handed = step.handed
        try:
            answer = ray.get(ref)
        except LOST as error:
            gone = self._goes_on_after(error)
            place = handed.calls.pop(ref, None)
            if place is not None and isinstance(error, EngineLost):
                # One of its samples had moved to an engine that is gone.
                engine = handed.engine_of[place]
                self._generator.hand_again(step.drawn, handed, [place], engine, **self._generate_kwargs)
            elif place is not None or not gone:
                raise
        except RewardLateError as error:
            self._try_again(step, handed.calls.pop(ref), error)
        else:
            if ref in handed.reports:
                self._take_report(step, handed.reports.pop(ref), answer)
            else:
                self._take_group(step, handed.calls.pop(ref), answer)

    # --- what goes wrong

    def _try_again(self, step: StepInFlight, place: int, error: RewardLateError) -> None:
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
        self._left_out.add((number, place))
        self._ended(step, place)
        text = (
            f"prompt group {place} of step {number} is not trained on, because its reward did not come twice "
            f"({len(self._left_out)} left out in this run): {reason}"
        )
        self._services.record(Note("error", text), SOURCE)

    def _send(self, keys: Sequence[Key]) -> None:
        """Give the trainer these prompt groups of the batch of the step that is being completed, if it has them not."""
        step = self._flying[0]
        for key in keys:
            if key not in self._sent and key not in self._left_out:
                self._sent.add(key)
                self._put(replace(self._groups[key], trained_in=step.drawn.step, batch=step.prompts))

    def _take_group(self, step: StepInFlight, place: int, responses: list[dict[str, Any]]) -> None:
        samples = self._generator.experiences(responses, **self._generate_kwargs)
        step.lengths[place] = [int(sample.response_length.item()) for sample in samples]
        self._planner.ended(step.drawn, place, step.lengths[place])
        if teaches_nothing(samples, self._score_range) and self._filter_out(step, place):
            return
        versions = tuple(
            tuple(version for one in getattr(sample, ROUNDS) for version in one.tokens_by_version())
            for sample in samples
        )
        drawn, key = step.drawn, (step.drawn.step, place)
        self._groups[key] = PromptGroup(drawn.step, place, len(drawn.prompts), samples, versions)
        self._ended(step, place)

    def _filter_out(self, step: StepInFlight, place: int) -> bool:
        """Have another prompt of the epoch, if there is one, take the place of this prompt group; False: it stays,
        because without it the step would have none, and later ones wait for the weights that are made of it."""
        number, more = step.drawn.step, step.drawn.with_replacement()
        key, others = (number, place), {*self._ledger.stays(number), *self._ledger.certain(number)} - self._left_out
        if more is None and others == {key}:
            text = f"step {number} trains on one prompt group although it is filtered out: it would have none"
            self._services.record(Note("warning", text), SOURCE)
            return False
        step.done.add(place)
        step.filtered.add(place)
        if more is None:
            self._ledger.drop(number, key)
            return True
        engine = self._loss.least_loaded(self._flying)
        step.drawn, new = more, len(step.drawn.prompts)
        self._ledger.drop(number, key, (number, new))
        self._generator.hand_again(more, step.handed, [new], engine, **self._generate_kwargs)
        return True

    def _ended(self, step: StepInFlight, place: int) -> None:
        step.done.add(place)
        self._ledger.ended(step.drawn.step, (step.drawn.step, place))

    def _judge_lengths(self, outliers: OutlierWatch, step: StepInFlight) -> None:
        """Have responses that are far too long go on at another engine, or their prompt groups train a step later."""
        may_defer = self._services.settings.histopipe.defer
        for one in outliers.find(step):
            if one.destination is not None:
                if one.sample not in step.moved:
                    step.moved.add(one.sample)
                    self._generator.move(one.sample, one.destination)
            elif may_defer and one.place not in step.deferred:
                self._defer(step, one)

    def _defer(self, step: StepInFlight, one: Outlier) -> None:
        number = step.drawn.step
        if not self._ledger.defer(number, (number, one.place)):
            return
        step.deferred.add(one.place)
        for engine in self._engines:
            engine.defer.remote(step.handed.turn.number, one.place)
        name = f"{number}.{one.place}"
        moved = SampleMoved(
            number, name, one.engine, one.engine, "outlier_inter", "recompute", "moved", 0.0, one.tokens
        )
        self._services.record(moved, SOURCE)

    def _take_report(self, step: StepInFlight, engine: int, report: TurnReport) -> None:
        step.counters += report.counters
        self._services.record_all(turn_events(step.drawn.step, engine, report), SOURCE)

    def _take_tail_reports(self, step: StepInFlight) -> None:
        """What engines of a tail layout, which have no turns, did since the step before ended."""
        for number in self._loss.left_in_tail():
            try:
                report = ray.get(self._engines[number].report_since.remote(), timeout=ENGINE_TIMEOUT_SECONDS)
            except LOST:
                # Whoever awaits a sample of it hears of that.
                continue
            if report.counters != EngineCounters():
                self._take_report(step, number, report)

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

    def _batch(self) -> tuple[Key, ...] | None:
        """What the step that is being completed trains on, once it is complete."""
        step = self._flying[0]
        return None if step.handed.reports else self._ledger.batch(step.drawn.step)

    def _finish(self, batch: tuple[Key, ...]) -> None:
        self._send(batch)
        step, ended = self._flying.pop(0), time.time()
        drawn, seconds = step.drawn, ended - self._stage_began
        if step.handed.calls:
            self._late.append(step)
        groups = [self._groups.pop(key) for key in batch if key not in self._left_out]
        if not groups:
            raise NoRewardError(f"no prompt group of step {drawn.step} has got its rewards")
        self._excluded_before += len(batch) - len(groups)
        states = {**drawn.client_states, GENERATOR: drawn.generator_after(self._exchanged(step, batch))}
        passed = None if self._score_range is None else step.pass_rate
        end = StepEnd(drawn.step, len(groups), states, seconds, self._excluded_before, len(step.deferred), passed)
        self._put(end)
        self._sent.difference_update(batch)
        samples = [sample for group in groups for sample in group.samples]
        self._services.record_lengths(drawn.step, samples)
        finished = rollout_finished(drawn.step, drawn.epoch, seconds, samples)
        began = self._stage_began
        self._begin_stage(ended, (finished,))
        self._take_tail_reports(step)
        self._services.record_all(stage_intervals(self._engines, drawn.step, began, ended), SOURCE)
        event = rank_groups_event(drawn.step, step.placement, step.lengths)
        if event is not None:
            self._services.record(event, SOURCE)
        tokens = statistics.fmean(float(sample.total_length.item()) for sample in samples)
        self._planner.observe(step.counters, tokens - finished.length_mean)

    def _exchanged(self, step: StepInFlight, batch: tuple[Key, ...]) -> Swapped:
        """What the step's batch took of the next one's prompts, and what the next has in exchange; where prompts are
        filtered out it has nothing, and what was taken is used up."""
        if self._score_range is None:
            return step.swapped(*self._ledger.swapped(step.drawn.step))
        taken = [place for number, place in batch if number == step.drawn.step + 1]
        if taken and step.drawn.stream is not None:
            step.drawn.stream.use(step.drawn.step, [self._flying[0].drawn.places[place] for place in taken])
        return ()
