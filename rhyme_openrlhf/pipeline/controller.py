"""The controller of the streaming pipeline: hands steps to engines ahead of time and collects what they finish.

Two steps are with the engines at any time: the step that is being completed and the next one. An engine that is done
with the first goes on with the second. When a step is complete, the trainer gets its batch, and the step after the next
is handed out. No engine can need that step before, because its weights are made from that batch.

Invariants:
- A step's batch is what the ledger (`scheduling/deferral.py`) says: its own prompts, but for those that are deferred,
  filtered out or without a reward, whose places others take.
- A batch that lacks prompt groups without a reward, so that --train.batch_size no longer divides it, ends the run.
- The trainer gets prompt groups of one batch at a time, in the order in which they end, and then the step's end.
- Rollout stages in the record follow each other without gaps, so an engine's states add up to wall time.
- Every wait ends after --limits.stage_s without any news.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray

from rhyme_openrlhf.engine.checked_reward import RewardLateError
from rhyme_openrlhf.engine.messages import TurnReport
from rhyme_openrlhf.engine_errors import last_line
from rhyme_openrlhf.pipeline.batch import PromptGroup, StepEnd
from rhyme_openrlhf.pipeline.engines import ENGINE_TIMEOUT_SECONDS, Placing, stage_intervals, turn_events
from rhyme_openrlhf.pipeline.generator import LOST, PipelineSamplesGenerator, score_range, teaches_nothing
from rhyme_openrlhf.pipeline.outlier_watch import Outlier, OutlierWatch
from rhyme_openrlhf.pipeline.step import NOWHERE, Key, Prompts, Step
from rhyme_openrlhf.pipeline.step_planner import StepPlanner, rank_groups_event
from rhyme_openrlhf.scheduling.deferral import BatchLedger
from rhyme_openrlhf.scheduling.turns import MOST_OFF_POLICY, training_turn
from rhyme_openrlhf.telemetry.events import Event, Note, RolloutStarted, SampleMoved
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import ROUNDS
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.training.rollout_watch import RolloutWatch
from rhyme_openrlhf.training.samples_generator import rollout_finished
from rhyme_openrlhf.training.trainer_async import GENERATOR

SOURCE = "rollout"
# The step that is being completed, and those that may begin while its training is awaited.
STEPS_AHEAD = 1 + MOST_OFF_POLICY
# How often the controller looks up from waiting for samples.
POLL_SECONDS = 5.0


class PipelineWaitError(RuntimeError):
    """An error for a wait without news from the engines; the message says what is awaited and who owes it."""


class NoRewardError(RuntimeError):
    """Prompt groups of a step have not got their rewards, and without them the step cannot be trained on."""


def sizes_of_steps(batch: int, prompts: int) -> set[int]:
    """Return the numbers of prompt groups that steps have without any fault, in an epoch of `prompts` prompts."""
    return {min(batch, prompts), prompts % batch}


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
    ) -> None:
        self._generator = generator
        self._services = services
        self._planner = planner
        self._put = put
        self._evaluate = evaluate
        self._training_news = training_news
        self._engines = generator.vllm_engines
        self._flying: list[Step] = []
        # Steps that are complete but for deferred prompt groups.
        self._late: list[Step] = []
        self._ledger: BatchLedger[Key] = BatchLedger()
        self._groups: dict[Key, PromptGroup] = {}
        self._sent: set[Key] = set()
        # Of each prompt group that has no reward, its step.
        self._left_out: list[int] = []
        # In unix seconds, for the engines' timelines; and on the clock by which its length is measured.
        self._stage_began = self._stage_since = 0.0
        self._news_at = 0.0
        self._score_range = score_range(generator.args)
        self._samples: int = generator.args.rollout.n_samples_per_prompt
        self._own_sizes = sizes_of_steps(generator.args.rollout.batch_size, len(generator.prompts_dataloader))
        self._outliers: OutlierWatch | None = None
        if services.settings.histopipe.defer or services.settings.samples_move:
            self._outliers = OutlierWatch(self._engines, planner.beta, self._samples)
        self._placing = Placing(generator, services)
        self._watch = RolloutWatch(self._engines, services, overlapping=True)

    def run(self, steps: Iterator[Step]) -> None:
        """Generate every step. Raises what generating a sample raised, or PipelineWaitError."""
        coming = next(steps, None)
        first_version = 0 if coming is None else coming.number - 1
        self._ledger = BatchLedger(first_version)
        ray.get([engine.begin_rollout.remote() for engine in self._engines], timeout=ENGINE_TIMEOUT_SECONDS)
        self._watch.start()
        try:
            while coming is not None or self._flying:
                while coming is not None and len(self._flying) < STEPS_AHEAD:
                    following = next(steps, None)
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

    def _hand(self, step: Step, first_version: int, last: bool) -> None:
        for seconds in self._training_news():
            self._planner.trained(seconds)
        turn = training_turn(step.number, first_version)
        # Its weights are the last ones that this step may begin with, so its turn comes right before this one.
        if turn.oldest == step.number - STEPS_AHEAD > first_version:
            self._have_evaluated(turn.oldest)
        left = self._placing.look()
        step.placement = self._planner.place(step, len(left))
        step.engine_of.update(enumerate(left[engine] for engine in step.placement.engine_of))
        self._generator.begin(step, turn, self._planner.last_lengths())
        self._flying.append(step)
        self._ledger.add(step.number, [step.key(place) for place in range(step.size)], step.epoch)
        self._placing.reconcile(self._with_engines())
        if last:
            for handle in self._engines:
                handle.no_more_turns.remote()
        self._news_at = time.monotonic()
        if len(self._flying) == 1:
            self._begin_stage(time.time(), ())

    def _have_evaluated(self, version: int) -> None:
        if self._evaluate is None:
            return
        engines = self._placing.left()
        try:
            self._evaluate(version)
        except LOST as error:
            self._placing.explain(error, engines)
            text = f"weight version {version} is not evaluated, because an engine was lost meanwhile"
            self._services.record(Note("warning", text), SOURCE)

    def _with_engines(self) -> tuple[Step, ...]:
        """Return the steps of which engines may owe something."""
        return (*self._flying, *self._late)

    def _begin_stage(self, at: float, before: tuple[Event, ...]) -> None:
        """Begin the stage of the oldest step, which is being completed from `at` on; `before` happened then, too."""
        self._stage_began, self._stage_since = at, time.monotonic()
        if not self._flying:
            self._services.record_all(list(before), SOURCE)
            return
        step = self._flying[0]
        samples = step.size * self._samples
        self._services.record_all([*before, RolloutStarted(step.number, step.epoch, step.size, samples)], SOURCE)
        self._watch.begin(step.number, samples)

    # --- collecting

    def _collect(self) -> None:
        """Wait for something to end, and take in all that has: each look goes through everything that is awaited."""
        steps = self._with_engines()
        owners = {ref: step for step in steps for ref in (*step.calls, *step.reports)}
        poll = POLL_SECONDS if self._outliers is None else self._outliers.look_seconds
        ready, waiting = ray.wait(list(owners), num_returns=1, timeout=poll)
        if not ready:
            self._check_wait()
        elif waiting:
            ready += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        for ref in ready:
            self._take(owners[ref], ref)
        self._placing.reconcile(steps)
        self._late = [step for step in self._late if step.owed()]
        if self._outliers is not None and len(self._flying) == STEPS_AHEAD:
            self._judge_lengths(self._outliers, self._flying[0])
        self._send(self._ledger.newly_certain(self._flying[0].number))

    def _take(self, step: Step, ref: Any) -> None:
        place, reporting = step.calls.pop(ref, -1), step.reports.pop(ref, -1)
        try:
            answer = ray.get(ref)
        except LOST as error:
            self._placing.explain(error, [reporting if place < 0 else step.engine_of[place]])
            if reporting in self._placing.left():
                self._check_wait()
                self._generator.ask_report(step, reporting)
            return
        except RewardLateError as error:
            self._leave_out(step, place, error)
        else:
            if place < 0:
                self._take_report(step, reporting, answer)
            else:
                self._take_group(step, place, answer)
        self._news_at = time.monotonic()

    # --- what goes wrong

    def _leave_out(self, step: Step, place: int, error: RewardLateError) -> None:
        """Do without a prompt group whose reward did not come, although the engine asked for it twice.

        It is not generated again until its reward is fast: that would prefer responses that are quickly rewarded.
        """
        self._left_out.append(step.number)
        self._drop(step, place, more := step.draw_another())
        instead = "another prompt takes its place" if more else "its epoch has no other prompt for its place"
        text = (
            f"prompt group {place} of step {step.number} is not trained on, because its reward did not come "
            f"({len(self._left_out)} left out in this run), and {instead}: {last_line(error)}"
        )
        self._services.record(Note("error", text), SOURCE)

    def _send(self, keys: Sequence[Key]) -> None:
        """Give the trainer these prompt groups of the batch of the step that is being completed, if it has them not."""
        step = self._flying[0]
        for key in keys:
            if key not in self._sent:
                self._sent.add(key)
                self._put(replace(self._groups[key], trained_in=step.number, batch=step.size))

    def _take_group(self, step: Step, place: int, responses: list[dict[str, Any]]) -> None:
        samples = self._generator.experiences(responses)
        step.lengths[place] = [int(sample.response_length.item()) for sample in samples]
        self._planner.ended(step, place, step.lengths[place])
        if teaches_nothing(samples, self._score_range) and self._filter_out(step, place):
            return
        versions = tuple(
            tuple(version for one in getattr(sample, ROUNDS) for version in one.tokens_by_version())
            for sample in samples
        )
        self._groups[step.key(place)] = PromptGroup(step.number, place, len(step.prompts), samples, versions)
        self._ended(step, place)

    def _filter_out(self, step: Step, place: int) -> bool:
        """Have another prompt of the epoch, if there is one, take the place of this prompt group; False: it stays,
        because without it the step would have none, and later ones wait for the weights that are made of it."""
        number, more, key = step.number, step.draw_another(), step.key(place)
        if more is None and {*self._ledger.stays(number), *self._ledger.certain(number)} == {key}:
            text = f"step {number} trains on one prompt group although it is filtered out: it would have none"
            self._services.record(Note("warning", text), SOURCE)
            return False
        step.filtered.add(place)
        self._drop(step, place, more)
        return True

    def _drop(self, step: Step, place: int, more: Prompts | None) -> None:
        """Train without a prompt group; have the prompt `more`, if there is one, generated for its place."""
        step.done.add(place)
        if more is None:
            self._ledger.drop(step.number, step.key(place))
        else:
            self._ledger.drop(step.number, step.key(place), step.key(step.add(more)))

    def _ended(self, step: Step, place: int) -> None:
        step.done.add(place)
        self._ledger.ended(step.number, step.key(place))

    def _judge_lengths(self, outliers: OutlierWatch, step: Step) -> None:
        """Have responses that are far too long go on at another engine, or their prompt groups train a step later."""
        may_defer = self._services.settings.histopipe.defer
        for one in outliers.find(step):
            if one.destination is not None:
                if one.sample not in step.moved:
                    step.moved.add(one.sample)
                    self._generator.move(one.sample, one.destination)
            elif may_defer and one.place not in step.deferred:
                self._defer(step, one)

    def _defer(self, step: Step, one: Outlier) -> None:
        if not self._ledger.defer(step.number, step.key(one.place)):
            return
        step.deferred.add(one.place)
        for engine in self._engines:
            engine.defer.remote(step.turn.number, one.place)
        name = f"{step.number}.{one.place}"
        moved = SampleMoved(
            step.number, name, one.engine, one.engine, "outlier_inter", "recompute", "moved", 0.0, one.tokens
        )
        self._services.record(moved, SOURCE)

    def _take_report(self, step: Step, engine: int, report: TurnReport) -> None:
        step.counters += report.counters
        self._services.record_all(turn_events(step.number, engine, report), SOURCE)

    def _take_tail_reports(self, step: Step) -> None:
        """Record what engines of a tail layout, which have no turns, did since the step before ended."""
        for number in self._placing.left_in_tail():
            try:
                report = ray.get(self._engines[number].report_since.remote(), timeout=ENGINE_TIMEOUT_SECONDS)
            except LOST:
                # The call that awaits a sample of this engine fails, too.
                continue
            if report.counters != EngineCounters():
                self._take_report(step, number, report)

    def _check_wait(self) -> None:
        limit = self._services.settings.limits.stage_s
        if time.monotonic() - self._news_at <= limit:
            return
        oldest = self._flying[0]
        number, left = oldest.number, len(oldest.owed())
        raise PipelineWaitError(
            f"nothing has come from the engines for {limit:g} s (--limits.stage_s): {left} prompt groups of step "
            f"{number} are missing, whose engines need weight version {oldest.turn.oldest} or newer; the "
            f"trainer, which owes weights, has the batches up to step {number - 1}"
        )

    # --- a complete step

    def _batch(self) -> tuple[Key, ...] | None:
        """Return what the step that is being completed trains on; None until the step is complete."""
        step = self._flying[0]
        return None if step.reports else self._ledger.batch(step.number)

    def _finish(self, batch: tuple[Key, ...]) -> None:
        """End the step that is being completed, which has its batch, for the trainer; then record the step."""
        self._send(batch)
        step, seconds = self._flying.pop(0), time.monotonic() - self._stage_since
        if step.owed():
            self._late.append(step)
        groups = [self._groups.pop(key) for key in batch]
        self._check_size(step, len(batch))
        self._put(self._end(step, len(batch), seconds))
        self._sent.difference_update(batch)
        samples = [sample for group in groups for sample in group.samples]
        self._record(step, samples, seconds)

    def _check_size(self, step: Step, groups: int) -> None:
        """Raise NoRewardError for a batch that prompt groups without a reward have made too small.

        DeepSpeed would keep the gradient of the rest and apply it with the next steps' samples (`training/updates.py`).
        """
        samples, update = groups * self._samples, self._generator.args.train.batch_size
        if not groups:
            raise NoRewardError(f"no prompt group of step {step.number} has got its rewards")
        # An epoch's last steps are smaller in OpenRLHF, too, where prompts are filtered out.
        as_upstream = self._score_range is not None or groups in self._own_sizes
        if samples % update and not as_upstream:
            raise NoRewardError(
                f"step {step.number} has {samples} samples, which --train.batch_size {update} does not divide: "
                f"{len(self._left_out)} prompt groups of the run had no reward in time, and the epoch has no others to "
                "take their places. Give rewards more time (--limits.reward_s) and resume with --ckpt.load_enable"
            )

    def _end(self, step: Step, groups: int, seconds: float) -> StepEnd:
        deferred, taken = self._ledger.swapped(step.number)
        if taken and step.stream is not None:
            places = (self._flying[0].places[place] for _, place in taken)
            step.stream.use(step.number, (place for place in places if place != NOWHERE))
        states = {**step.client_states, GENERATOR: step.generator_after([place for _, place in deferred])}
        excluded = sum(number <= step.number for number in self._left_out)
        passed = None if self._score_range is None else step.pass_rate
        return StepEnd(step.number, groups, states, seconds, excluded, len(step.deferred), passed)

    def _record(self, step: Step, samples: list[Any], seconds: float) -> None:
        """Record a step's rollout stage, and begin that of the next at the same moment."""
        self._services.record_lengths(step.number, samples)
        finished = rollout_finished(step.number, step.epoch, seconds, samples)
        began, ended = self._stage_began, time.time()
        self._begin_stage(ended, (finished,))
        self._take_tail_reports(step)
        self._services.record_all(stage_intervals(self._engines, step.number, began, ended), SOURCE)
        event = rank_groups_event(step.number, step.placement, step.lengths)
        if event is not None:
            self._services.record(event, SOURCE)
        tokens = statistics.fmean(float(sample.total_length.item()) for sample in samples)
        self._planner.observe(step.counters, tokens - finished.length_mean)
