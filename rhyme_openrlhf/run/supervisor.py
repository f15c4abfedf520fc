"""Watches a run from its driver: processes that die, engines that cannot generate, stages that get nowhere.

Two threads run beside the driver's main thread, which waits inside OpenRLHF: one reads the run's events, one looks at
Ray's actors and at the engines. When the run cannot go on, the supervisor keeps the sentence that says why and
interrupts the main thread. Where samples are kept apart from the engines, the supervisor reports an engine's death and
the run goes on while another engine is left.

Ray's public state API needs the dashboard, which small clusters run without. So `read_actors` reads the table behind
that API (`ray._private.state`, private; checked against Ray 2.55.0, `tests/run/test_supervisor.py` holds it). The last
words of a dead process come from Ray's session directory on this machine.

Invariants:
- A death is noticed within two polls.
- The trainer gets GRACE_SECONDS to end the run itself, with a checkpoint where it can.
- Ray restarts a history worker that died; its death ends nothing.
- Without the recorder there are no events to judge by, so time limits end nothing from its death on, nor while it does
  not answer. Events that its disk refuses are taken from the recorder itself, so limits go on with a full disk.
- Watching changes nothing of the run.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray._private.state
from ray.core.generated.gcs_pb2 import ActorTableData

from rhyme_openrlhf.run.process_logs import CORE_FAILED, core_error, last_lines
from rhyme_openrlhf.run.stage_watch import StageWatch
from rhyme_openrlhf.settings.run import LimitSettings
from rhyme_openrlhf.telemetry.event_log import follow
from rhyme_openrlhf.telemetry.events import Event, Note, ProcessDied, ProcessReady
from rhyme_openrlhf.training.failure import one_sentence

if TYPE_CHECKING:
    # It imports torch, which a driver that watches does without.
    from rhyme_openrlhf.engine.calls import EngineCalls

# Class names of actors, and what users call them; engines and history workers are told apart by a number.
NAMES = {
    "RhymePolicyModelActor": "policy actor",
    "RhymeCriticModelActor": "critic actor",
    "ReferenceModelActor": "reference actor",
    "RewardModelActor": "reward model actor",
    "RhymePPOTrainer": "trainer",
    "RhymePPOTrainerAsync": "trainer coordinator",
    "RhymeTrainingActor": "trainer",
    "RhymeGenerateSamplesActor": "samples generator",
    "PlainRecorder": "recorder",
    "PlainNodeWeights": "weight store",
    "PlainHomeActor": "home of samples",
    "PlainFrontActor": "front of samples",
    "SystemProbe": "system probe",
    "PlainNodeLogs": "log reader",
}
# Deaths that end nothing: the last reference went, or the process that owned the actor did (which has its own row).
HARMLESS = {"OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED"}
CAUSES = {
    "WORKER_DIED": "the process was killed, ran out of memory or crashed",
    "NODE_DIED": "its node is gone",
    "RAY_KILL": "it was killed through Ray",
}
NOT_STARTED = "it could not start"


@dataclass(frozen=True)
class ActorRow:
    """One actor. `alive` covers starting and restarting; `cause` is empty unless it died of something harmful.

    `node` is its machine's address, `node_id` Ray's name of it; `worker` Ray's id of its process.
    """

    key: str
    name: str
    pid: int
    node: str
    alive: bool
    restarts: int
    cause: str
    node_id: str = ""
    worker: str = ""


def read_actors(known: Mapping[str, str]) -> list[ActorRow]:
    """Return all actors of this job. `known`: names by actor id (hex), of actors that differ by a number."""
    job = ray.get_runtime_context().get_job_id()
    return [
        ActorRow(
            key=row.actor_id.hex(),
            name=known.get(row.actor_id.hex()) or NAMES.get(row.class_name, row.class_name),
            pid=row.pid,
            node=row.address.ip_address,
            alive=row.state != ActorTableData.DEAD,
            restarts=row.num_restarts,
            cause=_cause(row.death_cause) if row.state == ActorTableData.DEAD else "",
            node_id=row.address.node_id.hex(),
            worker=row.address.worker_id.hex(),
        )
        for row in _actor_table()
        if row.job_id.hex() == job
    ]


def rank_jobs() -> list[str]:
    """Return the Ray jobs (hex) of vLLM's tensor-parallel ranks: of actors in placement groups that this job is in too.

    vLLM's engine core is a driver of its own in Ray, so its ranks belong to another job than the engine's actor.
    """
    job = ray.get_runtime_context().get_job_id()
    rows = _actor_table()
    ours = {row.placement_group_id for row in rows if row.job_id.hex() == job and row.placement_group_id}
    ours.discard(ray.PlacementGroupID.nil().binary())
    return sorted({row.job_id.hex() for row in rows if row.placement_group_id in ours} - {job})


def _actor_table() -> list[Any]:
    table = ray._private.state.state._connect_and_get_accessor().get_actor_table(None, None)
    return [ActorTableData.FromString(row) for row in table]


def _cause(death: Any) -> str:
    if death.HasField("creation_task_failure_context"):
        lines = death.creation_task_failure_context.formatted_exception_string.strip().splitlines()
        return f"{NOT_STARTED}: {lines[-1] if lines else 'no message'}"
    context = death.actor_died_error_context
    reason = type(context).Reason.Name(context.reason)
    return "" if reason in HARMLESS else CAUSES.get(reason, reason.lower())


POLL_SECONDS = 2.0
# A trainer that meets a dead engine writes a checkpoint and ends; this is how long it may take until it has met it.
GRACE_SECONDS = 40.0
# Beginnings of names; without these nothing can be saved any more.
INDISPENSABLE = ("policy actor", "critic actor", "trainer")
# Losing these costs the record, or drafts, and not the run; without its last front, the home ends it.
RECORDER = "recorder"
DISPENSABLE = (RECORDER, "system probe", "front of samples", "log reader")
# The next weight sync starts it again, leaves its node out, or fails of it.
WEIGHT_STORE = "weight store"
# An engine answers between two decode steps; one that is quiet for this long is worth a warning, no more.
QUIET_SECONDS = 60.0
# The same in the sentence of a limit, where it may be the cause.
SILENT_SECONDS = 10.0


class Supervisor:
    """Watches one run until `stop`. `fault` is the sentence that says why the run cannot go on, once it cannot."""

    def __init__(
        self,
        events: Path,
        logs: Sequence[Path],
        limits: LimitSettings,
        record: Callable[[Event], None],
        interrupt: Any,
        outlives_engines: bool = False,
        recorder: Any = None,
        warn: Callable[[str], None] = print,
        copy_logs: Callable[[], object] = lambda: None,
    ) -> None:
        """`events` is the run's event log; `logs`: Ray's log directory here, and where logs of other nodes are copied.

        `record` writes an event to the run's record; `interrupt()` is called once, when there is a fault.
        `outlives_engines`: the run goes on for as long as one engine is left.
        `recorder`: the actor that writes the event log. `warn` tells the user what the record cannot take.
        `copy_logs` brings copies of logs up to date.
        """
        self._outlives_engines = outlives_engines
        self.fault = ""
        self._events = events
        self._logs = logs
        self._record = record
        self._interrupt = interrupt
        self._stage = StageWatch(limits, time.monotonic())
        # What users call the run's actors, by id.
        self.names: dict[str, str] = {}
        self._engines: dict[str, _EngineCheck] = {}
        self._restarts: dict[str, int] = {}
        self._deaths: list[_Death] = []
        self._dead: set[str] = set()
        # Deaths of engines and weight stores that the run went on without.
        self._outlived: list[_Death] = []
        self._unreachable_since: float | None = None
        self._told_unreadable = self._blind = False
        self._lost = _LostEvents(recorder)
        self._told_lost = False
        self._warn = warn
        self._copy_logs = copy_logs
        self._look_lock = threading.Lock()
        self._stop = threading.Event()

    def name(self, actor: Any, name: str, engine: bool = False) -> None:
        """Tell what users call an actor; an engine is also asked regularly whether it can generate."""
        key = actor._actor_id.hex()
        self.names[key] = name
        if engine:
            self._engines[key] = _EngineCheck(actor)

    def start(self) -> None:
        """Start watching."""
        for target in (self._observe, self._watch):
            threading.Thread(target=target, name=f"supervisor-{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: the run has ended, and processes that die from now on died of that."""
        self._stop.set()

    def explain(self, wait_s: float = 0.0) -> str:
        """After the run failed: the first death, which explains it, in one sentence, or "".

        Wait for one up to `wait_s`, because Ray notices a lost node some time after its actors cannot be reached.
        """
        end = time.monotonic() + wait_s
        while not (found := self._first_death()) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return found

    def _first_death(self) -> str:
        self._look()
        # What fails soon after such a death failed of that; what fails later did not.
        recent = [death for death in self._outlived if time.monotonic() - death.at < GRACE_SECONDS]
        return next((death.sentence for death in (*self._deaths, *recent)), "")

    def _observe(self) -> None:
        # By the time of arrival here: the clocks of nodes may differ, and may be set while the run goes on.
        for recorded in follow(self._events, self._stop.is_set, unreadable=self._cannot_read):
            self._stage.observe(recorded.event, time.monotonic())

    def _cannot_read(self, error: Exception) -> None:
        """Say once that a part of the record is unreadable; limits go on with what can be read."""
        if not self._told_unreadable:
            self._told_unreadable = True
            text = f"the run's events cannot all be read, so a time limit may end the run too early: {error}"
            self._record(Note("warning", text))

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self._look()
                self._unreachable_since = None
            # Ray's private table may raise anything; a watch that ends would leave the run without limits.
            except Exception as error:  # noqa: BLE001
                self._cannot_look(error)
            self._observe_lost()
            self.fault = self._judge(time.monotonic())
            if self.fault:
                self._interrupt()
                return

    def _observe_lost(self) -> None:
        """Take note of events that are not in the event log, because the disk refused them."""
        for event in self._lost.take():
            self._stage.observe(event, time.monotonic())
            if not self._told_lost:
                self._told_lost = True
                self._warn(f"the run goes on without a record of it: {self._events} takes no more events (disk full?)")

    def _cannot_look(self, error: Exception) -> None:
        """Ray's control store does not answer: tolerated for a while (it may be restarting), then the run's end."""
        if self._unreachable_since is None:
            self._unreachable_since = time.monotonic()
        elif time.monotonic() - self._unreachable_since > GRACE_SECONDS:
            sentence = f"Ray's control store has not answered for {GRACE_SECONDS:.0f} s during {self._stage.doing}"
            self._deaths.append(_Death(-math.inf, f"{sentence}: {one_sentence(error)}", True))

    def _judge(self, now: float) -> str:
        if self._deaths:
            grace = POLL_SECONDS if any(death.final for death in self._deaths) else GRACE_SECONDS
            if now - self._deaths[0].at > grace:
                return self._deaths[0].sentence
        overdue = None if self._blind or self._lost.unanswered else self._stage.overdue(now)
        return overdue + self._silence(now) if overdue else ""

    def _silence(self, now: float) -> str:
        """Return what a person should know of engines that have not answered for longer than they ever should."""
        silent = [
            f"{self.names[key]} has not answered for {check.waits(now):.0f} s"
            for key, check in self._engines.items()
            if key not in self._dead and check.waits(now) > SILENT_SECONDS
        ]
        hint = "code of a reward or an agent that lets no other thread run does that: --limits.reward_s cannot end it"
        return f"; {' and '.join(silent)} ({hint})" if silent else ""

    def _look(self) -> None:
        with self._look_lock:
            for actor in read_actors(self.names):
                if actor.restarts > self._restarts.get(actor.key, 0):
                    self._restarts[actor.key] = actor.restarts
                    self._healed(actor)
                elif not actor.alive and actor.cause and actor.key not in self._dead:
                    self._died(actor, actor.cause)
                elif actor.alive and actor.key in self._engines and actor.key not in self._dead:
                    self._check_engine(actor)

    def _healed(self, actor: ActorRow) -> None:
        cause = "its process ended; Ray has started it again"
        self._record(ProcessDied(actor.name, actor.pid, actor.node, cause, True, []))
        self._record(Note("warning", f"{actor.name} died and was started again (now process {actor.pid})"))

    def _died(self, actor: ActorRow, cause: str) -> None:
        self._dead.add(actor.key)
        # No events come any more, so nothing can be said of a run that may go on well.
        self._blind |= actor.name == RECORDER
        self._copy_logs()
        if CORE_FAILED in cause and (error := core_error(self._logs, actor.worker)):
            cause = f"{NOT_STARTED}: {error}"
        tail = last_lines(self._logs, actor.worker)
        self._record(ProcessDied(actor.name, actor.pid, actor.node, cause, False, tail))
        where = f"(process {actor.pid} on {actor.node})"
        sentence = f"{actor.name} {where} died during {self._stage.doing}: {cause}"
        self._record(Note("error", "\n".join([sentence, *(f"  its log: {line}" for line in tail)])))
        others = any(key not in self._dead for key in self._engines)
        if actor.name == WEIGHT_STORE or (self._outlives_engines and actor.key in self._engines and others):
            self._outlived.append(_Death(time.monotonic(), sentence, False))
        elif not actor.name.startswith(DISPENSABLE):
            self._deaths.append(_Death(time.monotonic(), sentence, actor.name.startswith(INDISPENSABLE)))

    def _check_engine(self, actor: ActorRow) -> None:
        check = self._engines[actor.key]
        problem = check.look()
        if problem:
            self._died(actor, problem)
        elif check.is_first_answer():
            self._record(ProcessReady(actor.name))
        elif check.quiet(QUIET_SECONDS):
            self._record(Note("warning", f"{actor.name} has not answered for {QUIET_SECONDS:.0f} s"))


