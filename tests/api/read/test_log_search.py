"""Search in a log: every line once, in order, for every size of the blocks read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.api.read import log_search
from rhyme_openrlhf.api.read.log_files import process_name, read_blocks, read_tail
from rhyme_openrlhf.api.read.log_search import search
from tests.examples import examples


def all_matches(path: Path, text: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    start = 0
    with path.open("rb") as file:
        while True:
            part = search(file, text, start)
            found += [(one.start, one.text) for one in part.items]
            if part.scanned_to >= part.size:
                return found
            assert part.scanned_to > start
            start = part.scanned_to


@settings(deadline=None, max_examples=examples(60))
@given(lines=st.lists(st.text("aAb x\u00e4", max_size=12), max_size=40), ends=st.booleans())
def test_as_a_plain_loop_finds_them(lines: list[str], ends: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("log") / "driver.log"
    data = ("\n".join(lines) + ("\n" if ends else "")).encode()
    path.write_bytes(data)
    expected = []
    at = 0
    for line in data.split(b"\n"):
        if b"ab" in line.lower():
            expected.append((at, line.decode()))
        at += len(line) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_search, "_BLOCK", 16)
        patch.setattr(log_search, "MAX_SCAN", 64)
        patch.setattr(log_search, "MAX_MATCHES", 3)
        assert all_matches(path, "AB") == expected


def test_a_line_is_cut_and_a_huge_one_does_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (12 * 1024 * 1024) + b"\nneedle " + b"y" * 1000 + b"\n")
    found = all_matches(path, "needle")
    assert len(found) == 1 and len(found[0][1]) == log_search.LINE_BYTES


def test_lines_before_a_byte_the_writer_and_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b":job_id:1\nsaid first\n:actor_name:Engine\nlast\n")
    with path.open("rb") as file:
        assert read_tail(file, 1, before=21).text == "said first\n"
        assert read_tail(file, 9, before=10**9).text.endswith("last\n")
        assert read_tail(file, 5, before=0).text == ""
        assert process_name(file) == "Engine"
        assert b"".join(read_blocks(file)) == path.read_bytes()
    assert process_name(io.BytesIO(b"x :actor_name:No\n")) == ""
