"""Moves of running samples: outliers and reallocation, as the policies of `scheduling/` order them.

The engines are checked at set intervals, as in a live run. An engine first advances to the end of its
current step, because no sample can leave in the middle of a step. TP switches are in `layout_changes.py`.

Invariants:

- No decision is made here.
- A sample that leaves one engine arrives exactly once at another engine with the same weights.
- A sample in transit takes part in no decision.
- Only engines of the first layout give and take single samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import overload

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.predictor import SecondsOfMany
from rhyme_openrlhf.latency.step_model import context_bucket
from rhyme_openrlhf.scheduling import outliers, reallocation
from rhyme_openrlhf.scheduling.engine_status import speculation
from rhyme_openrlhf.scheduling.reallocation import Decoding, EngineLoad, ReallocationPolicy, RunningSample
from rhyme_openrlhf.simulation.engine import Engine, Job
from rhyme_openrlhf.simulation.layout_changes import LayoutChanges
from rhyme_openrlhf.simulation.planner import StepPlan
from rhyme_openrlhf.simulation.slot import Carried, SimulatedRun, Slot


class Interventions:
    """The interventions of one run."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self._policy = ReallocationPolicy(run.features.threshold, run.features.cooldown, self._curve)
        self._curves: dict[tuple[int, int, int, int], NDArray[np.float64]] = {}
        self._policy.predictor = run.predictors[run.cluster.tensor_parallel]
        self._moved: set[int] = set()
        # Each (step, rank group) with an outlier that was moved to another engine.
        self._moved_from: set[tuple[int, int]] = set()
        # Maps step, rank group and moved sample to the sample's new slot, for the steps that are not complete.
        self._elsewhere: dict[int, dict[int, dict[int, Slot]]] = defaultdict(lambda: defaultdict(dict))
        # Maps (step, rank group) to the earliest time at which one of its samples can be an outlier.
        self._not_before: dict[tuple[int, int], float] = {}
        # Engines that may take outliers of the rank group being checked, by weight version.
        self._still_running: dict[int, outliers.RunningEngines] = {}
        self.layouts = LayoutChanges(run)

    def begin(self) -> None:
        """Schedule the first check of the engines, if a feature needs it."""
        features = self._run.features
        if features.outliers:
            seconds = outliers.look_seconds(self._run.cluster.engines)
            self._run.at(seconds, partial(self._look, seconds, self._outliers))
        if features.reallocation:
            self._run.at(features.interval, partial(self._look, features.interval, self._reallocate))

    def _look(self, seconds: float, decide: Callable[[float], None], now: float) -> None:
        if len(self._run.complete) <= len(self._run.workload.steps):
            self._run.at(now + seconds, partial(self._look, seconds, decide))
            decide(now)

    def _move(self, source: Slot, target: Slot, samples: Iterable[int], cause: str) -> None:
        run = self._run
        jobs = source.engine.take(set(samples))
        source.below.difference_update(job.sample for job in jobs)
        run.result.count_moves(cause, len(jobs))
        stopped = source.engine.now
        sent, again = run.carrying.chosen([job for job in jobs if job.computed], source, target)
        computed_there = [*(one.job for one in again), *(job for job in jobs if not job.computed)]
        for job in jobs:
            job.computed = False
            plan = run.plans.get(job.sample >> 32)
            if run.features.outliers and plan is not None and plan.rank_groups:
                self._elsewhere[job.sample >> 32][plan.group_of[job.prompt]][job.sample] = target
        target.arriving += len(jobs)
        if sent:
            seconds = source.engine.kind.transfer.kv_transfer_seconds([one.context for one in sent])
            run.at(stopped + seconds, lambda time: self._arrive_sent(target, sent, stopped, time))
        if computed_there:
            # The target computes these samples while its other samples run.
            run.at(stopped, lambda time: self._arrive(target, computed_there, time))
        run.ended(source, [])

    def _arrive_sent(self, slot: Slot, sent: list[Carried], stopped: float, now: float) -> None:
        for one in sent:
            one.job.computed = True
        self._arrive(slot, [one.job for one in sent], now)
        self._run.carrying.arrived(sent, max(now, slot.engine.now) - stopped)

    def _arrive(self, slot: Slot, jobs: list[Job], now: float) -> None:
        # Stop the engine before `arriving` falls: samples that end here must not let it begin its next step.
        self._run.stop_at([slot], now)
        slot.arriving -= len(jobs)
        self._run.give(slot, jobs, max(now, slot.engine.now))

    # Reallocation

    def _reallocate(self, now: float) -> None:
        run = self._run
        slots = [slot for slot in run.slots if self.layouts.aligned(slot.node) and not slot.beginning]
        if not slots or any([slot.arriving for slot in run.slots]):
            return
        near = [slot.engine.near(now) for slot in slots]
        steps = max(steps for steps, _ in near)
        if not self._policy.due([slot.engine.load for slot in slots], steps):
            return
        by_version = defaultdict(list)
        for slot in slots:
            samples = _Samples(slot.engine, now)
            free = run.cluster.running - len(slot.engine.running)
            by_version[slot.version].append(EngineLoad(slot.place, samples, slot.engine.free_tokens, free))
        for order in self._policy.moves(
            list(by_version.values()), self._decoding(slots, [context for _, context in near])
        ):
            source = run.slots[order.source]
            run.stop_at([source], now)
            # Some samples may have ended, or begun their prefill, while the engine advanced to the end of its step.
            there = source.engine.running.keys() | {job.sample for job in source.engine.waiting}
            still = [sample for sample in order.samples if sample in there]
            target = run.slots[order.destination]
            # What ended may have switched the target's node to another layout.
            if still and not source.beginning and self.layouts.aligned(target.node):
                self._move(source, target, still, "reallocation")

    def _decoding(self, slots: Sequence[Slot], contexts: Sequence[float]) -> Decoding | None:
        """Return the mean decode step, as the live system computes it from its engines' reports.

        `contexts`: for each engine, the total tokens of context of its running samples. None if no engine has samples.
        """
        samples = 0
        context = 0.0
        decode_steps = []
        for slot, tokens_there in zip(slots, contexts, strict=True):
            engine = slot.engine
            if not engine.load:
                continue
            running = len(engine.running)
            samples += engine.load
            if engine.load > running:
                context += sum(job.context for job in (*engine.jobs_in_prefill(), *engine.waiting))
            if running:
                tokens, drafted = engine.speculation()
                context += tokens_there
                decode_steps.append((running, tokens, running * drafted))
        return Decoding(context / samples, *speculation(decode_steps), self._run.cluster.running) if samples else None

    def _curve(
        self, seconds_of: SecondsOfMany, context: float, tokens_per_step: float, drafts: float, most: int
    ) -> NDArray[np.float64]:
        """Return throughput by samples, computed once for all contexts of one bucket: step times are fixed here."""
        bucket = context_bucket(round(context))
        key = (bucket, round(100 * tokens_per_step), round(100 * drafts), most)
        if key not in self._curves:
            self._curves[key] = reallocation.throughput_by_samples(
                seconds_of, bucket, round(tokens_per_step, 2), round(drafts, 2), most
            )
        return self._curves[key]

    # Outliers

    def _outliers(self, now: float) -> None:
        run = self._run
        # Check only the step that will be completed next.
        for step, plan in sorted(run.plans.items())[:1]:
            for complete in [known for known in self._elsewhere if known < step]:
                del self._elsewhere[complete]
            factor = run.history.growth.beta(run.features.beta_floor)
            for place, group in enumerate(plan.rank_groups):
                if step not in run.plans or now < self._not_before.get((step, place), 0.0):
                    continue
                if plan.unfinished[place] > outliers.last_count(plan.samples[place], run.features.alpha):
                    continue
                where, lengths = self._of_rank_group(step, place, plan, now)
                self._still_running = {}
                for sample in outliers.outliers(
                    lengths, plan.samples[place], group.longest, factor, run.features.alpha
                ):
                    source = where[sample]
                    # An earlier outlier of the same prompt may have deferred this sample to the next step.
                    if sample in source.engine.running and sample not in source.below:
                        self._relocate(step, place, plan, sample, source, now)
                missing = factor * group.longest - max(lengths.values(), default=0)
                if missing > 0:
                    # The fastest possible step has one sample without context.
                    times = run.kinds[run.cluster.tensor_parallel].times
                    self._not_before[step, place] = now + missing * times.seconds(1, 0, 0) / plan.fastest

    def _of_rank_group(
        self, step: int, place: int, plan: StepPlan, now: float
    ) -> tuple[dict[int, Slot], dict[int, int]]:
        """Return the slots and the response lengths of a rank group's running samples, without deferred ones."""
        where: dict[int, Slot] = {}
        lengths: dict[int, int] = {}
        # If no sample of the rank group was moved, all of them are on the group's own engines.
        elsewhere = (step, place) in self._moved_from or self._run.features.reallocation
        of_slot = plan.rank_group_of
        at_work = [
            s
            for s in self._run.slots
            if s.engine.load and (elsewhere or of_slot[s.place] == place) and s.step == step and not s.beginning
        ]
        self._run.stop_at(at_work, now)
        # Collect samples on the group's own engines, then single samples that were moved.
        own = (slot for slot in at_work if plan.rank_group_of[slot.place] == place)
        found = [(sample, prompt, slot) for slot in own for sample, prompt in slot.engine.prompts_running()]
        looked_at = set(at_work)
        for sample, slot in self._elsewhere[step][place].items():
            if slot in looked_at and sample in slot.engine.running:
                found.append((sample, slot.engine.running[sample].job.prompt, slot))
        for sample, prompt, slot in found:
            if sample >> 32 == step and plan.group_of[prompt] == place and sample not in slot.below:
                where[sample], lengths[sample] = slot, int(slot.engine.generated(sample))
        return where, lengths

    def _relocate(self, step: int, rank_group: int, plan: StepPlan, sample: int, source: Slot, now: float) -> None:
        run = self._run
        job = source.engine.running[sample].job
        context = round(job.prompt_tokens + source.engine.generated(sample))
        engines = self._running_engines(step, plan, source.version)
        target = outliers.destination(context, rank_group, engines, source.place)
        if target.engine is not None:
            # A sample is moved at most once in a step, as in a live run.
            if sample not in self._moved:
                self._moved.add(sample)
                self._moved_from.add((step, rank_group))
                self._move(source, run.slots[target.engine], [sample], "outlier_intra")
                self._note_node(source.node, step, plan)
        elif run.features.defer and run.ledger.defer(step, (step, job.prompt)):
            # The whole prompt group trains in the next step. Its samples continue on their engines, and do not keep
            # these from beginning that step.
            for slot in run.slots:
                if slot.step == step and slot.engine.load:
                    alike = (sample for sample, prompt in slot.engine.prompts_running() if prompt == job.prompt)
                    own = {sample for sample in alike if sample >> 32 == step}
                    slot.below |= own
                    run.deferred |= own
                    plan.unfinished[rank_group] -= len(own)
                    run.result.count_moves("outlier_inter", len(own))
            run.look_for_batches(now)
            for slot in [slot for slot in run.slots if slot.below]:
                run.try_begin(slot, now)
            self._still_running = {}

    def _running_engines(self, step: int, plan: StepPlan, version: int) -> outliers.RunningEngines:
        """Return the engines that run samples of the step with these weights.

        They are collected once for all outliers of a rank group.
        """
        if version not in self._still_running:
            self._still_running[version] = outliers.RunningEngines(
                _running_engine(slot, plan) for slot in self._run.slots if _runs(slot, step) and slot.version == version
            )
        return self._still_running[version]

    def _note_node(self, node: int, step: int, plan: StepPlan) -> None:
        """Refresh the entries of a node's engines after a sample has left one of them.

        The engines of a node may share compute, so any of them may have changed.
        """
        each = self._run.cluster.devices // self._run.cluster.tensor_parallel
        for slot in self._run.slots[node * each : (node + 1) * each]:
            for engines in self._still_running.values():
                engines.remove(slot.place)
            if _runs(slot, step) and slot.version in self._still_running:
                self._still_running[slot.version].put(_running_engine(slot, plan))