@dataclass(frozen=True)
class _Death:
    """A death that the run cannot go on from, at a monotonic time; `final` if nothing can be saved any more."""

    at: float
    sentence: str
    final: bool


class _LostEvents:
    """Asks the recorder again and again for the events that its disk refused, one question at a time.

    `unanswered`: at the last poll or the one before, the recorder had not answered, as where its disk hangs. Events
    that it wrote in the meantime may still be unread.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._question: Any = None
        self._late = self.unanswered = False

    def take(self) -> list[Event]:
        """Return the events that have come since the last call. Does not wait."""
        if self._recorder is None:
            return []
        late, self._late = self._late, False
        lost: list[Event] = []
        if self._question is not None:
            ready, _ = ray.wait([self._question], timeout=0)
            self._late = not ready
            # A recorder that has died is found among the actors.
            with suppress(ray.exceptions.RayError):
                lost = ray.get(self._question) if ready else []
        self.unanswered = late or self._late
        if not self._late:
            self._question = self._recorder.take_lost.remote()
        return lost


class _EngineCheck:
    """Asks one engine again and again whether it can generate, one question at a time."""

    def __init__(self, engine: EngineCalls) -> None:
        self._engine = engine
        self._question: Any = None
        self._asked = 0.0
        self._answered_once = False
        self._told_ready = False
        self._warned = False

    def look(self) -> str:
        """Return what is wrong with the engine, or "". Does not wait."""
        if self._question is None:
            self._question, self._asked = self._engine.alive.remote(), time.monotonic()
            return ""
        ready, _ = ray.wait([self._question], timeout=0)
        if not ready:
            return ""
        question, self._question = self._question, None
        self._answered_once, self._warned = True, False
        try:
            ray.get(question)
        except ray.exceptions.RayTaskError as error:
            return str(error.cause)
        except ray.exceptions.RayError:
            # The actor itself is gone: Ray's table says so too, with the cause.
            self._answered_once = self._told_ready
        return ""

    def is_first_answer(self) -> bool:
        """True once, after the engine's first answer, which comes when its constructor has loaded the model."""
        is_first = self._answered_once and not self._told_ready
        self._told_ready = self._answered_once
        return is_first

    def waits(self, now: float) -> float:
        """Return for how many seconds an engine that has answered before has not."""
        return now - self._asked if self._question is not None and self._answered_once else 0.0

    def quiet(self, seconds: float) -> bool:
        """True once, when an engine that has answered before has not for `seconds`."""
        if self._warned or self.waits(time.monotonic()) <= seconds:
            return False
        self._warned = True
        return True
