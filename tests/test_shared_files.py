"""Files in shared memory: those of a dead process go, those of a living one stay, also in another container."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rhyme_openrlhf.shared_files import SHARED_MEMORY, OwnedFiles, remove_stale

KIND = "rhyme-tested"
NOBODY = 65534
# Process and mount namespaces of its own: a container that shares the host's /dev/shm (--ipc=host).
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
OWNER = """
import sys
from pathlib import Path
from rhyme_openrlhf.shared_files import OwnedFiles
print(OwnedFiles(sys.argv[1], Path(sys.argv[2])).make("1"), flush=True)
sys.stdin.read()
"""


@contextmanager
def owner_in_a_container(folder: Path) -> Iterator[Path]:
    """A file of a process in a container of its own, which lives for as long as the block."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no namespaces")
    with subprocess.Popen(
        [*CONTAINER, sys.executable, "-c", OWNER, KIND, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        yield Path(owner.stdout.readline().strip())
        owner.communicate("")


def test_a_living_process_of_another_container_keeps_its_files(tmp_path: Path) -> None:
    with owner_in_a_container(tmp_path) as file:
        # In its container it may have the number of any process here, or of none.
        assert file.exists() and remove_stale(KIND, tmp_path) == []
        other = OwnedFiles(KIND, tmp_path)
        assert file.exists()
        mine = other.make("1")
        # Nor does the owner's container take away what is of this one.
        with owner_in_a_container(tmp_path):
            assert Path(mine).exists()
    # Its process has ended, and with it the lock.
    assert file.name in remove_stale(KIND, tmp_path) and not file.exists() and Path(mine).exists()


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder as /dev/shm: everyone makes files there, and removes only their own. (Tests' own are private.)"""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_what_another_user_left_is_left_alone(shared_folder: Path) -> None:
    folder = shared_folder
    private, readable = folder / f"{KIND}-1-private", folder / f"{KIND}-1-readable"
    private.touch(0o600)
    readable.touch(0o644)
    os.seteuid(NOBODY)
    try:
        mine = OwnedFiles(KIND, folder).make("1")
    finally:
        os.seteuid(0)
    assert private.exists() and readable.exists() and Path(mine).stat().st_uid == NOBODY
    assert sorted(remove_stale(KIND, folder)) == sorted([private.name, readable.name])


def test_a_renamed_file_stays_owned_and_a_removed_one_is_gone(tmp_path: Path) -> None:
    files = OwnedFiles(KIND, tmp_path)
    path = files.rename(files.make("1"), "2")
    assert path == files.path("2") and remove_stale(KIND, tmp_path) == []
    files.remove(path)
    files.remove(path)
    assert not list(tmp_path.iterdir())
    # Its lock went with it.
    assert files.make("2") == path


def test_a_link_or_a_folder_of_that_name_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    (tmp_path / f"{KIND}-link").symlink_to(target)
    (tmp_path / f"{KIND}-folder").mkdir()
    assert remove_stale(KIND, tmp_path) == [] and target.exists()


def test_a_file_that_is_taken_for_a_dead_ones_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    flock, removed = fcntl.flock, []

    def after_another_process(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(path)
            Path(path).unlink()
        flock(descriptor, operation)

    files = OwnedFiles(KIND, tmp_path)
    path = files.path("1")
    monkeypatch.setattr(fcntl, "flock", after_another_process)
    assert files.make("1") == path and removed and Path(path).exists()
