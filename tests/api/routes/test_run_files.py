"""Files of a run: listed by kind, packed into one archive, and no file from elsewhere."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.api.read.run_files import BLOCK, Place, archive, kind_of

UID = "a" * 16
FILES = f"/api/v1/runs/{UID}/attempts/1/files"
ARCHIVE = f"/api/v1/runs/{UID}/attempts/1/archive"
SECRET = b"the secret"


@pytest.fixture
def with_files(api: Any) -> Any:
    """A run with files of each kind, and links to files that nobody may read."""
    run: Path = api.root / UID
    contents = {
        "config.json": b"{}", "events.jsonl": b"x" * (2 * BLOCK + 5), "logs/driver.log": b"line\n", "logs/w/0.log": b"",
        "samples/step-000001.jsonl": b"{}\n", "history/0.journal": b"j",
    }  # fmt: skip
    for name, content in contents.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    checkpoints = api.root / "ckpt"
    checkpoints.mkdir()
    (checkpoints / "model.bin").write_bytes(b"weights")
    (run / "checkpoints").symlink_to(checkpoints)
    outside = api.root.parent / "outside"
    outside.mkdir()
    (outside / "passwd").write_bytes(SECRET)
    (run / "logs" / "link").symlink_to(outside / "passwd")
    (run / "logs" / "folder").symlink_to(outside)
    (checkpoints / "link").symlink_to(outside / "passwd")
    os.mkfifo(run / "logs" / "pipe")
    api.announce()
    return api


def unpacked(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        assert all(one.isreg() for one in tar.getmembers())
        return {one.name: (tar.extractfile(one) or io.BytesIO()).read() for one in tar.getmembers()}


def test_files_are_listed_by_kind(with_files: Any) -> None:
    found = with_files.viewer.get(FILES).json()
    assert found["directory"] == str(with_files.root / UID) and found["checkpoints"] == str(with_files.root / "ckpt")
    assert {(one["name"], one["kind"], one["size"]) for one in found["files"]} == {
        ("config.json", "record", 2), ("events.jsonl", "record", 2 * BLOCK + 5), ("logs/driver.log", "logs", 5),
        ("logs/w/0.log", "logs", 0), ("samples/step-000001.jsonl", "samples", 3), ("history/0.journal", "history", 1),
        ("checkpoints/model.bin", "checkpoints", 7),
    }  # fmt: skip


def test_an_archive_has_the_files_whole(with_files: Any) -> None:
    answer = with_files.operator.get(ARCHIVE)
    assert answer.headers["content-disposition"].endswith(f"{UID}-1.tar.gz")
    found = unpacked(answer.content)
    run = with_files.root / UID
    names = ["config.json", "events.jsonl", "logs/driver.log", "logs/w/0.log", "samples/step-000001.jsonl"]
    assert found == {f"{UID}-1/{name}": (run / name).read_bytes() for name in names}
    some = with_files.operator.get(ARCHIVE, params={"kind": ["checkpoints", "history"]})
    assert set(unpacked(some.content)) == {f"{UID}-1/checkpoints/model.bin", f"{UID}-1/history/0.journal"}
    assert with_files.operator.get(ARCHIVE, params={"kind": "all"}).status_code == 422


def test_directories_elsewhere_are_refused(with_files: Any) -> None:
    assert with_files.viewer.get(FILES.replace("/1/", "/2/")).status_code == 404
    # Checkpoints below no root of the service.
    link = with_files.root / UID / "checkpoints"
    link.unlink()
    link.symlink_to(with_files.root.parent / "outside")
    found = with_files.viewer.get(FILES).json()
    assert found["checkpoints"] == "" and all(one["kind"] != "checkpoints" for one in found["files"])
    assert SECRET not in with_files.operator.get(ARCHIVE, params={"kind": ["checkpoints", "logs"]}).content


def test_a_file_that_changes_while_it_is_packed_leaves_the_archive_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * (BLOCK + 10))
    (tmp_path / "b").write_bytes(b"b")
    pieces = archive([Place("", tmp_path)], ["record"], "run")
    content = next(pieces) + next(pieces)
    os.truncate(tmp_path / "a", 100)
    (tmp_path / "b").unlink()
    found = unpacked(content + b"".join(pieces))
    assert set(found) == {"run/a"} and len(found["run/a"]) == BLOCK + 10


def test_kinds_go_by_the_first_folder() -> None:
    kinds = {name: kind_of(name) for name in ("logs", "logs/a", "config.json", "samples/x", "other/y")}
    assert kinds == {
        "logs": "record", "logs/a": "logs", "config.json": "record", "samples/x": "samples", "other/y": "record",
    }  # fmt: skip
