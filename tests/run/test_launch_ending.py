"""A run whose training fails or succeeds while one part of its ending fails: the others are run, the reason is told.

Everything that a run starts is a stand-in; the loop over its parts is the real one.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf")

from ray import exceptions

from rhyme_openrlhf.run import launch
from rhyme_openrlhf.run.ending import Ending
from rhyme_openrlhf.run.termination import Termination
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.event_log import EventLog, read_events
from rhyme_openrlhf.telemetry.events import SCHEMA_VERSION, RunFinished, RunStarted
from rhyme_openrlhf.telemetry.run_directory import RunDirectory

STARTED = RunStarted(SCHEMA_VERSION, "x", [], 1, 1, 1, 1, 1, 1, False, "")
# What each part does, in order, and how a failure of it is called.
PARTS = {
    "release": "release the room for the run's last words",
    "explain": "look for processes that died",
    "system": "stop the system probe",
    "supervisor": "stop the supervisor",
    "workers": "stop the history workers",
    "write": "record the end of the run",
    "close": "close the event log",
    "display": "show the last events",
    "figures": "sum the run up",
    "write_json": "write summary.json",
    "render": "print the summary",
    "jobs": "find the processes of engines of several ranks",
    "others": "keep the logs of other nodes",
    "shutdown": "end Ray",
    "keep": "keep the logs of the run's processes",
}
# These need what the part before them found.
NEEDS = {"write_json": "figures", "render": "figures"}


class UninstalledTermination(Termination):
    """Leaves the signals of the tests' own process alone."""

    def install(self) -> None:
        """Install nothing."""


