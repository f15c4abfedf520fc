"""Deaths are noticed, named and told; what heals ends nothing. On real Ray, with small actors."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rhyme_openrlhf.engine_losses import EngineLosses
from rhyme_openrlhf.run import supervisor
from rhyme_openrlhf.run.supervisor import GRACE_SECONDS, NAMES, POLL_SECONDS, ActorRow, Supervisor, read_actors
from rhyme_openrlhf.run.termination import Termination
from rhyme_openrlhf.settings.run import LimitSettings
from rhyme_openrlhf.telemetry import recorder
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import (
    EngineSample,
    Event,
    Note,
    ProcessDied,
    ProcessReady,
    RolloutStarted,
    SystemSample,
)
from rhyme_openrlhf.training.failure import one_sentence

# Far above what it takes: the clock of a busy machine is not what is tested.
NOTICED_WITHIN_S = 120.0


def actor_class() -> Any:
    """Made in a function, so that Ray sends it by value: its workers cannot import this module."""

    class PlainActor:
        """Can be asked, can fail, and can die with last words."""

        def __init__(self, start: bool = True) -> None:
            if not start:
                raise ValueError("no weights there")
            self.healthy = True

        def pid(self) -> int:
            return os.getpid()

        def alive(self) -> None:
            if not self.healthy:
                raise RuntimeError("the vLLM engine core of engine 0 died or failed")

        def fall_ill(self) -> None:
            self.healthy = False

        def die(self) -> None:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    return ray.remote(num_cpus=0)(PlainActor)


def loading_class() -> Any:
    """An engine whose constructor waits for a file."""

    class Loading:
        def __init__(self, begun: str, loaded: str) -> None:
            Path(begun).touch()
            while not Path(loaded).exists():
                time.sleep(0.05)

        def alive(self) -> None:
            pass

    return ray.remote(num_cpus=0)(Loading)


def recorder_class() -> Any:
    """The recorder, whose disk fills up or hangs when it is told to."""

    class PlainRecorder(recorder.PlainRecorder):
        def fill_disk(self) -> None:
            self._log._append = self._refuse  # type: ignore[method-assign]

        def hang(self, until: str) -> None:
            while not Path(until).exists():
                time.sleep(0.05)

        def _refuse(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    return ray.remote(num_cpus=0)(PlainRecorder)


@pytest.fixture(scope="module")
def session(starts_ray: None) -> Iterator[Path]:
    ray.shutdown()
    context = ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield Path(context.address_info["session_dir"])
    ray.shutdown()


class Watched:
    """A supervisor with a record in memory."""

    def __init__(self, session: Path, folder: Path, limits: LimitSettings, outlives_engines: bool = False) -> None:
        self.events: list[Event] = []
        self.interrupted = threading.Event()
        self.log = EventLog(folder / "events.jsonl")
        self.supervisor = Supervisor(
            folder / "events.jsonl",
            (session / "logs",),
            limits,
            self.events.append,
            self.interrupted.set,
            outlives_engines,
        )

    def deaths(self, name: str) -> list[ProcessDied]:
        """Of one actor: those that died in earlier tests are in Ray's table too."""
        return [event for event in self.events if isinstance(event, ProcessDied) and event.name == name]


