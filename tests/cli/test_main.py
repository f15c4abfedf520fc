"""`rhyme`: which command gets what, and what is said when one cannot start."""

import subprocess
import sys
import types

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


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from rhyme_openrlhf.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'vllm', 'numpy', 'numba', 'rich', 'openrlhf'} & set(sys.modules)))"
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
