"""Decisions about each attempt from three sources: the store, Ray, and the reporter's heartbeats. Pure.

Invariants:

- A decision to set a status is a legal change (`store/status.py`).
- An attempt ends if Ray reports its job as ended or unknown.
- An attempt becomes lost only if neither Ray nor its reporter responds.
- Queued attempts start in the order of their arrival.

All times are seconds of a monotonic clock, so setting the wall clock ends no runs. After a restart of the service,
every waiting time begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rhyme_openrlhf.api.store.status import RunStatus

# A run's last events arrive within seconds of its end. Only after this time does Ray's report about a silent run count.
# With Ray's own second and the poll, a killed run shows as crashed well within a minute.
LAST_WORD_SECONDS = 20.0
# Ray's dashboard may be away when an attempt is submitted; submission is repeated for this long.
SUBMIT_SECONDS = 120.0
# A reporter reports every few seconds; it counts as present if it was heard within this time.
FRESH_SECONDS = 30.0
# A job that continues after a request to stop (on a busy cluster) gets another request.
STOP_AGAIN_SECONDS = 60.0
# Exit codes of `rhyme train`: ended by a signal from a user; refused or failed with a message.
STOPPED_CODES = (130, 143)
FAILED_CODES = (1, 2)

JobState = Literal["pending", "running", "succeeded", "failed", "stopped", "missing"]
OVER = frozenset({"succeeded", "failed", "stopped"})


@dataclass(frozen=True)
class Job:
    """Ray's report on a job. `exit_code`: the driver's, if it ended by itself; negative for a signal."""

    state: JobState
    message: str = ""
    exit_code: int | None = None


@dataclass(frozen=True)
class Waits:
    """Waiting times: for a run that is asked to stop, and until a silent run is lost."""

    stop_grace_s: float
    lost_after_s: float


@dataclass(frozen=True)
class Sight:
    """The known state of an attempt. `job` is None if the cluster did not respond; seconds are None without such an
    event.
    """

    status: RunStatus
    stop_requested: bool
    job: Job | None
    watched: float
    since_ray: float
    since_heartbeat: float | None
    since_stop: float | None
    since_forced: float | None
    since_over: float | None


@dataclass(frozen=True)
class Action:
    """The next action: nothing, submit the job (again), let Ray stop it, or set the attempt's status."""

    do: Literal["nothing", "submit", "stop_job", "set"]
    status: RunStatus | None = None
    message: str = ""


NOTHING = Action("nothing")


def decide(sight: Sight, waits: Waits) -> Action:
    """Return the next action for an attempt that was started."""
    if sight.status not in ("starting", "running", "stopping", "lost"):
        return NOTHING
    if sight.job is None:
        return _unanswered(sight, waits)
    if sight.job.state == "missing":
        return _missing(sight)
    if sight.job.state in OVER:
        return _over(sight, sight.job)
    return _alive(sight, sight.job, waits)


def _unanswered(sight: Sight, waits: Waits) -> Action:
    if sight.status == "lost":
        if sight.stop_requested:
            return Action("set", "stopped", "given up: neither Ray nor the run responds; the run may still be active")
        return NOTHING
    silent = sight.since_ray if sight.since_heartbeat is None else min(sight.since_ray, sight.since_heartbeat)
    if silent <= waits.lost_after_s:
        return NOTHING
    return Action("set", "lost", f"neither Ray nor the run has responded for {silent:.0f} s")


def _missing(sight: Sight) -> Action:
    if sight.status == "starting" and sight.since_heartbeat is None:
        if sight.stop_requested:
            return Action("set", "stopped", "stopped before its job started")
        if sight.watched < SUBMIT_SECONDS:
            return Action("submit")
        return Action("set", "failed", "its job could not be started in Ray")
    heard = sight.since_heartbeat is not None and sight.since_heartbeat < FRESH_SECONDS
    if heard or _last_word_awaited(sight):
        return NOTHING
    if sight.stop_requested:
        return Action("set", "stopped", "Ray no longer knows its job")
    return Action("set", "crashed", "Ray no longer knows its job: its cluster has ended")


def _over(sight: Sight, job: Job) -> Action:
    if _last_word_awaited(sight):
        return NOTHING
    if job.state == "succeeded":
        return Action("set", "stopped" if sight.stop_requested else "succeeded")
    if job.state == "stopped":
        forced = "the run did not end by itself in time: Ray stopped its job"
        return Action("set", "stopped", forced if sight.stop_requested else "its job was stopped in Ray")
    if job.exit_code in STOPPED_CODES:
        return Action("set", "stopped", "its process was ended by a user's signal")
    if job.exit_code in FAILED_CODES:
        return Action("set", "failed", last_line(job.message))
    if sight.since_forced is not None:
        return Action("set", "stopped", "its job was killed, because it did not end by itself in time")
    return Action("set", "crashed", _crash(job))


def _alive(sight: Sight, job: Job, waits: Waits) -> Action:
    if sight.status == "lost":
        return Action("set", "stopping" if sight.stop_requested else "running")
    if not sight.stop_requested:
        return NOTHING
    if sight.status != "stopping":
        return Action("set", "stopping")
    # A job whose driver has not started cannot read the request.
    due = job.state == "pending" or (sight.since_stop or 0.0) > waits.stop_grace_s
    told = sight.since_forced is not None and sight.since_forced < STOP_AGAIN_SECONDS
    return Action("stop_job") if due and not told else NOTHING