@pytest.fixture
def watched(session: Path, tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(session, tmp_path, LimitSettings())
    yield watched
    watched.supervisor.stop()


def actor(**options: Any) -> Any:
    return actor_class().options(**options).remote()


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + NOTICED_WITHIN_S
    while not reached():
        assert time.monotonic() < end, "not noticed in time"
        time.sleep(0.1)


def test_a_restarted_worker_is_told_and_ends_nothing(watched: Watched) -> None:
    # The first test: no other has left a death in Ray's table.
    worker = actor(max_restarts=1)
    watched.supervisor.name(worker, "history worker 0")
    ray.get(worker.pid.remote())
    watched.supervisor.start()
    worker.die.remote()
    wait_until(lambda: bool(watched.deaths("history worker 0")))
    assert watched.deaths("history worker 0")[0].healed
    assert any(isinstance(event, Note) and "history worker 0 died" in event.text for event in watched.events)
    assert watched.supervisor.explain() == "" and not watched.interrupted.is_set()


def test_an_engine_is_told_once_and_not_before_its_constructor_is_done(watched: Watched, tmp_path: Path) -> None:
    begun, loaded = tmp_path / "begun", tmp_path / "loaded"
    engine = loading_class().remote(str(begun), str(loaded))
    watched.supervisor.name(engine, "engine 5", engine=True)
    watched.supervisor.start()
    wait_until(begun.exists)
    time.sleep(3 * POLL_SECONDS)
    assert ProcessReady("engine 5") not in watched.events
    loaded.touch()
    wait_until(lambda: ProcessReady("engine 5") in watched.events)
    time.sleep(2 * POLL_SECONDS)
    assert watched.events.count(ProcessReady("engine 5")) == 1


def test_a_dead_process_is_named_with_its_last_words(watched: Watched) -> None:
    engine = actor()
    watched.supervisor.name(engine, "engine 7", engine=True)
    pid = ray.get(engine.pid.remote())
    watched.log.write(RolloutStarted(3, 1, 4, 16), "rollout")
    watched.supervisor.start()
    time.sleep(1)
    engine.die.remote()
    wait_until(lambda: bool(watched.deaths("engine 7")))
    (death,) = watched.deaths("engine 7")
    assert (death.name, death.pid, death.healed) == ("engine 7", pid, False)
    assert "last words" in death.log_tail
    said = watched.supervisor.explain()
    assert f"engine 7 (process {pid} on" in said and "the rollout of step 3" in said and "killed" in said
    # The trainer gets time to end the run itself.
    assert not watched.interrupted.is_set()


def test_without_the_policy_the_run_ends_at_once(watched: Watched) -> None:
    policy = actor()
    watched.supervisor.name(policy, "policy actor")
    ray.get(policy.pid.remote())
    watched.supervisor.start()
    policy.die.remote()
    wait_until(watched.interrupted.is_set)
    assert watched.deaths("policy actor") and watched.supervisor.fault


def test_a_death_that_ray_notices_late_explains_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sut = Supervisor(tmp_path / "events.jsonl", (tmp_path,), LimitSettings(), lambda _: None, print)
    lost = ActorRow("ab", "policy actor", 7, "10.0.0.7", False, 0, "its node is gone")
    looks = [[], [], [lost]]
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "read_actors", lambda names: looks.pop(0))
    assert sut.explain() == ""
    said = sut.explain(NOTICED_WITHIN_S)
    assert said.startswith("policy actor (process 7 on 10.0.0.7) died during ") and said.endswith("its node is gone")


@pytest.mark.parametrize(
    ("name", "outlives_engines", "ended_after"),
    [
        *((name, True, POLL_SECONDS) for name in ("policy actor", "critic actor", "trainer", "trainer coordinator")),
        *((name, True, POLL_SECONDS) for name in ("policy actor 1", "critic actor 3")),
        *((name, True, GRACE_SECONDS) for name in ("samples generator", "reward model actor")),
        *((name, True, None) for name in ("recorder", "system probe", "weight store")),
        ("engine 0", False, GRACE_SECONDS),
        ("engine 0", True, None),
        ("the last engine", True, GRACE_SECONDS),
    ],
)
def test_how_long_a_run_goes_on_after_a_death(
    tmp_path: Path, name: str, outlives_engines: bool, ended_after: float | None
) -> None:
    """Long enough for a checkpoint where one can still be written, and no longer."""
    limits = LimitSettings(stage_s=10 * GRACE_SECONDS)
    sut = Supervisor(tmp_path / "events.jsonl", (tmp_path,), limits, lambda _: None, print, outlives_engines)
    engines = ["engine 0", "engine 1"] if name == "engine 0" else ["the last engine"]
    for engine in engines:
        sut.name(SimpleNamespace(_actor_id=engine.encode()), engine, engine=True)
    sut._died(ActorRow(name.encode().hex(), name, 7, "node", False, 0, "it crashed"), "it crashed")
    died = time.monotonic()
    if ended_after is None:
        assert sut._judge(died + GRACE_SECONDS + 1) == ""
    else:
        assert sut._judge(died + ended_after - 1) == ""
        assert sut._judge(died + ended_after + 1).startswith(f"{name} (process 7 on node) died during")


def test_an_engine_that_cannot_generate_counts_as_dead(watched: Watched) -> None:
    engine = actor()
    watched.supervisor.name(engine, "engine 0", engine=True)
    ray.get(engine.fall_ill.remote())
    watched.supervisor.start()
    wait_until(lambda: bool(watched.deaths("engine 0")))
    assert watched.deaths("engine 0")[0].cause == "the vLLM engine core of engine 0 died or failed"


