"""An engine's place in a run, samples on their way from one place to another, and what the parts of a run see of it.

`scheduling/move_costs.py` chooses the carriers. A sample that is sent is on its way as long as its KV cache takes over
the profile's link. A sample that is computed again is at the target at once, and waits there for its prefill. The time
that samples lost is learnt, as in a run. The profile alone says what a single prefill of this kind takes.

Invariants: no decision is made here; without a profiled link everything is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.scheduling.deferral import BatchLedger
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE
from rhyme_openrlhf.scheduling.move_costs import Destination, MoveCosts
from rhyme_openrlhf.settings.moves import AUTO
from rhyme_openrlhf.simulation.engine import Engine, Job
from rhyme_openrlhf.simulation.engine_kinds import EngineKind
from rhyme_openrlhf.simulation.planner import History, StepPlan
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import Workload


class Slot:
    """An engine and where it stands. `step`: the one it works on or last worked on, 0 before the first.

    `idle_since`: None while it has something to run or begins, and while its devices belong to another layout.
    `counted_busy`: seconds of its engine that are counted to a step. `arriving`: samples on their way to it; `below`:
    its deferred samples, which do not keep it from its next step.
    """

    def __init__(self, place: int, node: int, devices: int, engine: Engine) -> None:
        self.place = place
        self.node = node
        self.devices = devices
        self.engine = engine
        self.step = 0
        self.version = 0
        self.beginning = False
        self.idle_since: float | None = 0.0
        self.stamp = 0
        self.counted_busy = 0.0
        self.arriving = 0
        self.below: set[int] = set()

    @property
    def done(self) -> bool:
        """Return whether nothing runs here or is on its way, except deferred samples."""
        load = self.engine.load
        return not self.arriving and (not load or load == len(self.below))


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


class SimulatedRun(Protocol):
    """A run as the parts see it that move its samples: the workload, the settings, the slots, what is known, the clock.

    `kinds`, `profiles` and `predictors`: by tensor-parallel size; `plans`: of the steps that are not complete;
    `deferred`: samples that train a step later.
    """

    workload: Workload
    cluster: Cluster
    features: Features
    profiles: Mapping[int, Profile]
    kinds: dict[int, EngineKind]
    predictors: dict[int, Predictor]
    slots: list[Slot]
    carrying: Carrying
    history: History
    plans: dict[int, StepPlan]
    ledger: BatchLedger[tuple[int, int]]
    complete: set[int]
    deferred: set[int]
    result: Result

    def at(self, time: float, happen: Callable[[float], None]) -> None:
        """Have `happen` called at `time`."""

    def stop_at(self, slots: Iterable[Slot], now: float) -> None:
        """Have engines go to the end of the decode step that is going on."""

    def give(self, slot: Slot, jobs: list[Job], now: float) -> None:
        """Give an engine samples."""

    def ended(self, slot: Slot, jobs: list[Job]) -> None:
        """Note that these samples of the engine have ended; also without any, the engine is watched anew."""

    def try_begin(self, slot: Slot, now: float) -> None:
        """Have the engine begin its next step if it is done with its own and may."""

    def look_for_batches(self, now: float) -> None:
        """Complete the steps whose batches have come together."""

    def idle_ends(self, slot: Slot, now: float) -> None:
        """Note why the engine was idle until now."""

    def count_busy(self, slot: Slot) -> None:
        """Count what the engine was busy to its step."""

    def engine(self, size: int) -> Engine:
        """Return a new engine of this tensor-parallel size."""
        ...
