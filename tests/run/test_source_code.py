"""The commits that a run is made with, in real repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rhyme_openrlhf.run.source_code import Checkout, checkout, checkouts


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def repository(folder: Path, file: str) -> str:
    """A repository with one commit of one file; the commit."""
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    (folder / file).write_text("1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    git(folder, "tag", "v1")  # the commit is told, not its tag
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def _no_repository_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


def test_a_change_to_a_tracked_file_makes_it_dirty(tmp_path: Path) -> None:
    assert checkout(tmp_path) is None
    commit = repository(tmp_path, "train.py")
    (tmp_path / "notes.txt").write_text("untracked")
    assert checkout(tmp_path) == Checkout(commit, False)
    (tmp_path / "train.py").write_text("2\n")
    assert checkout(tmp_path) == Checkout(commit, True)


def test_package_and_folder_are_told_apart(tmp_path: Path) -> None:
    package, own = tmp_path / "package", tmp_path / "own"
    commits = repository(package, "rhyme/__init__.py"), repository(own, "reward.py")
    found = checkouts(own, package / "rhyme")
    assert found == {
        "package": {"commit": commits[0], "dirty": False},
        "directory": {"commit": commits[1], "dirty": False},
    }
    assert checkouts(package, package / "rhyme").keys() == {"package"}


def test_an_installed_package_has_not_the_commit_of_the_repository_around_it(tmp_path: Path) -> None:
    commit = repository(tmp_path, "reward.py")
    installed = tmp_path / ".venv" / "rhyme"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert checkouts(tmp_path, installed) == {"directory": {"commit": commit, "dirty": False}}


def test_without_git_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, "reward.py")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkouts(tmp_path, tmp_path) == {}