def test_a_run_whose_samples_are_elsewhere_outlives_an_engine(session: Path, tmp_path: Path) -> None:
    """The death is told, with the number it has; who calls all engines gets None of that one."""
    watched = Watched(session, tmp_path, LimitSettings(), outlives_engines=True)
    engines: list[Any] = [actor(), actor()]
    for number, engine in enumerate(engines):
        watched.supervisor.name(engine, f"engine {number + 50}", engine=True)
    ray.get([engine.pid.remote() for engine in engines])
    losses = EngineLosses()
    assert losses.look(engines) == []
    watched.supervisor.start()
    engines[0].die.remote()
    wait_until(lambda: bool(watched.deaths("engine 50")))
    # Those that died in earlier tests are in Ray's table too.
    assert not [death for death in watched.supervisor._deaths if "engine 5" in death.sentence]
    assert any("engine 50" in death.sentence for death in watched.supervisor._outlived)
    (lost,) = losses.look(engines)
    assert engines[0] is lost and lost.number == 0 and ray.get(lost.rollout_report.remote(1, 2)) is None
    ray.get(engines[1].fall_ill.remote())
    with pytest.raises(RuntimeError, match=r"all 2 engines are gone: .*; .*the vLLM engine core of engine 0 died"):
        losses.look(engines)
    wait_until(lambda: bool(watched.deaths("engine 51")))
    assert len([death for death in watched.supervisor._deaths if death.sentence.startswith("engine 51 ")]) == 1
    watched.supervisor.stop()


def test_a_run_that_gets_nowhere_is_ended(session: Path, tmp_path: Path) -> None:
    """Also while the events of clocks go on, a line of the record is unreadable, and a node's clock is hours ahead."""
    watched = Watched(session, tmp_path, LimitSettings(rollout_s=1))
    watched.log.write(RolloutStarted(2, 1, 4, 16), "rollout", time.time() + 7200)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("no event\n")
    watched.supervisor.start()
    ticks = [SystemSample("node", 0.1, 0.2, 1, 2, 3, 4, 5, [], [], [], {}, {}), EngineSample(2, 0, 4, 1.0, 0, 0, 0)]

    def ended() -> bool:
        for tick in ticks:
            watched.log.write(tick, "ticks")
        return watched.interrupted.is_set()

    wait_until(ended)
    assert [event.text for event in watched.events if isinstance(event, Note) and "is not JSON" in event.text]
    assert "the rollout of step 2" in watched.supervisor.fault and "--limits.rollout_s" in watched.supervisor.fault


def test_without_the_recorder_no_limit_ends_a_run(watched: Watched) -> None:
    assert "--limits.stage_s" in watched.supervisor._judge(math.inf)
    watched.supervisor._died(ActorRow("key", "recorder", 7, "node", False, 0, "its node is gone"), "its node is gone")
    assert watched.supervisor._judge(math.inf) == "" and watched.deaths("recorder")


