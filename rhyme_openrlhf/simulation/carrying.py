"""Samples on their way between simulated engines: the carriers that `scheduling/move_costs.py` chooses, and their time.

A sample that is sent is on its way as long as its KV cache takes over the profile's link; one that is computed again
is at the target at once, and waits there for its prefill. What samples lost is learnt, as in a run, but for single
ones that are computed again: their prefill takes what the profile says.

Invariants: no decision is made here; without a profiled link everything is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE
from rhyme_openrlhf.scheduling.move_costs import Destination, MoveCosts
from rhyme_openrlhf.settings.moves import AUTO
from rhyme_openrlhf.simulation.job import Job
from rhyme_openrlhf.simulation.slot import Slot


class Carried(NamedTuple):
    """A sample that goes to an engine: its carrier, its tokens of context, and the engine as it was when it left."""

    job: Job
    carrier: str
    context: int
    there: Destination


class Carrying:
    """The carriers of one run. `profiles`, `predictors`: by tensor-parallel size; `transfer`: of the usual size."""

    def __init__(
        self, profiles: Mapping[int, Profile], predictors: Mapping[int, Predictor], transfer: TransferModel
    ) -> None:
        self._profiles = profiles
        self._predictors = predictors
        self._costs = MoveCosts(transfer)

    def chosen(self, jobs: Sequence[Job], source: Slot, target: Slot) -> tuple[list[Carried], list[Carried]]:
        """Return those of the jobs that are sent, and those that are computed again. Raises NotMeasured."""
        engine = target.engine
        running, (_, drafts_each) = len(engine.running), engine.speculation()
        held = engine.kind.kv_tokens - engine.free_tokens + sum(round(job.context) for job in engine.waiting)
        asked = AUTO if self._profiles[source.devices].kv_bytes_per_second else RECOMPUTE
        sent: list[Carried] = []
        again: list[Carried] = []
        for job in jobs:
            context = round(job.context)
            there = Destination.predicted(
                self._predictors[target.devices],
                running,
                held,
                context,
                drafts_each,
                engine.kind.step_tokens,
                source.node == target.node,
            )
            carrier, _ = self._costs.choose(asked, context, there)
            (sent if carrier == KV_TRANSFER else again).append(Carried(job, carrier, context, there))
        if again:
            # A profile that has neither can carry nothing.
            engine.kind.transfer.prefill_seconds([again[0].context])
        return sent, again

    def arrived(self, carried: Iterable[Carried], seconds: float) -> None:
        """Learn that these went on, between two of the target's decode steps, `seconds` after their stop."""
        for _, carrier, context, there in carried:
            self._costs.learn(carrier, context, there, seconds + there.next_step_s)