class Fixture:
    """A run of stand-ins; `done` has the parts of its ending that were run, and `broken` is the one that fails."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.broken = ""
        self.error: BaseException = OSError(errno.ENOSPC, "No space left on device")
        self.training: BaseException | None = KeyError("no such answer")
        self.ray_is_gone = False
        self.run = RunDirectory(tmp_path)
        self.run.logs.mkdir()
        session = tmp_path / "session"
        (session / "logs").mkdir(parents=True)
        self.job: Any = SimpleNamespace(
            args=None, settings=RhymeSettings(), run=self.run, command=[], started=0.0, prompts=1
        )
        self.job.settings = SimpleNamespace(
            run=SimpleNamespace(progress="off"), limits=SimpleNamespace(sigterm_s=1.0), control=SimpleNamespace(url="")
        )
        remote = lambda name: SimpleNamespace(remote=lambda *_: name)  # noqa: E731
        recorder = SimpleNamespace(write=remote("write"), close=remote("close"))
        services = SimpleNamespace(history_workers=(), record=lambda *_: None)
        supervisor = SimpleNamespace(fault="", names={}, stop=self.part("supervisor"), explain=self.part("explain", ""))
        context = SimpleNamespace(get_job_id=lambda: "01")
        ray = SimpleNamespace(
            get=lambda name, timeout: self.part(name)(),
            shutdown=self.part("shutdown"),
            get_runtime_context=lambda: context,
        )
        stand_ins = {
            "ray": ray,
            "Termination": UninstalledTermination,
            "Reserve": lambda _: SimpleNamespace(release=self.part("release")),
            "_start_ray": lambda _: session,
            "_check_gpus": lambda _: None,
            "_start_recorder": lambda _: recorder,
            "_services": lambda *_: services,
            "_ray_is_gone": lambda: self.ray_is_gone,
            "_start_supervisor": lambda *_: supervisor,
            "SystemWatch": lambda *_: SimpleNamespace(start=lambda: None, stop=self.part("system")),
            "_Display": lambda *_: SimpleNamespace(stop=self.part("display")),
            "_run_started": lambda *_: None,
            "_starting": lambda _: "",
            "_train": self.train,
            "stop_history_workers": self.part("workers"),
            "_Figures": lambda run: SimpleNamespace(stop=self.part("figures", real=lambda: figures(run).stop())),
            "render": self.part("render", "the summary"),
            "_jobs": self.part("jobs", ["01"]),
            "OtherNodes": lambda _: SimpleNamespace(copy=lambda _: False, copy_all=self.part("others")),
            "_keep_logs": self.part("keep"),
        }
        figures = launch._Figures
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(launch, name, stand_in)
        monkeypatch.setattr(RunDirectory, "write_json", self.part("write_json"))
        with EventLog(self.run.events) as log:
            log.write(STARTED, "driver")

    def part(self, name: str, result: Any = None, real: Any = None) -> Any:
        def do(*arguments: Any) -> Any:
            self.done.append(name)
            if name == self.broken:
                raise self.error
            return real(*arguments) if real else result

        return do

    def train(self, *_: Any) -> None:
        if self.training is not None:
            raise self.training


@pytest.fixture
def fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    return Fixture(tmp_path, monkeypatch)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SystemExit(15), TypeError("x")])
@pytest.mark.parametrize("broken", PARTS)
def test_the_other_parts_are_run_and_the_reason_is_told_whichever_part_fails(
    fixture: Fixture, broken: str, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    fixture.broken, fixture.error = broken, error
    assert launch._run(fixture.job, [], Ending(), launch._Started()) == 1
    assert fixture.done == [part for part in PARTS if NEEDS.get(part) != broken]
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == f"rhyme train: failed: KeyError: 'no such answer' (logs: {fixture.run.logs})"
    assert len([line for line in told if line.startswith(f"rhyme train: could not {PARTS[broken]}: ")]) == 1
    assert "KeyError: 'no such answer'" in (fixture.run.logs / "driver-error.log").read_text()


@pytest.mark.parametrize("broken", [part for part in PARTS if part != "explain"])
def test_training_that_succeeded_has_succeeded_whichever_part_of_the_ending_fails(
    fixture: Fixture, broken: str
) -> None:
    fixture.broken, fixture.training = broken, None
    assert launch._run(fixture.job, [], Ending(), launch._Started()) == 0
    assert fixture.done == [part for part in PARTS if NEEDS.get(part) != broken and part != "explain"]


@pytest.mark.parametrize("kind", [KeyError, TypeError, SystemExit, GeneratorExit, MemoryError, RuntimeError])
def test_whatever_training_raises_ends_in_one_sentence(
    fixture: Fixture, kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    fixture.training = kind("odd")
    assert launch._run(fixture.job, [], Ending(), launch._Started()) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith(f"rhyme train: failed: {kind.__name__}: ") and "odd" in told[-1]


def test_a_traceback_that_cannot_be_kept_costs_one_line(fixture: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    (fixture.run.logs / "driver-error.log").mkdir()
    assert launch._run(fixture.job, [], Ending(), launch._Started()) == 1
    told = capsys.readouterr().err
    assert "rhyme train: could not write driver-error.log: IsADirectoryError: " in told
    assert told.endswith(f"rhyme train: failed: KeyError: 'no such answer' (logs: {fixture.run.logs})\n")
    assert fixture.done == list(PARTS)


def test_a_start_that_fails_ends_what_was_started(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(job: Any) -> None:
        raise ConnectionError("no Ray at this address")

    monkeypatch.setattr(launch, "_start_ray", unreachable)
    assert launch._run(fixture.job, [], Ending(), launch._Started()) == 1
    assert "rhyme train: failed: ConnectionError: no Ray at this address" in capsys.readouterr().err
    assert "shutdown" in fixture.done


@pytest.mark.parametrize(
    ("error", "waits"),
    [(exceptions.ActorUnavailableError("Socket closed", b"a" * 16), True), (KeyError("no such answer"), False)],
)
def test_a_node_that_is_out_of_reach_is_waited_for_until_ray_says_that_it_is_lost(
    error: BaseException, waits: bool
) -> None:
    waited: list[float] = []

    def explain(wait_s: float) -> str:
        waited.append(wait_s)
        return "its node is gone"

    supervisor: Any = SimpleNamespace(fault="", explain=explain)
    assert launch._fault(supervisor, Ending(), error) == "its node is gone"
    assert waited == [launch.LOST_NODE_SECONDS if waits else 0.0]


def test_where_ray_is_gone_nothing_is_asked_of_it_and_the_record_has_the_end(fixture: Fixture) -> None:
    fixture.ray_is_gone = True
    assert launch._run(fixture.job, [], Ending(), launch._Started()) == 1
    asked = {"workers", "write", "close", "jobs", "others", "shutdown"}
    assert fixture.done == [part for part in PARTS if part not in asked]
    *_, last = read_events(fixture.run.events)
    assert isinstance(last.event, RunFinished) and last.event.message == "KeyError: 'no such answer'"


@pytest.mark.parametrize("taken", [True, False])
def test_the_summary_has_the_end_that_the_disk_refused(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken: bool
) -> None:
    shown: list[Any] = []

    def render(summary: Any, path: str) -> str:
        shown.append(summary)
        return ""

    monkeypatch.setattr(launch, "render", render)
    if taken:
        with EventLog(fixture.run.events) as log:
            log.write(RunFinished("failed", "KeyError: 'no such answer'", 1.0), "driver")
    launch._run(fixture.job, [], Ending(), launch._Started())
    assert (shown[0].status, shown[0].message) == ("failed", "KeyError: 'no such answer'")
    assert ("the event log lacks the end of the run" in capsys.readouterr().err) is not taken


@pytest.mark.parametrize("broken", ["close", "finish", "wait"])
def test_processes_are_ended_also_without_a_reporter(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    fixture.broken, fixture.training = broken, None
    reporting = SimpleNamespace(close=fixture.part("close"), wait=fixture.part("wait"))
    stand_ins = {
        "prepare": lambda *_: (None, []),
        "make_run_directory": lambda *_: fixture.run,
        "_config": lambda _: {},
        "start_reaper": lambda _: None,
        "finish": lambda _: fixture.part("finish")(),
        "Reporting": lambda *_: reporting,
        "_run": lambda *_: 7,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(launch, name, stand_in)
    args: Any = SimpleNamespace(ckpt=SimpleNamespace(path="checkpoints"))
    assert launch.run_training(args, RhymeSettings(), 1, None, False, []) == 7
    assert [part for part in fixture.done if part != "write_json"] == ["close", "finish", "wait"]


def test_logs_are_kept_as_far_as_the_disk_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    session = tmp_path / "session"
    (session / "logs").mkdir(parents=True)
    for name in ("worker-a-01-1.out", "worker-b-01-2.out", "worker-c-02-3.out"):
        (session / "logs" / name).write_text(name)
    (run.logs / "ray").symlink_to(session / "logs")
    copy = shutil.copy2

    def full(source: Path, target: Path) -> None:
        copy(source, target)
        if "worker-a" in target.name:
            target.write_text("")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="1 of them stay in"):
        launch._keep_logs(session, run, ["01"])
    assert (run.logs / "worker-b-01-2.out").read_text() == "worker-b-01-2.out"
    # No torn copy, and the link to the whole one; nothing of another job.
    assert sorted(path.name for path in run.logs.iterdir()) == ["ray", "worker-b-01-2.out"]