def _last_word_awaited(sight: Sight) -> bool:
    return (sight.since_over or 0.0) < LAST_WORD_SECONDS


def _crash(job: Job) -> str:
    if job.exit_code is None:
        return f"its job failed in Ray: {last_line(job.message)}"
    if job.exit_code < 0:
        return f"its process was ended by signal {-job.exit_code}"
    if job.exit_code > 128:
        return f"its process was ended by signal {job.exit_code - 128}"
    return f"its process ended with code {job.exit_code}: {last_line(job.message)}"


def last_line(text: str) -> str:
    """Return the last line that is not empty, because the end of a log has the error."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no message"])[-1][:500]


@dataclass
class Watch:
    """Times at which facts about one attempt were first seen; `see` turns them into ages."""

    began: float
    _ray: float = 0.0
    _heartbeat: float | None = None
    _heartbeat_value: float | None = None
    _stop: float | None = None
    _forced: float | None = None
    _over: float | None = field(default=None)

    def __post_init__(self) -> None:
        self._ray = self.began

    def see(
        self, status: RunStatus, heartbeat_at: float | None, stop_requested: bool, job: Job | None, now: float
    ) -> Sight:
        """Return the state at `now`. `heartbeat_at` is only compared with its earlier value, because clocks differ."""
        if heartbeat_at != self._heartbeat_value:
            self._heartbeat_value, self._heartbeat = heartbeat_at, now
        if job is not None:
            self._ray = now
            ended = job.state in OVER or job.state == "missing"
            self._over = (self._over if self._over is not None else now) if ended else None
        if not stop_requested:
            self._stop = self._forced = None
        elif self._stop is None:
            self._stop = now
        return Sight(
            status=status,
            stop_requested=stop_requested,
            job=job,
            watched=now - self.began,
            since_ray=now - self._ray,
            since_heartbeat=_since(self._heartbeat, now),
            since_stop=_since(self._stop, now),
            since_forced=_since(self._forced, now),
            since_over=_since(self._over, now),
        )

    def forced(self, now: float) -> None:
        """Note that Ray was asked to stop the job."""
        self._forced = now


def _since(moment: float | None, now: float) -> float | None:
    return None if moment is None else now - moment


@dataclass(frozen=True)
class Queued:
    """A waiting attempt and the GPUs that it will request."""

    attempt_id: int
    gpus: int


@dataclass(frozen=True)
class Start:
    """Attempts to start now, and attempts that can never start, with the reason."""

    now: tuple[int, ...]
    never: tuple[tuple[int, str], ...]


def used_by_others(used_gpus: int, begun: Sequence[int]) -> int:
    """Return the used GPUs of the cluster that no run of ours has. `begun`: GPUs of our runs that have begun.

    A run that has begun takes its GPUs within its first minute. Until then, other jobs may use more GPUs than this
    number, and a run started too early waits in Ray. A run that has not begun has no GPUs yet.
    """
    return max(0, used_gpus - sum(begun))


def choose(
    queue: Sequence[Queued], running: Sequence[int], total_gpus: int, max_runs: int, others_gpus: int = 0
) -> Start:
    """Choose the attempts to start from a `queue` in order of arrival; `running`: GPUs of each active run.

    The first attempt that does not fit holds back all later ones, so that small runs do not delay a large one forever.
    An attempt that cannot fit even alone is refused.
    """
    free = total_gpus - others_gpus - sum(running)
    slots = max_runs - len(running)
    now: list[int] = []
    never: list[tuple[int, str]] = []
    held = False
    for one in queue:
        if one.gpus > total_gpus:
            never.append((one.attempt_id, f"the run needs {one.gpus} GPUs, the cluster has {total_gpus}"))
        elif not held and slots > 0 and one.gpus <= free:
            now.append(one.attempt_id)
            free -= one.gpus
            slots -= 1
        else:
            held = True
    return Start(tuple(now), tuple(never))


@dataclass(frozen=True)
class Wait:
    """The reason why a queued attempt waits. `position` counts from 1."""

    attempt_id: int
    position: int
    why: str


def waits(
    queue: Sequence[Queued], running: Sequence[int], total_gpus: int | None, max_runs: int, others_gpus: int = 0
) -> list[Wait]:
    """Return the reason why each attempt of the `queue` waits, consistent with `choose`.

    `total_gpus` None: Ray does not respond.
    """
    if total_gpus is None:
        return [Wait(one.attempt_id, at, "Ray does not respond") for at, one in enumerate(queue, 1)]
    start = choose(queue, running, total_gpus, max_runs, others_gpus)
    never = dict(start.never)
    free = total_gpus - others_gpus - sum(running) - sum(one.gpus for one in queue if one.attempt_id in start.now)
    full = len(running) + len(start.now) >= max_runs
    held = 0
    found = []
    for position, one in enumerate(queue, 1):
        if one.attempt_id in start.now:
            why = "it starts in a moment"
        elif one.attempt_id in never:
            why = f"it will be refused: {never[one.attempt_id]}"
        elif held:
            why = f"runs start in order, and run {held} of the queue waits"
        else:
            held = position
            why = f"it needs {one.gpus} GPUs, and {max(0, free)} of {total_gpus} are free"
            if others_gpus:
                why += f" (other jobs have {others_gpus})"
            if full:
                why = f"the largest number of runs is active: --launch.max_runs {max_runs}"
        found.append(Wait(one.attempt_id, position, why))
    return found
