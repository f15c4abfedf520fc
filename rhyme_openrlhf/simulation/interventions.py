"""What happens to running samples: outliers and reallocation, as the policies of `scheduling/` order them.

Looks at the engines come at a set interval, as the live system's status does. Engines first go to the end of the step
they are in: nothing is taken out of a step. TP switches are in `layout_changes.py`.

Invariants: no decision is made here; what leaves one engine arrives at another, once, where the weights are the same;
what is on its way is in no decision; only engines of the first layout give and take single samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, overload

from rhyme_openrlhf.latency.predictor import SecondsOfMany
from rhyme_openrlhf.latency.step_model import context_bucket
from rhyme_openrlhf.scheduling import outliers, reallocation
from rhyme_openrlhf.scheduling.engine_status import speculation
from rhyme_openrlhf.scheduling.reallocation import EngineLoad, RunningSample
from rhyme_openrlhf.scheduling.reallocation_policy import Decoding, ReallocationPolicy
from rhyme_openrlhf.simulation.carrying import Carried
from rhyme_openrlhf.simulation.engine import Engine
from rhyme_openrlhf.simulation.job import Job
from rhyme_openrlhf.simulation.layout_changes import LayoutChanges
from rhyme_openrlhf.simulation.planner import StepPlan
from rhyme_openrlhf.simulation.slot import Slot

if TYPE_CHECKING:
    from rhyme_openrlhf.simulation.run import Run


class Interventions:
    """Those of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._policy = ReallocationPolicy(run.features.threshold, run.features.cooldown, self._knee)
        self._knees: dict[tuple[int, int, int, int], int] = {}
        self._policy.predictor = run.predictors[run.cluster.tensor_parallel]
        self._moved: set[int] = set()
        # (step, rank group) of which a sample is elsewhere.
        self._moved_from: set[tuple[int, int]] = set()
        # Of each step and rank group: where samples went that were moved, for the steps that are not complete.
        self._elsewhere: dict[int, dict[int, dict[int, Slot]]] = defaultdict(lambda: defaultdict(dict))
        # Of (step, rank group): before, none of its samples can be an outlier.
        self._not_before: dict[tuple[int, int], float] = {}
        # Of the rank group that is looked at, by weight version.
        self._still_running: dict[int, outliers.RunningEngines] = {}
        self.layouts = LayoutChanges(run)

    def begin(self) -> None:
        """The first look at the engines."""
        features = self._run.features
        if features.outliers or features.reallocation:
            self._run.at(features.interval, self._look)

    def _look(self, now: float) -> None:
        if len(self._run.complete) > len(self._run.workload.steps):
            return
        self._run.at(now + self._run.features.interval, self._look)
        if self._run.features.outliers:
            self._outliers(now)
        if self._run.features.reallocation:
            self._reallocate(now)

    def _move(self, source: Slot, target: Slot, samples: Iterable[int], cause: str) -> None:
        run = self._run
        jobs = source.engine.take(set(samples))
        source.below.difference_update(job.sample for job in jobs)
        run.result.count_moves(cause, len(jobs))
        stopped = source.engine.now
        sent, again = run.carrying.chosen(jobs, source, target)
        for job in jobs:
            job.computed = False
            plan = run.plans.get(job.sample >> 32)
            if run.features.outliers and plan is not None and plan.rank_groups:
                self._elsewhere[job.sample >> 32][plan.group_of[job.prompt]][job.sample] = target
        target.arriving += len(jobs)
        if sent:
            seconds = source.engine.kind.transfer.kv_transfer_seconds([one.context for one in sent])
            run.at(stopped + seconds, lambda time: self._arrive_sent(target, sent, stopped, time))
        if again:
            # The target computes them, beside its other samples.
            run.at(stopped, lambda time: self._arrive(target, [one.job for one in again], time))
        run.ended(source, [])

    def _arrive_sent(self, slot: Slot, sent: list[Carried], stopped: float, now: float) -> None:
        for one in sent:
            one.job.computed = True
        self._arrive(slot, [one.job for one in sent], now)
        self._run.carrying.arrived(sent, max(now, slot.engine.now) - stopped)

    def _arrive(self, slot: Slot, jobs: list[Job], now: float) -> None:
        # Those that end meanwhile must not let it begin its next step.
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
            # Going to the end of its step, it may have ended some.
            still = [sample for sample in order.samples if sample in source.engine.running]
            if still and not source.beginning:
                self._move(source, run.slots[order.destination], still, "reallocation")

    def _decoding(self, slots: Sequence[Slot], contexts: Sequence[float]) -> Decoding | None:
        """What live engines' reports come to in the mean; `contexts`: of each engine's running samples in all."""
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
                context += sum(job.context for job in engine.jobs_waiting())
            if running:
                tokens, drafted = engine.speculation()
                context += tokens_there
                decode_steps.append((running, tokens, running * drafted))
        return Decoding(context / samples, *speculation(decode_steps), self._run.cluster.running) if samples else None

    def _knee(self, seconds_of: SecondsOfMany, context: float, tokens_per_step: float, drafts: float, most: int) -> int:
        """The knee, asked once for contexts that step times do not tell apart: these never change here."""
        bucket = context_bucket(round(context))
        key = (bucket, round(100 * tokens_per_step), round(100 * drafts), most)
        if key not in self._knees:
            self._knees[key] = reallocation.speculative_knee(
                seconds_of, bucket, round(tokens_per_step, 2), round(drafts, 2), most
            )
        return self._knees[key]

    # Outliers

    def _outliers(self, now: float) -> None:
        run = self._run
        # The step that is completed next.
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
                    # A sibling before it may have taken it along to the next step.
                    if sample in source.engine.running and sample not in source.below:
                        self._relocate(step, place, plan, sample, source, now)
                missing = factor * group.longest - max(lengths.values(), default=0)
                if missing > 0:
                    # No step is quicker than that of one sample without context.
                    times = run.kinds[run.cluster.tensor_parallel].times
                    self._not_before[step, place] = now + missing * times.seconds(1, 0, 0) / plan.fastest

    def _of_rank_group(
        self, step: int, place: int, plan: StepPlan, now: float
    ) -> tuple[dict[int, Slot], dict[int, int]]:
        """Where samples of a rank group run, and how long they are; without those of deferred prompt groups."""
        where: dict[int, Slot] = {}
        lengths: dict[int, int] = {}
        # Where nothing of it was moved, its samples are on its own engines.
        elsewhere = (step, place) in self._moved_from or self._run.features.reallocation
        of_slot = plan.rank_group_of
        at_work = [
            s
            for s in self._run.slots
            if s.engine.load and (elsewhere or of_slot[s.place] == place) and s.step == step and not s.beginning
        ]
        self._run.stop_at(at_work, now)
        # On its own engines, and where single ones went.
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
            # Once in a step, as in a run.
            if sample not in self._moved:
                self._moved.add(sample)
                self._moved_from.add((step, rank_group))
                self._move(source, run.slots[target.engine], [sample], "outlier_intra")
                self._note_node(source.node, step, plan)
        elif run.features.defer and run.ledger.defer(step, (step, job.prompt)):
            # All of the prompt group trains in the next step. They go on where they are, below the engines' next one.
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
        """Those that run samples of the step with these weights; made once for the outliers of a rank group."""
        if version not in self._still_running:
            self._still_running[version] = outliers.RunningEngines(
                _running_engine(slot, plan) for slot in self._run.slots if _runs(slot, step) and slot.version == version
            )
        return self._still_running[version]

    def _note_node(self, node: int, step: int, plan: StepPlan) -> None:
        """A sample has left one of its engines, and these may share what computes: all may be others by now."""
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
    """An engine's samples as of a moment; made only if they are looked at, since most engines give none away."""

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
        # What waits counts, and cannot be moved.
        return found + [
            (round(job.context), job.tokens_per_step - 1, -1 - place)
            for place, job in enumerate(self._engine.jobs_waiting())
        ]
