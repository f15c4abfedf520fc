"""`rhyme`: which command gets what, and what is said when one cannot start."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rhyme_openrlhf import __version__
from rhyme_openrlhf.cli import main as rhyme


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces every command by one that notes its arguments and returns 7."""
    calls: list[list[str]] = []

    def command(argv: list[str]) -> int:
        calls.append(argv)
        return 7

    monkeypatch.setattr(rhyme.importlib, "import_module", lambda name: types.SimpleNamespace(main=command))
    return calls


@pytest.mark.parametrize("name", rhyme.COMMANDS)
def test_everything_after_the_command_reaches_it_untouched(name: str, received: list[list[str]]) -> None:
    arguments = ["--help", "--version", "--a.b", "1", "--", "-x"]
    assert rhyme.main([name, *arguments]) == 7
    assert received == [arguments]


@pytest.mark.parametrize("argv", [[], ["trian"], ["--trian"]])
def test_an_unknown_command_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        rhyme.main(argv)
    assert stopped.value.code == 2
    assert "rhyme: error: " in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        rhyme.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in rhyme.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        rhyme.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"rhyme-openrlhf {__version__}\n"


@pytest.mark.usefixtures("starts_python")
def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from rhyme_openrlhf.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'vllm', 'numpy', 'rich', 'openrlhf'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


def test_a_package_of_the_stack_that_is_missing_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError("No module named 'vllm.config'", name="vllm.config")

    monkeypatch.setattr(rhyme.importlib, "import_module", lacking)
    assert rhyme.main(["train"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "'vllm'" in line and "rhyme doctor" in line


def test_a_module_of_our_own_that_is_missing_is_a_bug_and_shown_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError("No module named 'rhyme_openrlhf.gone'", name="rhyme_openrlhf.gone")

    monkeypatch.setattr(rhyme.importlib, "import_module", lacking)
    with pytest.raises(ModuleNotFoundError):
        rhyme.main(["train"])


def test_programs_of_the_environment_are_found_once_and_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rhyme.sys, "executable", "/some/venv/bin/python")
    monkeypatch.setenv("PATH", "/usr/bin")
    rhyme.put_venv_programs_on_path()
    rhyme.put_venv_programs_on_path()
    assert rhyme.os.environ["PATH"] == "/some/venv/bin:/usr/bin"


# A command that prints more than a pipe holds, has a child that prints too, and leaves a file when it gets to its end.
PRINTS = """
import importlib, os, signal, subprocess, sys, types
from pathlib import Path
from rhyme_openrlhf.cli import main

def command(argv):
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
    for stream in (sys.stdout, sys.stderr):
        for number in range(20_000):
            print("a line of output", number, file=stream)
    print("flushed", flush=True)
    code = subprocess.run([sys.executable, "-c", "print('child', flush=True)"]).returncode
    Path(argv[0]).write_text(str(code))
    return 7

importlib.import_module = lambda name: types.SimpleNamespace(main=command)
sys.exit(main.main(sys.argv[1:]))
"""


def with_closed_output(command: list[str], both: bool = False) -> tuple[int, str]:
    """Exit code and standard error of a command whose output nobody reads; `both`: its standard error neither."""
    reader, writer = os.pipe()
    os.close(reader)
    # As users have it: output waits in a buffer until the end.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=closed if both else subprocess.PIPE, text=True, check=False, timeout=120,
            env=environment,
        )  # fmt: skip
    return done.returncode, done.stderr or ""


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("name", ["train", "demo", "serve", "verify", "profile", "fetch-model"])
@pytest.mark.parametrize("unbuffered", [False, True])
def test_what_runs_long_goes_on_when_nobody_reads_its_output(name: str, unbuffered: bool, tmp_path: Path) -> None:
    command = [sys.executable, *(["-u"] if unbuffered else []), "-c", PRINTS, name, str(tmp_path / "end")]
    code, _ = with_closed_output(command, both=True)
    assert code == 7
    # Its children print into nothing too.
    assert (tmp_path / "end").read_text() == "0"


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("name", ["doctor", "simulate", "runs"])
def test_what_prints_ends_quietly_when_nobody_reads_it(name: str, tmp_path: Path) -> None:
    code, said = with_closed_output([sys.executable, "-c", PRINTS, name, str(tmp_path / "end")])
    assert (code, said) == (141, "")
    assert not (tmp_path / "end").exists()


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["runs", "--help"], ["doctor", "--help"]])
def test_help_into_a_closed_pipe_is_quiet(arguments: list[str]) -> None:
    code, said = with_closed_output([sys.executable, "-m", "rhyme_openrlhf.cli.main", *arguments])
    assert (code, said) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "did you mean train?"),
        (["train", "--histospec.widow_max", "3"], "did you mean --histospec.window_max?"),
        (["train", "--histospec.widow_max=3"], "did you mean --histospec.window_max?"),
        (["train", "--actor.model_name_or_pth", "x"], "did you mean --actor.model_name_or_path?"),
        (["demo", "--no-histospec.enabel"], "did you mean --no-histospec.enable?"),
        (["serve", "--serve.prot", "1"], "did you mean --serve.port?"),
        (["serve", "--port", "1"], "did you mean --serve.port?"),
        (["train", "--window_max", "3"], "did you mean --histospec.window_max?"),
        (["serve", "--ray-adress", "http://h:1"], "did you mean --ray-address?"),
        (["runs", "lst"], "did you mean list?"),
        (["runs", "logs", "--folow", "last"], "did you mean --follow?"),
        (["doctor", "--jsno"], "did you mean --json?"),
        (["simulate", "--profile", "x", "--worklod", "y"], "did you mean --workload?"),
        (["profile", "show", "x", "--htlm", "y"], "did you mean --html?"),
        (["fetch-model", "smolm2"], "did you mean smollm2?"),
    ],
)
def test_what_is_unknown_names_what_is_nearest(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] in ("train", "demo"):
        pytest.importorskip("openrlhf")
    with pytest.raises(SystemExit) as stopped:
        rhyme.main(arguments)
    assert stopped.value.code == 2
    sentence, *_ = capsys.readouterr().err.splitlines()
    assert sentence.startswith("rhyme") and sentence.endswith(f"({hint})")


def test_what_is_like_nothing_has_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rhyme.main(["doctor", "--xyzzy"])
    assert "did you mean" not in capsys.readouterr().err
