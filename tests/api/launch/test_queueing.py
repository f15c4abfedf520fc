"""Decisions about attempts: the witnesses one by one, then any life of a run, however they fail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rhyme_openrlhf.api.launch.queueing import (
    LAST_WORD_SECONDS,
    NOTHING,
    SUBMIT_SECONDS,
    Action,
    Job,
    Queued,
    Sight,
    Waits,
    Watch,
    choose,
    decide,
    used_by_others,
    waits,
)
from rhyme_openrlhf.api.store.status import ENDED, TRANSITIONS, RunStatus
from tests.examples import examples

WAITS = Waits(stop_grace_s=60, lost_after_s=120)
RUNNING, PENDING, MISSING = Job("running"), Job("pending"), Job("missing")


def sight(status: RunStatus, job: Job | None, **changes: object) -> Sight:
    values: dict[str, object] = {
        "stop_requested": False,
        "watched": 1000.0,
        "since_ray": 0.0,
        "since_heartbeat": 1.0,
        "since_stop": None,
        "since_forced": None,
        "since_over": LAST_WORD_SECONDS,
    }
    return Sight(status=status, job=job, **{**values, **changes})  # type: ignore[arg-type]


def decided(status: RunStatus, job: Job | None, **changes: object) -> tuple[str, str | None]:
    action = decide(sight(status, job, **changes), WAITS)
    return action.do, action.status


@pytest.mark.parametrize(
    ("status", "job", "changes", "expected"),
    [
        # Nothing is wrong.
        ("running", RUNNING, {}, ("nothing", None)),
        ("starting", PENDING, {}, ("nothing", None)),
        # The job is over, the run's own last events may still come.
        ("running", Job("failed", "", -9), {"since_over": 1.0}, ("nothing", None)),
        ("running", Job("failed", "", -9), {}, ("set", "crashed")),
        ("running", Job("failed", "", 137), {}, ("set", "crashed")),
        ("running", Job("failed"), {}, ("set", "crashed")),
        ("running", Job("failed", "x", 1), {}, ("set", "failed")),
        ("starting", Job("failed", "rhyme train: error: x", 2), {}, ("set", "failed")),
        ("running", Job("failed", "", 143), {}, ("set", "stopped")),
        ("running", Job("succeeded", "", 0), {}, ("set", "succeeded")),
        ("stopping", Job("succeeded", "", 0), {"stop_requested": True}, ("set", "stopped")),
        ("stopping", Job("stopped"), {"stop_requested": True, "since_forced": 9.0}, ("set", "stopped")),
        ("stopping", Job("failed", "", -9), {"stop_requested": True, "since_forced": 9.0}, ("set", "stopped")),
        ("stopping", Job("failed", "", -9), {"stop_requested": True}, ("set", "crashed")),
        # Graceful first, then forced, and again after a while.
        ("running", RUNNING, {"stop_requested": True, "since_stop": 0.0}, ("set", "stopping")),
        ("stopping", RUNNING, {"stop_requested": True, "since_stop": 59.0}, ("nothing", None)),
        ("stopping", RUNNING, {"stop_requested": True, "since_stop": 61.0}, ("stop_job", None)),
        ("stopping", RUNNING, {"stop_requested": True, "since_stop": 70.0, "since_forced": 9.0}, ("nothing", None)),
        ("stopping", RUNNING, {"stop_requested": True, "since_stop": 200.0, "since_forced": 99.0}, ("stop_job", None)),
        ("stopping", PENDING, {"stop_requested": True, "since_stop": 0.0}, ("stop_job", None)),
        # Ray does not respond.
        ("running", None, {"since_ray": 500.0, "since_heartbeat": 5.0}, ("nothing", None)),
        ("running", None, {"since_ray": 100.0, "since_heartbeat": 500.0}, ("nothing", None)),
        ("running", None, {"since_ray": 500.0, "since_heartbeat": 500.0}, ("set", "lost")),
        ("starting", None, {"since_ray": 121.0, "since_heartbeat": None}, ("set", "lost")),
        ("lost", None, {"since_ray": 500.0}, ("nothing", None)),
        ("lost", None, {"stop_requested": True}, ("set", "stopped")),
        ("lost", RUNNING, {}, ("set", "running")),
        ("lost", RUNNING, {"stop_requested": True}, ("set", "stopping")),
        # Ray does not know the job: never submitted, or its cluster is another one by now.
        ("starting", MISSING, {"watched": 5.0, "since_heartbeat": None}, ("submit", None)),
        ("starting", MISSING, {"watched": SUBMIT_SECONDS, "since_heartbeat": None}, ("set", "failed")),
        ("starting", MISSING, {"watched": 5.0, "since_heartbeat": 90.0}, ("set", "crashed")),
        ("running", MISSING, {"since_heartbeat": 5.0}, ("nothing", None)),
        ("running", MISSING, {"since_heartbeat": 50.0}, ("set", "crashed")),
        ("stopping", MISSING, {"since_heartbeat": 50.0, "stop_requested": True}, ("set", "stopped")),
        # Not ours to decide.
        ("queued", None, {}, ("nothing", None)),
        ("succeeded", RUNNING, {}, ("nothing", None)),
    ],
)
def test_decisions(
    status: RunStatus, job: Job | None, changes: dict[str, object], expected: tuple[str, str | None]
) -> None:
    assert decided(status, job, **changes) == expected


def test_what_a_crash_says() -> None:
    said = decide(sight("running", Job("failed", "", -9)), WAITS).message
    assert said == "its process was ended by signal 9"
    log = "Job entrypoint command failed with exit code 2, last logs:\n\nrhyme train: error: no such model\n"
    assert decide(sight("starting", Job("failed", log, 2)), WAITS).message == "rhyme train: error: no such model"


jobs = st.none() | st.builds(
    Job,
    st.sampled_from(["pending", "running", "succeeded", "failed", "stopped", "missing"]),
    st.text(max_size=20),
    st.none() | st.integers(-15, 255),
)
seconds = st.floats(0, 1e6)


@given(
    st.builds(
        Sight,
        st.sampled_from(sorted(TRANSITIONS)),
        st.booleans(),
        jobs,
        seconds,
        seconds,
        *[st.none() | seconds for _ in range(4)],
    )
)
@settings(max_examples=examples(500))
def test_every_decision_is_a_legal_change(sight: Sight) -> None:
    action = decide(sight, WAITS)
    if action.do == "set":
        assert action.status in TRANSITIONS[sight.status]
    else:
        assert action.status is None
    if sight.status in ENDED - {"lost"} or sight.status == "queued":
        assert action == NOTHING


class Lives(RuleBasedStateMachine):
    """A run, its reporter, Ray and the service, each of which may fail at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.status: RunStatus = "starting"
        self.heartbeat: float | None = None
        self.stop = False
        self.job = MISSING  # what Ray knows
        self.reachable = True
        self.reporter = False
        self.watch = Watch(self.now)

    def turn(self, seconds: float = 2.0) -> Action:
        self.now += seconds
        if self.reporter and self.job.state == "running":
            self.heartbeat = self.now
            if self.status == "lost":
                self.status = "stopping" if self.stop else "running"
        job = self.job if self.reachable else None
        action = decide(self.watch.see(self.status, self.heartbeat, self.stop, job, self.now), WAITS)
        if action.do == "set":
            assert action.status in TRANSITIONS[self.status], (self.status, action)
            assert action.status is not None
            self.status = action.status
        elif action.do == "submit":
            assert self.job is MISSING, "submitted although it was there"
            if self.reachable:
                self.job = PENDING
        elif action.do == "stop_job":
            assert self.stop and self.job.state in ("pending", "running")
            self.watch.forced(self.now)
            self.job = Job("stopped")
        return action

    @rule(seconds=st.sampled_from([2.0, 2.0, 30.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.turn(seconds)

    @precondition(lambda self: self.job.state == "pending")
    @rule()
    def job_starts(self) -> None:
        self.job = RUNNING

    @precondition(lambda self: self.job.state == "running")
    @rule()
    def run_reports(self) -> None:
        self.reporter = True
        self.turn()
        if self.status == "starting":
            self.status = "running"

    @rule()
    def reporter_dies(self) -> None:
        self.reporter = False

    @precondition(lambda self: self.status in ("starting", "running", "lost"))
    @rule()
    def somebody_stops_it(self) -> None:
        self.stop = True
        if self.status != "lost":
            self.status = "stopping"

    @precondition(lambda self: self.job.state == "running")
    @rule(code=st.sampled_from([None, 0, 1, 2, 137, 143, -9]))
    def job_ends(self, code: int | None) -> None:
        self.job = Job("succeeded", "", 0) if code == 0 else Job("failed", "log", code)
        self.reporter = False

    @rule()
    def cluster_goes_away_or_comes_back(self) -> None:
        self.reachable = not self.reachable

    @precondition(lambda self: self.job.state != "missing")
    @rule()
    def cluster_is_started_anew(self) -> None:
        self.job = MISSING
        self.reporter = False

    @rule()
    def service_is_restarted(self) -> None:
        self.watch = Watch(self.now)

    @invariant()
    def status_is_one(self) -> None:
        assert self.status in TRANSITIONS

    def teardown(self) -> None:
        """However it went: once the cluster answers again and the job is over or gone, the run ends within a minute."""
        self.reachable = True
        if self.job.state in ("pending", "running"):
            self.job = Job("failed", "", -9)
        self.reporter = False
        gone = self.now
        while self.status not in ENDED - {"lost"}:
            self.turn()
            if self.job.state in ("pending", "running"):  # it had never been submitted, and was now
                self.job = Job("failed", "", -9)
                gone = self.now
            assert self.now - gone < 60, self.status


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)


@given(
    st.lists(st.integers(0, 10), max_size=8),
    st.lists(st.integers(0, 10), max_size=5),
    st.integers(0, 16),
    st.integers(1, 6),
)
def test_the_queue_keeps_its_limits_and_its_order(waiting: list[int], running: list[int], gpus: int, runs: int) -> None:
    queue = [Queued(number, need) for number, need in enumerate(waiting)]
    start = choose(queue, running, gpus, runs)
    refused = {number for number, _ in start.never}
    assert refused == {one.attempt_id for one in queue if one.gpus > gpus}
    assert not start.now or len(start.now) + len(running) <= runs
    assert not start.now or sum(running) + sum(waiting[number] for number in start.now) <= gpus
    # Nobody is passed: those that start are the first that can start at all.
    possible = [one.attempt_id for one in queue if one.attempt_id not in refused]
    assert list(start.now) == possible[: len(start.now)]
    if len(start.now) < len(possible):
        first = waiting[possible[len(start.now)]]
        used = sum(running) + sum(waiting[number] for number in start.now)
        assert len(start.now) + len(running) >= runs or used + first > gpus


@pytest.mark.parametrize(
    ("used", "begun", "others"),
    [
        (0, [], 0),
        (3, [], 3),
        (5, [2], 3),
        # It has begun and not taken its GPUs yet.
        (1, [2], 0),
    ],
)
def test_what_others_use_is_what_ours_do_not(used: int, begun: list[int], others: int) -> None:
    assert used_by_others(used, begun) == others


def test_what_others_use_holds_back_and_refuses_nobody() -> None:
    queue = [Queued(1, 4), Queued(2, 1)]
    assert choose(queue, [2], 8, 9, others_gpus=2).now == (1,)
    held = choose(queue, [2], 8, 9, others_gpus=3)
    assert (held.now, held.never) == ((), ())


def test_every_run_of_the_queue_is_told_why_it_waits() -> None:
    queue = [Queued(1, 9), Queued(2, 2), Queued(3, 4), Queued(4, 1)]
    found = {wait.attempt_id: (wait.position, wait.why) for wait in waits(queue, [4], 8, 5)}
    assert found[1] == (1, "it will be refused: the run needs 9 GPUs, the cluster has 8")
    assert found[2] == (2, "it starts in a moment")
    assert found[3] == (3, "it needs 4 GPUs, and 2 of 8 are free")
    assert found[4] == (4, "runs start in order, and run 3 of the queue waits")
    (held,) = waits([Queued(1, 3)], [4], 8, 5, others_gpus=2)
    assert held.why == "it needs 3 GPUs, and 2 of 8 are free (other jobs have 2)"
    (full,) = waits([Queued(1, 1)], [1, 1], 8, 2)
    assert full.why == "the largest number of runs is active: --launch.max_runs 2"
    assert [wait.why for wait in waits(queue, [4], None, 5)] == ["Ray does not respond"] * 4


@given(st.lists(st.integers(0, 10), max_size=8), st.lists(st.integers(0, 10), max_size=5), st.integers(0, 16))
def test_what_is_said_of_the_queue_is_what_is_done(waiting: list[int], running: list[int], gpus: int) -> None:
    queue = [Queued(number, need) for number, need in enumerate(waiting)]
    start = choose(queue, running, gpus, 4)
    found = waits(queue, running, gpus, 4)
    assert tuple(one.attempt_id for one in found if one.why == "it starts in a moment") == start.now
    assert {one.attempt_id for one in found if "refused" in one.why} == {number for number, _ in start.never}
