"""Regular files only: no pipe is waited for, no link leads out, also one that appears while a file is opened."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

import pytest

from rhyme_openrlhf.regular_files import entries_below, open_below, open_regular, read_regular


def test_a_pipe_a_folder_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="regular file|below its folder"):
            open_below(tmp_path, name)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)


def test_a_link_may_lead_to_a_file_of_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("mine")
    (tmp_path / "secret").write_text("another's")
    (folder / "link").symlink_to("inner/file")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    with open_below(folder, "link") as file:
        assert file.read() == b"mine"
    for name in ("out", "up/secret", "../secret", "/etc/hostname", "loop", "", "a\0b", "missing"):
        with pytest.raises(OSError) as refused:
            open_below(folder, name)
        assert refused.value.strerror and refused.value.filename


def test_a_folder_that_becomes_a_link_while_a_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("another's")
    # Resolved when it was still a folder of its own.
    monkeypatch.setattr(Path, "resolve", lambda path: path)
    (folder / "inner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError) as refused:
        open_below(folder, "inner/file")
    assert refused.value.filename == str(folder / "inner" / "file")


def test_entries_are_those_of_the_folder_itself(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("12")
    (folder / "b").write_text("1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("another's")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert [(name, about.st_size) for name, about in entries_below(folder) if S_ISREG(about.st_mode)] == [
        ("b", 1), ("inner/file", 2),
    ]  # fmt: skip
    # A link takes the place of the folder after the folder was resolved.
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    for path in (folder, folder / "inner"):
        with pytest.raises(OSError):
            next(entries_below(path))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    os.truncate(tmp_path / "file", 2**40)
    with pytest.raises(OSError, match="more than 5 bytes"):
        read_regular(tmp_path / "file", 5)
