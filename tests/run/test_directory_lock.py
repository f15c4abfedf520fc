"""A directory has one run at a time: by any path to it, after any end of the run before, with and without locks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.run import directory_lock
from rhyme_openrlhf.run.directory_lock import OWNER_FILE, DirectoryLockError, held

HOLDER = """
import sys, time
from rhyme_openrlhf.run.directory_lock import held
with held({"--ckpt.path": sys.argv[1]}, "first"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other_run(tmp_path: Path, starts_python: None) -> Any:
    """A run of another process that holds `tmp_path / "saved"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "saved")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_another_run_is_refused_by_name_until_the_first_is_killed(other_run: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    (tmp_path / "link").symlink_to(saved)
    # The same directory by its name, by a link, relative, and under the other flag.
    for flag, path in [
        ("--ckpt.path", saved),
        ("--ckpt.path", tmp_path / "link"),
        ("--ckpt.path", Path(os.path.relpath(saved))),
        ("--ckpt.output_dir", saved),
    ]:
        with pytest.raises(DirectoryLockError) as refused, held({flag: str(path)}, "second"):
            pytest.fail("two runs have one directory")
        text = str(refused.value)
        assert text.startswith(f"{flag} {path.absolute()} is in use by run first (process {other_run.pid} on ")
        assert "choose another directory, or wait" in text and OWNER_FILE not in text
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    other_run.send_signal(signal.SIGKILL)
    other_run.wait()
    assert (saved / OWNER_FILE).exists()
    with held({"--ckpt.path": str(saved)}, "second"):
        assert json.loads((saved / OWNER_FILE).read_text())["run"] == "second"
    assert not (saved / OWNER_FILE).exists()


def test_a_run_that_gets_only_one_of_its_directories_keeps_none(other_run: Any, tmp_path: Path) -> None:
    mine = {"--ckpt.output_dir": str(tmp_path / "out"), "--ckpt.path": str(tmp_path / "saved")}
    with pytest.raises(DirectoryLockError, match="--ckpt.path"), held(mine, "second"):
        pytest.fail("two runs have one directory")
    with held({"--ckpt.path": str(tmp_path / "out")}, "third") as said:
        assert said == []


def test_one_directory_under_two_flags_and_the_file_that_goes_with_its_directory(tmp_path: Path) -> None:
    with held({"--ckpt.path": str(tmp_path), "--ckpt.output_dir": f"{tmp_path}/"}, "run"):
        (tmp_path / OWNER_FILE).unlink()
        # Who deleted the file gave the directory away; its new owner's file stays.
        with held({"--ckpt.path": str(tmp_path)}, "next"):
            pass
        (tmp_path / OWNER_FILE).write_text("another's")
    assert (tmp_path / OWNER_FILE).read_text() == "another's"


def test_an_owner_that_ends_just_now_leaves_no_lock_on_a_file_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    lock = directory_lock.fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        tried.append(descriptor)
        if len(tried) == 1:
            (tmp_path / OWNER_FILE).unlink()

    monkeypatch.setattr(directory_lock.fcntl, "flock", flock)
    with held({"--ckpt.path": str(tmp_path)}, "run"):
        assert len(tried) == 2 and json.loads((tmp_path / OWNER_FILE).read_text())["run"] == "run"


def test_a_file_system_without_locks_is_said_and_one_that_cannot_be_written_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryLockError, match="cannot be written to"), held({"--ckpt.path": f"{tmp_path}/file"}, ""):
        pytest.fail("a file is no directory")
    monkeypatch.setattr(directory_lock.fcntl, "flock", without_locks)
    with held({"--ckpt.path": str(tmp_path)}, "run") as said:
        assert said == [f"--ckpt.path {tmp_path} is on a file system without locks: let no other run use it meanwhile"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "in use by another run: choose"),
        (b"[1]", "in use by another run: choose"),
        (
            json.dumps({"run": "r", "pid": 7, "host": "elsewhere", "since": "now"}).encode(),
            "in use by run r (process 7 on elsewhere, since now): choose another directory, or wait until that run has "
            f"ended; if that machine is gone for good, delete /saved/{OWNER_FILE}",
        ),
    ],
)
def test_the_owner_is_named_as_far_as_it_is_known(content: bytes, said: str) -> None:
    assert said in directory_lock._in_use("--ckpt.path", Path("/saved"), content)
