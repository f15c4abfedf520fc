"""Logs: read in parts, and no file but a run's own logs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.api.read.log_files import LogError, list_logs, logs_of, open_log, read_range, read_tail

LOGS = f"/api/v1/runs/{'a' * 16}/attempts/1/logs"
SECRET = "the secret"


@pytest.fixture
def with_logs(api: Any) -> Any:
    """A run with logs, and files beside them that nobody may read."""
    run = api.root / ("a" * 16)
    logs = run / "logs"
    (logs / "worker").mkdir(parents=True)
    (logs / "driver.log").write_bytes("".join(f"line {i} ä\n" for i in range(1000)).encode())
    (logs / "worker" / "0.log").write_text("worker\n")
    (run / "config.json").write_text(SECRET)
    outside = api.root.parent / "outside"
    outside.mkdir()
    (outside / "passwd").write_text(SECRET)
    (logs / "link-out").symlink_to(outside / "passwd")
    (logs / "link-dir").symlink_to(outside)
    (logs / "link-in").symlink_to(logs / "driver.log")
    (logs / "link-up").symlink_to(run / "config.json")
    (logs / "loop").symlink_to(logs / "loop")
    os.mkfifo(logs / "pipe")
    api.announce()
    return api


def test_logs_are_listed_and_read(with_logs: Any) -> None:
    listed = with_logs.viewer.get(LOGS).json()
    assert [file["name"] for file in listed] == ["driver.log", "worker/0.log"]
    tail = with_logs.viewer.get(f"{LOGS}/driver.log", params={"tail": 2}).json()
    assert tail["text"] == "line 998 ä\nline 999 ä\n" and tail["end"] == tail["size"]
    part = with_logs.viewer.get(f"{LOGS}/driver.log", params={"start": 5, "length": 6}).json()
    assert part["text"] == "0 ä\nl" and (part["start"], part["end"]) == (5, 11)
    assert with_logs.viewer.get(f"{LOGS}/worker/0.log").json()["text"] == "worker\n"
    assert with_logs.viewer.get(f"{LOGS}/link-in", params={"tail": 1}).json()["text"] == "line 999 ä\n"
    behind = with_logs.viewer.get(f"{LOGS}/driver.log", params={"start": 10**9}).json()
    assert behind["text"] == "" and behind["start"] == behind["size"]


OTHER_FILES = [
    "../config.json",
    "..%2fconfig.json",
    "..%2f..%2f..%2foutside%2fpasswd",
    "%2e%2e/config.json",
    "worker/../../config.json",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "%2f%2fetc/passwd",
    "link-out",
    "link-dir/passwd",
    "link-up",
    "loop",
    "pipe",
    "worker",
    ".",
    "",
    "driver.log%00",
    "%00",
    "driver.log/x",
    "none",
    "a" * 900,
    "%ff",
    "..\\config.json",
    "~/x",
]


def test_no_other_file_is_read(with_logs: Any) -> None:
    # A service takes longer to make than to ask: one for all.
    for name, kind in itertools.product(OTHER_FILES, ("logs", "log-stream")):
        answer = with_logs.viewer.get(f"{LOGS.removesuffix('logs')}{kind}/{name}")
        known = name in ("", ".") and kind == "logs"
        assert answer.status_code in (404, 422) or known, (name, answer.status_code, answer.text)
        assert SECRET not in answer.text and "root:" not in answer.text, name


@pytest.mark.parametrize("directory", ["outside", "link", "", "/", "runs/../outside", "\x7f"])
def test_a_run_directory_outside_of_the_roots_has_no_logs(api: Any, directory: str) -> None:
    outside = api.root.parent / "outside"
    (outside / "logs").mkdir(parents=True)
    (outside / "logs" / "x.log").write_text(SECRET)
    (api.root / "link").symlink_to(outside)
    named = str(api.root / "link") if directory == "link" else directory
    if directory in ("outside", "runs/../outside"):
        named = str(api.root.parent / directory)
    api.announce(run_directory=named)
    for url in (LOGS, f"{LOGS}/x.log", f"{LOGS.removesuffix('logs')}log-stream/x.log"):
        answer = api.viewer.get(url)
        assert answer.status_code == 404 and SECRET not in answer.text


def test_logs_that_are_a_link_out_of_the_run_are_refused(api: Any) -> None:
    other = api.root / "other" / "logs"
    other.mkdir(parents=True)
    (other / "x.log").write_text(SECRET)
    (api.root / ("a" * 16)).mkdir()
    (api.root / ("a" * 16) / "logs").symlink_to(other)
    api.announce()
    assert api.viewer.get(f"{LOGS}/x.log").status_code == 404


def test_the_directory_of_an_import_is_below_the_roots(api: Any) -> None:
    outside = api.root.parent / "outside"
    outside.mkdir()
    (api.root / "link").symlink_to(outside)
    for directory in (str(outside), str(api.root / "link"), str(api.root / ".." / "outside"), "/etc", "x", "a\x7f"):
        answer = api.operator.post("/api/v1/imports", json={"directory": directory})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "body.directory"
    (api.root / "empty").mkdir()
    answer = api.operator.post("/api/v1/imports", json={"directory": str(api.root / "empty")})
    assert answer.status_code == 422 and "empty" in answer.json()["detail"]


@given(st.text(alphabet="aä€😀\n", max_size=60), st.integers(1, 9))
def test_pieces_make_the_whole_and_no_character_is_cut(tmp_path_factory: Any, text: str, length: int) -> None:
    path: Path = tmp_path_factory.mktemp("pieces") / "x"
    path.write_bytes(text.encode())
    read, offset = "", 0
    with path.open("rb") as file:
        # A piece must hold at least one whole character.
        for _ in range(500):
            chunk = read_range(file, offset, max(length, 4))
            if chunk.end == chunk.start:
                break
            read, offset = read + chunk.text, chunk.end
    assert read == text


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_stop_nobody(tmp_path_factory: Any, data: bytes) -> None:
    path: Path = tmp_path_factory.mktemp("bytes") / "x"
    path.write_bytes(data)
    offset = 0
    with path.open("rb") as file:
        for _ in range(100):
            chunk = read_range(file, offset, 4)
            if chunk.end == chunk.start:
                break
            offset = chunk.end
        assert read_tail(file, 3).size == len(data)
    assert len(data) - offset < 4


@given(st.lists(st.text(alphabet="ab", max_size=5), max_size=12), st.integers(1, 15), st.booleans())
def test_the_tail_is_the_last_lines(tmp_path_factory: Any, lines: list[str], count: int, ended: bool) -> None:
    path: Path = tmp_path_factory.mktemp("tail") / "x"
    text = "\n".join(lines) + ("\n" if ended and lines else "")
    path.write_text(text)
    with path.open("rb") as file:
        assert read_tail(file, count).text == "".join(text.splitlines(keepends=True)[-count:])


def test_names_from_anybody_raise_only_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    logs = logs_of(str(tmp_path), [tmp_path])
    assert list_logs(logs) == []
    for name in ("", "\0", "/", "..", "a/../b", "x" * 5000, "\ud800"):
        with pytest.raises(LogError), open_log(logs, name):
            pass
    for directory in ("", "\0", str(tmp_path / "none"), "x" * 10_000):
        with pytest.raises(LogError):
            logs_of(directory, [tmp_path])
