"""Adaptive tensor parallelism while a run generates: asks the policy, and moves a node's samples to its tail layout.

Beside the samples' home. Nodes are independent. Invariants: nothing switches while prompts of the step are still to
come, or while other moves of the node are under way (so an outlier and a reallocation come first: they decide on single
samples, a switch on all that they left); samples go only if the tail engines have room for all of them; one that could
not be moved goes on where it is and is not asked again; the aligned engines stay as they are, so the next step's
prompts go there without anything being switched back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence

from rhyme_openrlhf.rollout.moves.convoy import Convoy
from rhyme_openrlhf.rollout.moves.engine_port import EngineLost, OrderFailed
from rhyme_openrlhf.rollout.moves.engine_reports import EngineReports
from rhyme_openrlhf.rollout.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.rollout.moves.mover import MoveRecord
from rhyme_openrlhf.scheduling.engine_status import EngineStatus
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.scheduling.move import MoveRefused, Phase
from rhyme_openrlhf.scheduling.remaining_lengths import Unfinished
from rhyme_openrlhf.scheduling.tp_switch import Layout, decide
from rhyme_openrlhf.scheduling.tp_switch_settings import BY_HISTORY, TpSwitchSettings
from rhyme_openrlhf.telemetry.events import LayoutSwitched

CAUSE = "tp_switch"
ALIGNED, TAIL = 0, 1
# Before a switch was made: about what a move takes from a sample with steps of some milliseconds (docs/benchmarks.md).
EACH_SECONDS = 0.02
# Weight of one switch in what a sample's move is taken to cost.
RATE = 0.5
MOVED = (Phase.RUNNING, Phase.RECOMPUTED)


class LayoutSwitcher:
    """That of one home. `move(sample, destination, cause, convoy)` orders a move and says how it ended;
    `record(event)`; `step()`: the training step; `admitted()`: whether all prompts of it have come.
    """

    def __init__(
        self,
        settings: TpSwitchSettings,
        plan: LayoutPlan,
        keeper: SampleKeeper,
        reports: EngineReports,
        move: Callable[[int, int, str, Convoy], Awaitable[MoveRecord]],
        record: Callable[[LayoutSwitched], None],
        step: Callable[[], int],
        admitted: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._keeper = keeper
        self._reports = reports
        self._move = move
        self._record = record
        self._step = step
        self._admitted = admitted
        self._nodes: dict[str, tuple[list[int], list[int]]] = {}
        self._lengths: dict[str, tuple[int, ...]] = {}
        self._each_s = EACH_SECONDS
        self._stuck: set[str] = set()
        self._switching: dict[str, asyncio.Task[None]] = {}

    def place(self, nodes: Mapping[int, str]) -> None:
        """On which node each engine is."""
        for number, node in nodes.items():
            self._nodes.setdefault(node, ([], []))[self._reports.layout(number)].append(number)

    def know_lengths(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """How long prompts (`prompt_key`) were answered before; replaces what was known."""
        self._lengths = {key: tuple(of_prompt) for key, of_prompt in lengths.items()}

    def stop(self) -> None:
        """Order nothing more."""
        for task in self._switching.values():
            task.cancel()

    def look(self) -> None:
        """Begin the switches that the newest reports make worth it."""
        if not self._admitted():
            return
        for node, (aligned, tail) in self._nodes.items():
            if node in self._switching:
                continue
            samples = [sample for engine in aligned for sample in self._keeper.samples(engine)]
            going = [sample for sample in samples if sample.name not in self._stuck]
            if going and not any(sample.moving for sample in samples) and self._is_worth_it(going, tail):
                task = asyncio.create_task(self._switch(node, going, tail))
                self._switching[node] = task
                task.add_done_callback(functools.partial(self._over, node))

    def _over(self, node: str, task: asyncio.Task[None]) -> None:
        del self._switching[node]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._reports.tell(f"adaptive tensor parallelism: {type(error).__name__}: {error}")

    def _is_worth_it(self, samples: Sequence[KeptSample], tail: Sequence[int]) -> bool:
        there = {status.engine: status for status in self._reports.fresh(TAIL) if status.engine in tail}
        if not tail or len(there) < len(tail) or not all(status.open for status in there.values()):
            return False
        here = [status for status in self._reports.fresh(ALIGNED) if status.samples]
        contexts = {s.place: s.context for status in here for s in status.samples}
        unfinished = [self._unfinished(sample, contexts) for sample in samples]
        if not has_room([sample.context for sample in unfinished], list(there.values())):
            return False
        if self._settings.samples:
            return len(samples) <= self._settings.samples
        predictors = self._reports.predictors
        if ALIGNED not in predictors or TAIL not in predictors:
            return False
        gained, drafts = speculation(here)
        layouts = [
            Layout(size, engines, predictors[layout].step_seconds, gained, drafts, predictors[layout].seconds_of)
            for layout, size, engines in (
                (ALIGNED, self._plan.size, len({sample.engine for sample in samples} | {s.engine for s in here})),
                (TAIL, self._plan.tail_size, len(tail)),
            )
        ]
        longest = self.longest_allowed(samples)
        # All are on one: that is how they were found.
        on = [sample.engine for sample in samples if sample.engine is not None]
        by_history = self._settings.rule == BY_HISTORY
        order = decide(ALIGNED, layouts, unfinished, longest, self._switch_seconds, by_history, on)
        return order is not None

    def longest_allowed(self, samples: Sequence[KeptSample]) -> int:
        """Tokens of the longest response that is allowed to any of these samples."""
        return max(sample.request.parameters.max_tokens or 0 for sample in samples)

    def _unfinished(self, sample: KeptSample, contexts: Mapping[str, int]) -> Unfinished:
        prompt = len(sample.request.prompt)
        context = max(contexts.get(sample.place, 0), prompt + len(sample.known.tokens))
        return Unfinished(context - prompt, context, self._lengths.get(sample.request.history or "", ()))

    def _switch_seconds(self, _: int, __: int, contexts: Sequence[int]) -> float:
        return self._each_s * len(contexts)

    async def _switch(self, node: str, samples: Sequence[KeptSample], tail: Sequence[int]) -> None:
        began = time.monotonic()
        convoy = Convoy(uuid.uuid4().hex, [sample.name for sample in samples])
        ways = [
            self._carry(sample, tail[turn % len(tail)], convoy)
            for turn, sample in enumerate(sorted(samples, key=lambda sample: -len(sample.known.tokens)))
        ]
        _, *records = await asyncio.gather(self._tell(tail, "begin_switch"), *ways)
        moved = [record for record in records if record is not None and record.move.phase in MOVED]
        took = time.monotonic() - began
        await self._tell(tail, "end_switch")
        if not moved:
            return
        # Others ran on while the first of them were prepared: what is lost is the time without a token.
        lost = max((record.downtime for record in moved if record.downtime is not None), default=None)
        if lost is not None:
            self._each_s += RATE * (lost / len(moved) - self._each_s)
        emptied = [engine for engine in self._nodes[node][ALIGNED] if not self._keeper.samples(engine)]
        await self._tell(emptied, "lend_devices")
        self._record(LayoutSwitched(self._step(), node, self._plan.size, self._plan.tail_size, len(moved), took))

    async def _carry(self, sample: KeptSample, destination: int, convoy: Convoy) -> MoveRecord | None:
        record = None
        try:
            record = await self._move(int(sample.name), destination, CAUSE, convoy)
        except KeyError:
            # It has ended since.
            return None
        except MoveRefused as refused:
            self._reports.tell(f"adaptive tensor parallelism: {refused}")
        finally:
            convoy.leave(sample.name)
        if record is None or record.move.phase not in MOVED:
            self._stuck.add(sample.name)
        return record

    async def _tell(self, engines: Sequence[int], method: str) -> None:
        for engine in engines:
            # Its timeline only: one that is gone has none.
            with contextlib.suppress(EngineLost, OrderFailed):
                await self._keeper.engines[engine].port.call(method)


def has_room(contexts: Sequence[int], engines: Sequence[EngineStatus]) -> bool:
    """Whether engines have seats and KV cache for samples of these contexts, dealt out in turn, longest first."""
    ordered = sorted(contexts, reverse=True)
    for turn, engine in enumerate(engines):
        dealt = ordered[turn :: len(engines)]
        if len(dealt) > engine.free_seats or sum(dealt) > engine.free_tokens:
            return False
    return True


def speculation(engines: Sequence[EngineStatus]) -> tuple[float, float]:
    """Tokens and draft tokens of a sample's decode step, in the mean of engines' timed steps."""
    steps = [(status.decode, status.tokens_per_step) for status in engines if status.decode is not None]
    decoding = sum(mean.running for mean, _ in steps)
    if not decoding:
        return 1.0, 0.0
    gained = sum(mean.running * tokens for mean, tokens in steps) / decoding
    return max(gained, 1.0), sum(mean.drafts for mean, _ in steps) / decoding