def test_limits_go_on_with_events_that_a_full_disk_refuses(
    session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Actors that died in earlier tests are in Ray's table, too.
    monkeypatch.setattr(supervisor, "read_actors", lambda names: [])
    keeper = recorder_class().remote(str(tmp_path / "events.jsonl"))
    said: list[str] = []
    sut = Supervisor(
        tmp_path / "events.jsonl", (session / "logs",), LimitSettings(), print, print, recorder=keeper, warn=said.append
    )
    ray.get(keeper.fill_disk.remote())
    sut.start()
    assert "start-up" in sut._judge(math.inf)
    for step in (3, 4):
        ray.get(keeper.write.remote(RolloutStarted(step, 1, 4, 16), "rollout", time.time()))
        wait_until(lambda step=step: f"the rollout of step {step}" in sut._judge(math.inf))
    sut.stop()
    assert "--limits.rollout_s" in sut._judge(math.inf)
    assert len(said) == 1 and "takes no more events (disk full?)" in said[0]


def test_while_the_recorder_does_not_answer_no_limit_ends_a_run(session: Path, tmp_path: Path) -> None:
    keeper = recorder_class().remote(str(tmp_path / "events.jsonl"))
    sut = Supervisor(tmp_path / "events.jsonl", (session / "logs",), LimitSettings(), print, print, recorder=keeper)
    ray.get(keeper.take_lost.remote())
    keeper.hang.remote(str(tmp_path / "goes on"))
    sut._observe_lost()
    sut._observe_lost()
    assert sut._judge(math.inf) == ""
    (tmp_path / "goes on").touch()
    # What it wrote before it answered is read by then.
    wait_until(lambda: sut._observe_lost() or not sut._lost._late)
    assert sut._judge(math.inf) == ""
    wait_until(lambda: sut._observe_lost() or "--limits.stage_s" in sut._judge(math.inf))


def test_a_driver_that_waits_in_ray_is_interrupted(session: Path, tmp_path: Path) -> None:
    hanging = ray.remote(num_cpus=0)(lambda: time.sleep(NOTICED_WITHIN_S))
    waiting = hanging.remote()
    before = signal.getsignal(signal.SIGTERM)
    termination = Termination(tmp_path / "stop-request.json", NOTICED_WITHIN_S)
    termination.install()
    threading.Timer(0.5, termination.interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ray.get(waiting, timeout=NOTICED_WITHIN_S / 2)
        assert termination.interrupts
    finally:
        termination.close()
        signal.signal(signal.SIGTERM, before)
        ray.cancel(waiting, force=True)


def test_a_control_store_that_does_not_answer_ends_the_run_after_a_while(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(known: Any) -> None:
        raise ray.exceptions.RaySystemError("the control store is gone")

    monkeypatch.setattr("rhyme_openrlhf.run.supervisor.read_actors", fail)
    monkeypatch.setattr("rhyme_openrlhf.run.supervisor.POLL_SECONDS", 0.05)
    monkeypatch.setattr("rhyme_openrlhf.run.supervisor.GRACE_SECONDS", 0.3)
    watched.supervisor.start()
    wait_until(watched.interrupted.is_set)
    assert "Ray's control store has not answered" in watched.supervisor.fault
    assert "the control store is gone" in watched.supervisor.fault


def test_every_name_for_users_is_of_a_class_that_runs() -> None:
    from openrlhf.trainer.ray.launcher import ReferenceModelActor, RewardModelActor

    from rhyme_openrlhf.moves.home import FrontActor, HomeActor
    from rhyme_openrlhf.run import reporting
    from rhyme_openrlhf.run.node_logs import NodeLogs
    from rhyme_openrlhf.training import model_actors, trainer, trainer_async
    from rhyme_openrlhf.weights.node import NodeWeights

    classes = [
        model_actors.PolicyModelActor, model_actors.CriticModelActor, ReferenceModelActor, RewardModelActor,
        trainer.PPOTrainer, trainer_async.PPOTrainerAsync, trainer_async.TrainingActor,
        trainer_async.GenerateSamplesActor, recorder.Recorder, NodeWeights, reporting.NodeProbe, NodeLogs,
        HomeActor, FrontActor,
    ]  # fmt: skip
    assert {cls.__ray_metadata__.class_name for cls in classes} == set(NAMES)


def test_an_actor_that_cannot_start_says_why(session: Path) -> None:
    failing = actor_class().remote(start=False)
    key = failing._actor_id.hex()

    def dead() -> list[Any]:
        return [row for row in read_actors({key: "engine 1"}) if row.key == key and not row.alive]

    wait_until(lambda: bool(dead()))
    assert dead()[0].name == "engine 1"
    assert dead()[0].cause == "it could not start: ValueError: no weights there"


def test_an_actor_that_nobody_needs_any_more_died_of_nothing(session: Path) -> None:
    unneeded = actor()
    ray.get(unneeded.pid.remote())
    key = unneeded._actor_id.hex()
    del unneeded
    wait_until(lambda: next(row for row in read_actors({}) if row.key == key).alive is False)
    assert next(row for row in read_actors({}) if row.key == key).cause == ""


def test_a_nested_failure_is_said_in_one_line(session: Path) -> None:
    @ray.remote(num_cpus=0)
    def inner() -> None:
        raise ValueError("the innermost cause")

    @ray.remote(num_cpus=0)
    def outer() -> None:
        ray.get(inner.remote())

    with pytest.raises(ray.exceptions.RayTaskError) as failed:
        ray.get(outer.remote())
    assert one_sentence(failed.value) == "ValueError: the innermost cause"
