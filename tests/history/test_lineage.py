"""A run's lineage: what it may draft from, and what a reproducible run finds again."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.history.archive import ArchiveError, ArchiveWriter, fingerprint
from rhyme_openrlhf.history.lineage import Ancestors, Lineage, ancestors, lineage
from rhyme_openrlhf.history.store import MOST_RUNS
from rhyme_openrlhf.settings.history import HistorySettings
from tests.history.archives import LIMIT, TOKENIZER, about, archive, record

P = "a" * 32


class Tokenizer:
    """Stands for a tokenizer, with what a fingerprint reads of it."""

    def __init__(self, words: str = "a b c", end: str = "c") -> None:
        self._vocabulary = {word: number for number, word in enumerate(words.split())}
        self.special_tokens_map = {"eos_token": end}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def __len__(self) -> int:
        return len(self._vocabulary)


MARK = fingerprint(Tokenizer())


def a_run(path: Path, tokenizer: str = MARK, started: float = 1.0) -> Path:
    ArchiveWriter(path / "history" / "archive", about(path.name, tokenizer, started), 0, LIMIT).close()
    return path


def of(found: Lineage) -> list[str]:
    return [one.about.run for one in found.sources.archives]


def made(run: Path, reproducible: bool = False, resumed: Any = None, named: Ancestors | None = None, **settings: str):  # type: ignore[no-untyped-def]
    readable = named or Ancestors(MARK, 3)
    return lineage(HistorySettings(**settings), reproducible, run, about("this", MARK), readable, resumed)  # type: ignore[arg-type]


def test_a_fingerprint_is_of_vocabulary_and_special_tokens() -> None:
    assert fingerprint(Tokenizer()) == MARK
    assert len({MARK, fingerprint(Tokenizer("a c b")), fingerprint(Tokenizer(end="b"))}) == 3


def test_another_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    same, other = a_run(tmp_path / "same"), a_run(tmp_path / "other", "another")
    found = ancestors(HistorySettings(earlier=f"{same}, {same / 'history' / 'archive'}"), Tokenizer())
    assert (found.tokenizer, found.vocabulary, [one.about.run for one in found.named]) == (MARK, 3, ["same", "same"])
    with pytest.raises(ArchiveError, match=r"^--history\.earlier: .*other has responses of another tokenizer"):
        ancestors(HistorySettings(earlier=f"{same},{other}"), Tokenizer())
    with pytest.raises(ArchiveError, match=r"^--history\.earlier: .*nowhere is no run directory"):
        ancestors(HistorySettings(earlier=str(tmp_path / "nowhere")), Tokenizer())
    for word in ("auto", "none"):
        assert ancestors(HistorySettings(earlier=word), Tokenizer()).named == ()


def test_a_run_that_may_resume_is_not_refused_for_what_is_gone(tmp_path: Path) -> None:
    same, gone = a_run(tmp_path / "same"), tmp_path / "gone"
    found = ancestors(HistorySettings(earlier=f"{gone},{same}"), Tokenizer(), may_resume=True)
    assert [one.about.run for one in found.named] == ["same"]
    assert [str(gone) in sentence for sentence in found.gone] == [True]
    # Its tokens would mean something else: that is a mistake of now.
    other = a_run(tmp_path / "other", "another")
    with pytest.raises(ArchiveError, match="another tokenizer"):
        ancestors(HistorySettings(earlier=f"{gone},{other}"), Tokenizer(), may_resume=True)
    resumed, said = made(tmp_path / "this", named=found, earlier=f"{gone},{same}")
    assert of(resumed) == ["same"]
    assert len(said) == 1 and "the run goes on with the history of its checkpoint" in said[0]
    # A reproducible run reads what its checkpoint names, and says what of that is missing.
    _, said = made(tmp_path / "this", True, {str(gone): {"worker-0.responses": 9}}, found, earlier=f"{gone},{same}")
    assert len(said) == 1 and f"drafted from {gone}, which is missing" in said[0]


def test_a_run_that_starts_bounds_its_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for number in range(MOST_RUNS + 2):
        archive(store / str(number), record(P, 1, [1]), run=str(number), started=number)
    _, said = made(tmp_path / "this", store=str(store), earlier="none")
    assert len(list(store.iterdir())) == MOST_RUNS
    assert len(said) == 1 and f"deleted the responses of 2 older runs from {store}" in said[0]
    assert made(tmp_path / "this", store=str(store))[1] == []


def test_auto_is_the_newest_runs_beside_this_one(tmp_path: Path) -> None:
    for number in range(6):
        os.utime(a_run(tmp_path / f"run-{number}", started=number), (number, number))
    os.utime(a_run(tmp_path / "other", "another"), (9, 9))
    (tmp_path / "this").mkdir()
    found, said = made(tmp_path / "this")
    assert (of(found), said) == (["run-2", "run-3", "run-4", "run-5"], [])
    assert found.archive == found.sources.own == tmp_path / "this" / "history" / "archive"
    assert of(made(tmp_path / "this", earlier="none")[0]) == []
    # Two reproducible runs beside each other must sample alike.
    assert of(made(tmp_path / "this", reproducible=True)[0]) == []


def test_runs_of_one_name_have_directories_of_their_own_in_a_store(tmp_path: Path) -> None:
    first, second = (made(tmp_path / "this", store=str(tmp_path / "store"))[0] for _ in range(2))
    assert first.archive != second.archive
    assert first.archive.parent == tmp_path / "store" and first.archive.name.startswith("this-")
    assert first.sources.stores == (tmp_path / "store",)
    written, _ = made(tmp_path / "this", store=str(tmp_path / "store"), earlier="none")
    assert (written.archive.parent, written.sources.stores) == (tmp_path / "store", ())


def test_a_reproducible_run_reads_what_was_there_and_its_resume_finds_it_again(tmp_path: Path) -> None:
    named = archive(tmp_path / "named", record(P, 1, [1]))
    archive(tmp_path / "store" / "a", record(P, 1, [1]))
    readable = Ancestors(TOKENIZER, 9, (named,))
    settings = HistorySettings(earlier=str(named.directory), store=str(tmp_path / "store"))
    run = about("this", TOKENIZER)
    found, said = lineage(settings, True, tmp_path / "this", run, readable)
    sizes = {str(tmp_path / "store" / "a"): named.sizes, str(named.directory): named.sizes}
    assert (found.fixed, found.sources.limits, found.sources.stores, said) == (sizes, sizes, (), [])
    assert len(found.sources.archives) == 2
    # What comes later is not read, also by the run that goes on from its checkpoint.
    archive(tmp_path / "store" / "b", record(P, 1, [1]))
    archive(tmp_path / "named", record(P, 2, [2]))
    again, said = lineage(settings, True, tmp_path / "resumed", run, readable, found.fixed)
    assert (again.fixed, said) == (sizes, [])
    assert {one.directory for one in again.sources.archives} == {Path(path) for path in sizes}
    # Another place on the command line changes nothing; what is missing is named.
    shutil.rmtree(tmp_path / "store" / "a")
    file = named.files[0]
    file.write_bytes(file.read_bytes()[:40])
    less, said = lineage(HistorySettings(), True, tmp_path / "resumed", run, readable, found.fixed)
    assert [one.directory for one in less.sources.archives] == [named.directory]
    assert len(said) == 2
    assert any("store/a, which is missing" in sentence for sentence in said)
    assert any("named, which lacks worker-0.responses" in sentence for sentence in said)


def test_what_checkpoints_hold_is_plain(tmp_path: Path) -> None:
    import json

    named = archive(tmp_path / "named", record(P, 1, [1]))
    found, _ = made(tmp_path / "this", True, named=Ancestors(TOKENIZER, 9, (named,)), earlier=str(named.directory))
    assert json.loads(json.dumps(found.fixed)) == found.fixed
    assert dataclasses.is_dataclass(found)
