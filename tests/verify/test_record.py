"""The record of proved checks: kept by device and versions, withdrawn on failure; a broken file counts as empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhyme_openrlhf.verify.outcome import Outcome, Result
from rhyme_openrlhf.verify.record import Entry, entry_of, path, read, update, verified_on, write

VERSIONS = {"rhyme-openrlhf": "0.1.0", "openrlhf": "0.11.2", "vllm": "0.29.0", "torch": "2.13.0", "numpy": "2.3.0"}
GREEDY, SAMPLED = "lossless-greedy", "lossless-sampled"


def outcome(proves: str, result: Result) -> Outcome:
    return Outcome("what", result, proves=proves)


def test_proofs_add_up_over_calls_and_failures_take_them_back() -> None:
    entries = update([], "H", VERSIONS, [outcome(GREEDY, "ok"), outcome("", "ok")], "2026-01-01")
    assert entry_of(entries, "H", VERSIONS).proofs == {GREEDY: "2026-01-01"}
    assert verified_on("history speculation", entry_of(entries, "H", VERSIONS).proofs) == ""
    entries = update(entries, "H", VERSIONS, [outcome(SAMPLED, "ok")], "2026-01-02")
    assert verified_on("history speculation", entry_of(entries, "H", VERSIONS).proofs) == "2026-01-02"
    for no_proof in ("skipped", "informative"):
        assert update(entries, "H", VERSIONS, [outcome(GREEDY, no_proof)], "2026-01-03") == entries  # type: ignore[arg-type]
    entries = update(entries, "H", VERSIONS, [outcome(GREEDY, "failed")], "2026-01-03")
    assert entry_of(entries, "H", VERSIONS).proofs == {SAMPLED: "2026-01-02"}


def test_other_versions_of_what_decides_start_anew_and_other_devices_stay() -> None:
    entries = update([], "H", VERSIONS, [outcome(GREEDY, "ok")], "2026-01-01")
    entries = update(entries, "CPU", VERSIONS, [outcome(GREEDY, "ok")], "2026-01-02")
    assert entry_of(entries, "H", {**VERSIONS, "numpy": "9"}).proofs == {GREEDY: "2026-01-01"}
    newer = {**VERSIONS, "vllm": "0.30.0"}
    assert entry_of(entries, "H", newer).proofs == {}
    entries = update(entries, "H", newer, [outcome(SAMPLED, "ok")], "2026-01-03")
    assert entry_of(entries, "H", newer).proofs == {SAMPLED: "2026-01-03"}
    assert entry_of(entries, "CPU", VERSIONS).proofs == {GREEDY: "2026-01-02"} and len(entries) == 2


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "verified.json"
    entries = [Entry("H", {"torch": "2.13.0"}, {GREEDY: "2026-01-01"})]
    write(file, entries)
    assert read(file) == entries
    assert [found.name for found in file.parent.iterdir()] == ["verified.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"verified": 3}', '{"verified": [1]}', '{"verified": [{"device": "H"}]}', "\ufffd"]
)
def test_a_broken_file_counts_as_empty(text: str, tmp_path: Path) -> None:
    file = tmp_path / "verified.json"
    file.write_text(text)
    assert read(file) == [] and read(tmp_path / "missing") == []


def test_it_lies_in_the_users_cache() -> None:
    assert path({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/rhyme-openrlhf/verified.json")
    assert path({"HOME": "/h"}) == Path("/h/.cache/rhyme-openrlhf/verified.json")
