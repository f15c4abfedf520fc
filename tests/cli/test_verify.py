"""`rhyme verify`: what runs, what is refused, what it leaves behind. The checks themselves: tests/verify."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf import platform
from rhyme_openrlhf.cli import verify
from rhyme_openrlhf.cli.doctor_facts import Facts
from rhyme_openrlhf.verify import record
from rhyme_openrlhf.verify.outcome import Outcome, VerifyError

from .test_doctor import CPU, GPU


class Bench:
    """Stands for what the checks work on."""

    closed = 0

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A complete machine without a GPU whose checks are stand-ins: `results`; `argv` is what they got."""
    state: dict[str, Any] = {"facts": CPU, "results": {}, "argv": None}

    def bench(argv: list[str], folder: Path, progress: object) -> Bench:
        state["argv"] = argv
        state["folder"] = folder
        return Bench()

    def module(name: str) -> Any:
        check = name.rpartition(".")[2]

        class Module:
            @staticmethod
            def run(bench: Bench) -> Outcome:
                found = state["results"].get(check, Outcome(check, "ok", proves=f"proof-{check}"))
                if isinstance(found, Exception):
                    raise found
                return found

        return Module

    Bench.closed = 0
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "gather", lambda: state["facts"])
    monkeypatch.setattr(platform, "run_gpus", lambda: len(state["facts"].torch.gpus))
    monkeypatch.setattr(verify, "_bench", bench)
    monkeypatch.setattr(verify.importlib, "import_module", module)
    return state


def report_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_all_checks_run_and_leave_a_report_and_a_record(
    machine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main([]) == 0
    found = report_of(tmp_path / "rhyme-verify.json")
    assert [check["check"] for check in found["checks"]] == ["installs", *verify.CHECKS]
    assert found["passed"] and found["device"] == "CPU" and found["command"] == ["rhyme", "verify"]
    assert found["versions"]["python"] and found["cores"] == 8
    (entry,) = record.read(record.path())
    assert set(entry.proofs) == {f"proof-{name}" for name in verify.CHECKS}
    shown = capsys.readouterr().out
    assert "weights: ok after" in shown and "rhyme-verify.json" in shown
    # Without options it is the demo; its folder is gone, and the engines were ended.
    assert "--actor.model_name_or_path" in machine["argv"] and not machine["folder"].exists() and Bench.closed == 1


def test_a_failing_check_stops_no_other_and_is_told_by_exit_code_and_record(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    assert verify.main([]) == 0
    machine["results"] = {
        "weights": VerifyError("gone"),
        "greedy": Outcome("x", "failed", "why", proves="proof-greedy"),
    }
    assert verify.main(["--json", "other.json"]) == 1
    results = {check["check"]: check["result"] for check in report_of(tmp_path / "other.json")["checks"]}
    assert results["weights"] == results["greedy"] == "failed"
    assert results["sampled"] == results["memory"] == "ok"
    (entry,) = record.read(record.path())
    assert "proof-greedy" not in entry.proofs and "proof-sampled" in entry.proofs
    # The logs that explain it are there.
    assert Bench.closed == 2 and machine["folder"].exists()
    machine["folder"].rmdir()


def test_what_was_proved_before_a_kill_is_on_record(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = verify.importlib.import_module

    def module(name: str) -> Any:
        if name.endswith("speed"):
            sys.exit(verify.KILLED)
        return found(name)

    monkeypatch.setattr(verify.importlib, "import_module", module)
    with pytest.raises(SystemExit):
        verify.main([])
    (entry,) = record.read(record.path())
    assert set(entry.proofs) == {"proof-weights", "proof-greedy", "proof-sampled", "proof-proof"}


def test_some_checks_alone_with_the_users_options(machine: dict[str, Any], tmp_path: Path) -> None:
    assert verify.main(["--only", "speed, memory", "--actor.model_name_or_path", "m", "--keep"]) == 0
    assert [check["check"] for check in report_of(tmp_path / "rhyme-verify.json")["checks"]] == ["speed", "memory"]
    assert machine["argv"] == ["--actor.model_name_or_path", "m"]
    assert machine["folder"].exists()
    machine["folder"].rmdir()


def test_nothing_that_needs_the_stack_runs_without_it(machine: dict[str, Any], tmp_path: Path) -> None:
    machine["facts"] = Facts()
    assert verify.main([]) == 1
    results = {check["check"]: check["result"] for check in report_of(tmp_path / "rhyme-verify.json")["checks"]}
    assert results == {"installs": "failed"} | dict.fromkeys(verify.CHECKS, "skipped")
    assert machine["argv"] is None


def test_an_unknown_check_is_refused(machine: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--only", "weights,wheels"]) == 2
    assert "wheels: there is no such check; there are: installs, weights" in capsys.readouterr().err


def test_on_a_cluster_nothing_is_noted_of_this_machine(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert verify.main(["--only", "memory"]) == 0
    assert record.read(record.path()) == []


@pytest.mark.parametrize(("gpus", "engines"), [(0, "2"), (1, "1"), (2, "1"), (3, "2"), (8, "2")])
def test_without_options_the_placement_fits_the_machine(
    gpus: int, engines: str, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "run_gpus", lambda: gpus)
    assert verify.main(["--only", "memory"]) == 0
    argv = machine["argv"]
    last = {name: value for name, value in zip(argv, [*argv[1:], ""], strict=True) if name.startswith("--")}
    assert last["--vllm.num_engines"] == engines
    assert ("--train.colocate_all" in argv) == (gpus == 1)


def test_the_report_names_gpu_and_driver(
    machine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine["facts"] = GPU
    assert verify.main(["--only", "memory"]) == 0
    found = report_of(tmp_path / "rhyme-verify.json")
    assert (found["device"], found["driver"]) == ("Some GPU", "600.1")
    assert "Some GPU, driver 600.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--vllm.num_engines", "1"], "a required option is missing"),
        (["--histospec.window_max", "0", "--actor.model_name_or_path", "m"], "error: "),
    ],
)
def test_bad_options_cost_one_sentence(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openrlhf")
    monkeypatch.setattr(verify, "gather", lambda: dataclasses.replace(CPU))
    monkeypatch.chdir(tmp_path)
    assert verify.main(["--only", "memory", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rhyme verify: error: ") and said in error
    assert not (tmp_path / "rhyme-verify.json").exists()


def test_the_installs_check_says_what_the_doctor_says() -> None:
    from rhyme_openrlhf.cli.verify import check_installs

    assert check_installs(CPU).result == check_installs(GPU).result == "ok"
    outcome = check_installs(dataclasses.replace(GPU, driver_gpus=(), programs={}))
    assert outcome.result == "failed" and "g++ (missing)" in outcome.why
    assert any("apt-get install g++" in line for line in outcome.lines)


@pytest.mark.usefixtures("starts_python")
def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from rhyme_openrlhf.cli.verify import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'vllm', 'openrlhf'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "--only CHECK,CHECK" in shown and shown.splitlines()[-1] == "[]"