def _runs(slot: Slot, step: int) -> bool:
    return slot.step == step and slot.engine.load > 0 and not slot.beginning


def _running_engine(slot: Slot, plan: StepPlan) -> outliers.RunningEngine:
    engine = slot.engine
    return outliers.RunningEngine(slot.place, plan.rank_group_of[slot.place], engine.load, engine.free_tokens)


class _Samples(Sequence[RunningSample]):
    """The samples of an engine at one moment, built only on access because most engines give none away."""

    def __init__(self, engine: Engine, now: float) -> None:
        self._engine, self._now = engine, now

    def __len__(self) -> int:
        return self._engine.load

    @overload
    def __getitem__(self, place: int) -> RunningSample: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[RunningSample]: ...

    def __getitem__(self, place: int | slice) -> RunningSample | Sequence[RunningSample]:
        return self._made[place]

    def __iter__(self) -> Iterator[RunningSample]:
        return iter(self._made)

    @cached_property
    def _made(self) -> list[RunningSample]:
        found = self._engine.contexts_at(self._now)
        found += [(round(job.context), _accepted(job), job.sample) for job in self._engine.waiting]
        # Samples in prefill count as load, but cannot be moved.
        return found + [
            (round(job.context), _accepted(job), -1 - place) for place, job in enumerate(self._engine.jobs_in_prefill())
        ]


def _accepted(job: Job) -> float:
    """Return the draft tokens that a waiting sample accepted per step, as an engine reports it: 0 before its first."""
    return job.tokens_per_step - 1 if job.generated else 0.0
