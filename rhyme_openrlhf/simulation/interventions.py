"""What happens to running samples: outliers, reallocation and TP switches, as the policies of `scheduling/` order them.

Looks at the engines come at a set interval, as the live system's status does; a TP switch is also considered whenever
samples of a node have ended. Engines first go to the end of the step they are in: nothing is taken out of a step.

Invariants: no decision is made here; what leaves one engine arrives at another, once; a node's devices belong to one
layout at a time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhyme_openrlhf.scheduling import outliers, reallocation, tp_switch
from rhyme_openrlhf.scheduling.carriers import cheaper
from rhyme_openrlhf.scheduling.dispatch import assign
from rhyme_openrlhf.scheduling.remaining_lengths import Unfinished
from rhyme_openrlhf.simulation.engine import Job
from rhyme_openrlhf.simulation.planner import StepPlan
from rhyme_openrlhf.simulation.slot import Slot

if TYPE_CHECKING:
    from rhyme_openrlhf.simulation.run import Run

# A node is asked about a TP switch again when this part of its samples has ended since it was last asked.
ASK_AGAIN = 1 / 8


class Interventions:
    """Those of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._cooldown = reallocation.Cooldown(run.features.cooldown)
        self._thresholds: dict[tuple[int, int], int] = {}
        sizes = sorted(run.profiles) if run.features.switching != "off" else []
        self._not_before: dict[tuple[int, int], float] = {}
        self._sizes = [size for size in sizes if size >= run.cluster.tensor_parallel and not run.cluster.devices % size]
        if run.features.switching != "off" and len(self._sizes) < 2:
            raise ValueError(
                f"TP switching needs a profile of a larger tensor-parallel size than {run.cluster.tensor_parallel}, "
                f"one that divides the {run.cluster.devices} devices of a node; those given are of {sizes}"
            )
        self._tails: dict[int, dict[int, list[Slot]]] = defaultdict(dict)
        self._layout: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._nodes: dict[int, list[Slot]] = defaultdict(list)
        for slot in run.slots:
            self._nodes[slot.node].append(slot)

    def begin(self) -> None:
        """The first look at the engines."""
        features = self._run.features
        if features.outliers or features.reallocation:
            self._run.at(features.interval, self._look)

    def tail_slots(self) -> list[Slot]:
        """The engines of layouts that were switched to."""
        return [slot for layouts in self._tails.values() for slots in layouts.values() for slot in slots]

    def _look(self, now: float) -> None:
        if len(self._run.complete) > len(self._run.workload.steps):
            return
        self._run.at(now + self._run.features.interval, self._look)
        if self._run.features.reallocation:
            self._reallocate(now)
        if self._run.features.outliers:
            self._outliers(now)

    def _stop_at(self, slots: Sequence[Slot], now: float) -> None:
        """To the end of the step that is going on, wherever one is."""
        for slot in slots:
            if not slot.engine.idle:
                self._run.ended(slot, slot.engine.run_until(now))

    def _count(self, cause: str, samples: int) -> None:
        self._run.result.moves[cause] = self._run.result.moves.get(cause, 0) + samples

    def _move(self, source: Slot, target: Slot, samples: Sequence[int], cause: str) -> None:
        jobs = source.engine.take(set(samples))
        self._count(cause, len(jobs))
        carrier = cheaper(
            [round(job.context) for job in jobs], source.engine.kind.transfer, target.engine.kind.transfer
        )
        sent = carrier.name == "transfer"
        for job in jobs:
            job.computed = sent
        # What is computed again is computed by the target, beside its other samples.
        self._run.at(
            source.engine.now + (carrier.seconds if sent else 0.0), lambda time: self._arrive(target, jobs, time)
        )
        self._run.ended(source, [])

    def _arrive(self, slot: Slot, jobs: list[Job], now: float) -> None:
        self._stop_at([slot], now)
        self._run.give(slot, jobs, max(now, slot.engine.now))

    # Reallocation

    def _reallocate(self, now: float) -> None:
        run = self._run
        slots = [slot for slot in run.slots if slot.node not in self._layout and not slot.beginning]
        loads = [slot.engine.load for slot in slots]
        if not any(loads) or max(loads) - min(loads) < 2:
            return
        if not self._cooldown.due(max(slot.engine.counts.steps for slot in slots)):
            return
        self._stop_at(slots, now)
        slots = [slot for slot in slots if not slot.beginning and not slot.engine.waiting]
        reports = []
        for slot in slots:
            running = tuple(
                reallocation.RunningSample(job.sample, round(job.context), job.tokens_per_step - 1)
                for job in slot.engine.jobs_running()
            )
            reports.append(reallocation.EngineLoad(slot.place, running, slot.engine.free_tokens))
        contexts = [sample.context for report in reports for sample in report.running]
        if not contexts:
            return
        threshold = run.features.threshold or self._threshold(statistics.fmean(contexts))
        for order in reallocation.reallocate(reports, threshold):
            self._move(run.slots[order.source], run.slots[order.destination], order.samples, "reallocation")

    def _threshold(self, context: float) -> int:
        """The knee, at this many tokens a sample; asked once for contexts that differ by less than an eighth."""
        run = self._run
        bucket = round(context).bit_length() * 8 + int(context / 2 ** round(context).bit_length() * 8)
        key = (bucket, round(run.rates.tokens_per_step * 100))
        if key not in self._thresholds:
            seconds = run.predictors[run.cluster.tensor_parallel].step_seconds
            rates = run.rates
            self._thresholds[key] = reallocation.speculative_knee(
                seconds, context, rates.tokens_per_step, rates.drafts_per_step, run.cluster.running
            )
        return self._thresholds[key]

    # Outliers

    def _outliers(self, now: float) -> None:
        run = self._run
        for step, plan in sorted(run.plans.items()):
            factor = run.history.growth_factor(run.workload.steps[step - 1].epoch, run.features.beta_floor)
            for place, group in enumerate(plan.rank_groups):
                # Before, none of its samples can be so long.
                if step not in run.plans or now < self._not_before.get((step, place), 0.0):
                    continue
                own = [s for s in run.slots if plan.rank_group_of[s.place] == place]
                samples = sum(len(plan.jobs[slot.place]) for slot in own)
                at_work = [slot for slot in own if slot.step == step and slot.engine.load]
                if sum(slot.engine.load for slot in at_work) > outliers.last_count(samples, run.features.alpha):
                    continue
                self._stop_at(at_work, now)
                where: dict[int, Slot] = {}
                lengths: dict[int, int] = {}
                for slot in at_work:
                    for job in slot.engine.jobs_running():
                        # A sample deferred from the step before is none of this step's.
                        if job.sample >> 32 == step:
                            where[job.sample], lengths[job.sample] = slot, int(job.generated)
                for sample in outliers.outliers(lengths, samples, group.longest, factor, run.features.alpha):
                    self._relocate(step, place, plan, sample, where[sample], now)
                missing = factor * group.longest - max(lengths.values(), default=0)
                if missing > 0:
                    # No step is quicker than that of one sample without context.
                    times = run.kinds[run.cluster.tensor_parallel].times
                    quickest = times.seconds(1, 0, 0) / run.rates.tokens_per_step
                    self._not_before[step, place] = now + missing * quickest

    def _relocate(self, step: int, rank_group: int, plan: StepPlan, sample: int, source: Slot, now: float) -> None:
        run = self._run
        engines = [
            outliers.RunningEngine(s.place, plan.rank_group_of[s.place], s.engine.load, s.engine.free_tokens)
            for s in run.slots
            if s.step == step and s.engine.load and not s.beginning
        ]
        job = next(job for job in source.engine.jobs_running() if job.sample == sample)
        target = outliers.destination(round(job.context), rank_group, engines)
        if target.engine is not None:
            self._move(source, run.slots[target.engine], [sample], "outlier_intra")
        elif run.features.defer and run.ledger.defer(step, (step, job.prompt)):
            # It goes on beside the engine's samples of the next step, computed again there.
            jobs = source.engine.take({sample})
            for job in jobs:
                job.computed = False
            run.carried.setdefault(source.place, []).extend(jobs)
            self._count("outlier_inter", len(jobs))
            run.ended(source, [])
            run.look_for_batches(now)

    # TP switches

    def after_ends(self, slot: Slot, now: float) -> None:
        """Samples of the engine have ended: is it time for another layout of its node?"""
        run = self._run
        if len(self._sizes) < 2:
            return
        slots = self._active(slot.node)
        if any(s.beginning or s.engine.waiting or s.step != slot.step for s in slots):
            return
        count = sum(s.engine.load for s in slots)
        asked = self._asked.get(slot.node)
        if not count or (asked is not None and asked > count > asked * (1 - ASK_AGAIN)):
            return
        self._asked[slot.node] = count
        self._stop_at(slots, now)
        placed = [(place, job) for place, s in enumerate(slots) for job in s.engine.jobs_running()]
        jobs = [job for _, job in placed]
        if not jobs or len(jobs) != sum(s.engine.load for s in slots):
            return
        sizes = self._sizes
        current = sizes.index(self._layout.get(slot.node, run.cluster.tensor_parallel))
        layouts = [
            tp_switch.Layout(
                size,
                run.cluster.devices // size,
                run.predictors[size].step_seconds,
                run.rates.tokens_per_step,
                run.rates.drafts_per_step,
            )
            for size in sizes
        ]
        samples = [Unfinished(int(job.generated), round(job.context), run.history.lengths(job.prompt)) for job in jobs]
        order = tp_switch.decide(
            current,
            layouts,
            samples,
            run.workload.longest,
            lambda source, target, contexts: self._switch_seconds(sizes[source], sizes[target], contexts),
            run.features.switching == "history",
            [place for place, _ in placed],
        )
        if order is not None:
            self._switch(slot.node, slots, sizes[current], sizes[order.target])

    def _active(self, node: int) -> list[Slot]:
        layout = self._layout.get(node)
        return self._nodes[node] if layout is None else self._tails[node][layout]

    def _switch_seconds(self, source: int, target: int, contexts: Sequence[int]) -> float:
        run = self._run
        moved = cheaper(contexts, run.kinds[source].transfer, run.kinds[target].transfer).seconds
        return moved + run.cluster.switch_seconds

    def _switch(self, node: int, slots: Sequence[Slot], size: int, target: int) -> None:
        run = self._run
        self._layout[node] = target
        step = max(slot.step for slot in slots)
        if target not in self._tails[node]:
            count = run.cluster.devices // target
            self._tails[node][target] = [Slot(-1, node, target, run.engine(target)) for _ in range(count)]
        jobs: list[Job] = []
        begin = max(slot.engine.now for slot in slots)
        for slot in slots:
            if slot.idle_since is None:
                slot.idle_since = slot.engine.now
            jobs += slot.engine.take_all()
            slot.stamp += 1
            # Until the last of them has ended the step it was in.
            run.idle_ends(slot, begin)
        contexts = [round(job.context) for job in jobs]
        ready = begin + self._switch_seconds(size, target, contexts)
        run.result.accounts.add("switch", run.cluster.devices, begin, ready)
        run.result.switches += 1
        self._count("tp_switch", len(jobs))
        tails = self._tails[node][target]
        chosen = assign([1.0] * len(jobs), [0.0] * len(tails))
        for place, tail in enumerate(tails):
            own = [job for job, at in zip(jobs, chosen, strict=True) if at == place]
            for job in own:
                job.computed = True
            tail.step, tail.idle_since = step, ready
            tail.engine.now = max(tail.engine.now, ready)
            if own:
                run.give(tail, own, ready)

    def back_to_aligned(self, slot: Slot, now: float) -> None:
        """The next step begins: the node's devices go back to the layout they began with, at no cost."""
        layout = self._layout.pop(slot.node, None)
        self._asked.pop(slot.node, None)
        if layout is None:
            return
        for tail in self._tails[slot.node][layout]:
            self._run.idle_ends(tail, now)
        for own in self._nodes[slot.node]:
            own.idle_since = now
