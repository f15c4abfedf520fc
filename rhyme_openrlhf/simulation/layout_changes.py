"""TP switches: a node's samples go on at engines of more devices each, as `scheduling/tp_switch.py` orders it.

With dispatch by history, and all engines beginning a step together, a node may also begin it with such engines
(`scheduling/first_layouts.py`).

Considered whenever samples of a node have ended, if all of its engines are at the same step with the same weights: a
sample's weights never change on the way. In the pipeline that is where engines of the node that are done wait for
weights. While the other layout has samples, none of the node's engines begins its next step; the rule, which knows of
one step only, does not count what that costs.

Invariants: no decision is made here; a node's devices belong to one layout at a time; what is switched is every sample
of the node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rhyme_openrlhf.scheduling import tp_switch
from rhyme_openrlhf.scheduling.engine_status import speculation
from rhyme_openrlhf.scheduling.first_layouts import FirstLayouts, first_layouts
from rhyme_openrlhf.scheduling.stage_course import Layout, UnfinishedSamples
from rhyme_openrlhf.scheduling.step_plan import Speculation
from rhyme_openrlhf.scheduling.tp_switch import in_turn
from rhyme_openrlhf.simulation.engine import Job
from rhyme_openrlhf.simulation.slot import SimulatedRun, Slot
from rhyme_openrlhf.simulation.workload import StepLoad

# A node is asked about a TP switch again when this part of its samples has ended since it was last asked.
ASK_AGAIN = 1 / 8


class LayoutChanges:
    """The layout changes of one run."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        sizes = sorted(run.profiles) if run.features.switching != "off" else []
        self._sizes = [size for size in sizes if size >= run.cluster.tensor_parallel and not run.cluster.devices % size]
        if run.features.switching != "off" and len(self._sizes) < 2:
            raise ValueError(
                f"TP switching needs a profile of a larger tensor-parallel size than {run.cluster.tensor_parallel}, "
                f"one that divides the {run.cluster.devices} devices of a node; those given are of {sizes}"
            )
        self._tails: dict[int, dict[int, list[Slot]]] = defaultdict(dict)
        self._layout: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        # Of each node, the layout that it begins the planned step with; empty: all begin with the aligned one.
        self._first: tuple[int, ...] = ()
        self._cost = tp_switch.SwitchCost(fixed_s=run.cluster.switch_seconds)
        self._nodes: dict[int, list[Slot]] = defaultdict(list)
        for slot in run.slots:
            self._nodes[slot.node].append(slot)

    def aligned(self, node: int) -> bool:
        """Return whether the node's devices belong to the engines that steps begin on."""
        return node not in self._layout

    def tail_slots(self) -> list[Slot]:
        """Return the engines of layouts that were switched to."""
        return [slot for layouts in self._tails.values() for slots in layouts.values() for slot in slots]

    def after_ends(self, slot: Slot, now: float) -> None:
        """Samples of the engine have ended: is it time for another layout of its node?"""
        run = self._run
        if len(self._sizes) < 2:
            return
        slots = self._active(slot.node)
        count = sum([s.engine.load for s in slots])
        asked = self._asked.get(slot.node)
        if not count or (asked is not None and asked > count > asked * (1 - ASK_AGAIN)):
            return
        if any(s.beginning or s.arriving or s.below or s.engine.waiting or s.step != slot.step for s in slots):
            return
        if len({s.version for s in slots if s.engine.load}) > 1:
            return
        self._asked[slot.node] = count
        run.stop_at(slots, now)
        # Engines that ended there may have begun their next step.
        if slots != self._active(slot.node) or any(s.beginning or s.step != slot.step for s in slots):
            return
        sizes = self._sizes
        current = sizes.index(self._layout.get(slot.node, run.cluster.tensor_parallel))
        if not tp_switch.larger(current, sizes):
            return
        samples: list[tuple[int, int, float]] = []
        on: list[int] = []
        for place, s in enumerate(slots):
            running = s.engine.prompts_at_work()
            samples += running
            on += [place] * len(running)
        if not samples or len(samples) != sum([s.engine.load for s in slots]):
            return
        at_work = [(len(s.engine.running), *s.engine.speculation()) for s in slots]
        gained, drafts = speculation((count, tokens, count * drafted) for count, tokens, drafted in at_work)
        order = tp_switch.decide(
            current,
            self._layouts(gained, drafts),
            self._unfinished(samples),
            run.workload.longest,
            self._switch_seconds(),
            run.features.switching == "history",
            on,
        )
        if order is not None:
            self._switch(slot.node, slots, sizes[order.target])

    def _layouts(self, tokens_per_step: float, drafts_per_step: float) -> list[Layout]:
        """Return the layouts of a node, with this speculation."""
        return [
            Layout(
                size,
                self._run.cluster.devices // size,
                of.step_seconds,
                tokens_per_step,
                drafts_per_step,
                of.seconds_of,
            )
            for size, of in ((size, self._run.predictors[size]) for size in self._sizes)
        ]

    def _switch_seconds(self) -> tp_switch.SwitchSeconds:
        return self._cost.between([self._run.kinds[size].transfer for size in self._sizes])

    def first(self, load: StepLoad, verified: Speculation) -> FirstLayouts | None:
        """Return the layouts that the nodes begin the next step with; None: that of the engines that steps begin on."""
        run, features, found = self._run, self._run.features, None
        chooses = features.dispatch and not features.as_placed and features.trainer != "pipeline"
        if features.switching == "history" and chooses:
            found = first_layouts(
                run.cluster.nodes,
                self._layouts(verified.tokens_per_step, verified.drafts_per_step),
                [run.history.lengths(prompt.prompt) for prompt in load.prompts],
                len(load.prompts[0].lengths),
                run.cluster.running,
                [run.kinds[size].kv_tokens for size in self._sizes],
                self._switch_seconds(),
            )
        self._first = found.layouts if found else ()
        return found

    def begin(self, slot: Slot, now: float) -> bool:
        """Begin the step at larger engines if the slot's node does; return whether it does."""
        run, slots = self._run, self._nodes[slot.node]
        if not self._first or not self._first[slot.node]:
            return False
        if all(not other.beginning and other.step == slot.step for other in slots):
            size = self._sizes[self._first[slot.node]]
            for other in slots:
                run.idle_ends(other, now)
            jobs = [run.plans[slot.step].jobs[other.place] for other in slots]
            self._open(slot.node, size, slot, now, jobs[: len(self._tail(slot.node, size))])
        return True

    def _unfinished(self, samples: Sequence[tuple[int, int, float]]) -> UnfinishedSamples:
        """Return these samples as the policy takes them, in whole tokens; `samples`: as `Engine.prompts_at_work`."""
        prompts, prompt_tokens, generated = zip(*samples, strict=True)
        rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        tokens = np.array(generated, dtype=np.float64)
        return UnfinishedSamples(
            tokens.astype(np.int64),
            np.rint(tokens + prompt_tokens).astype(np.int64),
            np.array(list(map(rows.__getitem__, prompts))),
            [self._run.history.column(prompt) for prompt in rows],
        )

    def _active(self, node: int) -> list[Slot]:
        layout = self._layout.get(node)
        return self._nodes[node] if layout is None else self._tails[node][layout]

    def _carry(self, jobs: Sequence[Job], source: Slot, tails: Sequence[Slot]) -> tuple[float, list[list[Job]]]:
        """Return how long the samples' way to the tail engines takes, and those that each of them gets."""
        run = self._run
        dealt: list[list[Job]] = [[] for _ in tails]
        for place, tail in in_turn([int(job.generated) for job in jobs], len(tails)):
            dealt[tail].append(jobs[place])
        ways = [run.carrying.chosen(own, source, tail) for own, tail in zip(dealt, tails, strict=True)]
        sent, again = ([one for way in ways for one in way[carrier]] for carrier in (0, 1))
        seconds = run.cluster.switch_seconds + max(
            source.engine.kind.transfer.kv_transfer_seconds([one.context for one in sent]) if sent else 0.0,
            tails[0].engine.kind.transfer.prefill_seconds([one.context for one in again]) if again else 0.0,
        )
        run.carrying.arrived((*sent, *again), seconds)
        self._cost.learn(
            seconds + max(one.there.next_step_s for one in (*sent, *again)),
            source.engine.kind.transfer,
            tails[0].engine.kind.transfer,
            [one.context for one in (*sent, *again)],
        )
        return seconds, dealt

    def _switch(self, node: int, slots: Sequence[Slot], target: int) -> None:
        run = self._run
        latest = max(slots, key=lambda slot: (slot.engine.load > 0, slot.version))
        jobs: list[Job] = []
        begin = max(slot.engine.now for slot in slots)
        for slot in slots:
            if slot.idle_since is None:
                slot.idle_since = slot.engine.now
            jobs += slot.engine.take_all()
            slot.stamp += 1
            # Until the last of them has ended the step it was in.
            run.idle_ends(slot, begin)
        seconds, dealt = self._carry(jobs, slots[0], self._tail(node, target))
        ready = begin + seconds
        run.result.accounts.add("switch", run.cluster.devices, begin, ready)
        run.result.switches += 1
        run.result.count_moves("tp_switch", len(jobs))
        for job in jobs:
            job.computed = True
        self._open(node, target, latest, ready, dealt)

    def _tail(self, node: int, size: int) -> list[Slot]:
        """Return the node's engines of this size, made once."""
        if size not in self._tails[node]:
            count = self._run.cluster.devices // size
            self._tails[node][size] = [Slot(-1, node, size, self._run.engine(size)) for _ in range(count)]
        return self._tails[node][size]

    def _open(self, node: int, size: int, like: Slot, ready: float, dealt: Sequence[Sequence[Job]]) -> None:
        """Give a node's devices to its engines of this size, and these their samples; `like`: a slot as they are."""
        run = self._run
        self._layout[node] = size
        for own, tail in zip(dealt, self._tail(node, size), strict=True):
            run.count_busy(tail)
            tail.step, tail.version, tail.idle_since = like.step, like.version, ready
            tail.engine.slow_down(like.engine.slowness)
            tail.engine.now = max(tail.engine.now, ready)
            if own:
                run.give(tail, list(own), ready)

    def drained(self, tail: Slot, now: float) -> None:
        """Give the node's devices back, at no cost, once no engine of its other layout has anything left."""
        layout = self._layout.get(tail.node)
        if layout is None or not all(slot.engine.idle for slot in self._tails[tail.node][layout]):
            return
        del self._layout[tail.node]
        self._asked.pop(tail.node, None)
        # Engines go to the end of their steps: the last one may lie behind `now`.
        now = max(now, *(slot.engine.now for slot in self._tails[tail.node][layout]))
        for slot in self._tails[tail.node][layout]:
            self._run.idle_ends(slot, now)
        for own in self._nodes[tail.node]:
            own.idle_since = now
            own.engine.now = max(own.engine.now, now)
        for own in self._nodes[tail.node]:
            self._run.try_begin(own, now)
