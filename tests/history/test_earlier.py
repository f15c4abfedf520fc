"""The responses of earlier runs that a prompt drafts from: by progress, by use, and none that could do harm."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.history import earlier as earlier_module
from rhyme_openrlhf.history import store as store_module
from rhyme_openrlhf.history.archive import Archive, ArchiveReader, ArchiveWriter, Stored, delete
from rhyme_openrlhf.history.earlier import (
    JUDGED_LENGTH,
    JUDGED_OTHERS,
    JUDGED_SAMPLES,
    LEAST_RIGHT,
    RUNS_DRAFTED,
    EarlierRuns,
    Known,
    Sources,
    agreement,
    around,
)
from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import HEAD, Record, encode
from rhyme_openrlhf.history.store import MOST_RUNS, archives_in
from rhyme_openrlhf.telemetry.events import EarlierRun
from tests.examples import examples
from tests.history.archives import LIMIT, TOKENIZER, about, archive, record

P, Q = "a" * 32, "b" * 32
VOCABULARY = 100


def runs_of(
    *archives: Archive, stores: Sequence[Path] = (), most_tokens: int = 10**6, said: list[str] | None = None,
    limits: dict[str, dict[str, int]] | None = None,
) -> EarlierRuns:  # fmt: skip
    sources = Sources(archives, tuple(stores), TOKENIZER, VOCABULARY, None, limits or {})
    runs = EarlierRuns(sources, lambda _: True, most_tokens, ([] if said is None else said).append)
    runs.refresh()
    return runs


def drafted(runs: EarlierRuns, key: str, visit: int) -> list[list[int]]:
    return [list(piece.tokens) for piece in runs.pieces(runs.choose(key, visit))]


def text(seed: int, size: int = 200) -> list[int]:
    return [random.Random(seed).randrange(VOCABULARY) for _ in range(size)]


def wrong(real: list[int]) -> list[int]:
    """Return a text that goes on wrongly after any two tokens of the real one."""
    return [token for at in range(len(real) - 1) for token in (*real[at : at + 2], (real[at] + 50) % VOCABULARY)]


def test_a_visit_drafts_from_the_same_epoch_and_the_next(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", *(record(P, step, [step, step]) for step in (2, 5, 9)), record(Q, 3, [1]))
    runs = runs_of(made)
    by_visit = [drafted(runs, P, visit) for visit in range(5)]
    assert by_visit == [[[2, 2], [5, 5]], [[5, 5], [9, 9]], [[9, 9]], [[9, 9]], [[9, 9]]]
    assert (drafted(runs, Q, 3), drafted(runs, "c" * 32, 0)) == ([[1]], [])


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(0, 9))
def test_around_a_visit_there_are_at_most_two_rollouts(steps: list[int], visit: int) -> None:
    rollouts = [[step] for step in steps]
    found = around(rollouts, visit)  # type: ignore[arg-type]
    assert list(found) == rollouts[min(visit, max(len(rollouts) - 1, 0)) :][:2]
    assert bool(found) == bool(rollouts)


def test_parts_of_a_rollout_add_up(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", record(P, 1, [1]), record(P, 2, [3]), record(P, 1, [2]))
    assert drafted(runs_of(made), P, 0) == [[1], [2], [3]]


def test_earlier_responses_have_no_reward(tmp_path: Path) -> None:
    runs = runs_of(archive(tmp_path / "a", record(P, 1, [1], reward=100.0)))
    assert [piece.reward for piece in runs.pieces(runs.choose(P, 0))] == [0.0]


def test_two_runs_draft_and_the_newest_comes_last(tmp_path: Path) -> None:
    made = [archive(tmp_path / str(n), record(P, 1, [n]), run="the same name", started=n) for n in range(1, 5)]
    runs = runs_of(*made)
    assert drafted(runs, P, 0) == [[3], [4]]
    assert [(known.run, known.prompts, known.rollouts) for known in runs.known([P, Q])] == [("the same name", 1, 1)] * 4
    assert len({known.archive for known in runs.known([P])}) == 4


def test_a_prompt_takes_no_more_tokens_than_it_may(tmp_path: Path) -> None:
    # A response has two tokens of context.
    made = archive(tmp_path / "a", record(P, 1, [1] * 8), record(P, 2, [2] * 8), record(P, 3, [3] * 80))
    assert drafted(runs_of(made, most_tokens=10), P, 0) == [[1] * 8]
    assert drafted(runs_of(made, most_tokens=20), P, 1) == [[2] * 8]


def test_the_run_that_says_what_this_one_says_is_chosen(tmp_path: Path) -> None:
    like, unlike, third = (
        archive(tmp_path / str(n), record(P, 1, text(n)), record(Q, 1, text(n + 10)), run=str(n), started=n)
        for n in range(3)
    )
    said: list[str] = []
    runs = runs_of(like, unlike, third, said=said)
    assert drafted(runs, P, 0) == [text(1), text(2)]
    runs.judge(Q, 0, [Piece([7, 7], text(10), 1.0)])
    runs.judge(P, 0, [Piece([7, 7], text(0), 1.0)])
    # The best comes last.
    assert drafted(runs, P, 0)[-1] == text(0)


def test_a_run_whose_drafts_are_wrong_is_left_out_at_once(tmp_path: Path) -> None:
    """Poison: after any two tokens of the real response the archive goes on wrongly."""
    real = text(1, 240)
    good = archive(tmp_path / "good", record(P, 1, real), run="good")
    poisoned = archive(tmp_path / "poisoned", record(P, 1, wrong(real)), run="poisoned", started=2)
    said: list[str] = []
    runs = runs_of(good, poisoned, said=said)
    runs.judge(P, 0, [Piece([7, 7], real, 1.0)])
    assert drafted(runs, P, 0) == [real]
    assert len(said) == 1 and "poisoned" in said[0]
    assert runs.has(P)
    # It stays out, and nobody hears of it again.
    runs.judge(P, 0, [Piece([7, 7], real, 1.0)])
    assert len(said) == 1


def test_one_bad_step_does_not_leave_a_run_out_for_good(tmp_path: Path) -> None:
    """A poisoned run stays out, also when it is the only one and so drafts nothing."""
    bad_step, real = text(5, 240), text(1, 240)
    said: list[str] = []
    runs = runs_of(archive(tmp_path / "a", record(P, 1, real), record(Q, 1, wrong(bad_step)), run="a"), said=said)
    runs.judge(Q, 0, [Piece([7, 7], bad_step, 1.0)])
    assert not runs.has(P) and runs.judges(P)
    steps = 0
    while not runs.has(P):
        steps += 1
        runs.judge(P, 0, [Piece([7, 7], real, 1.0)])
    assert steps <= 2
    assert [sentence.split(" from ")[0] for sentence in said] == ["no longer drafts", "drafts again"]
    assert drafted(runs, P, 0) == [real]


def test_what_drafts_is_always_judged_and_the_others_in_turn(tmp_path: Path) -> None:
    """However many runs there are, and however long their rollouts: what is read for a prompt is bounded."""
    count = RUNS_DRAFTED + 3 * JUDGED_OTHERS
    long = [text(seed, 4 * JUDGED_LENGTH) for seed in range(2 * JUDGED_SAMPLES)]
    made = [
        archive(tmp_path / str(n), *(record(P, step, *long) for step in (1, 2, 3)), run=str(n), started=n)
        for n in range(count)
    ]
    runs = runs_of(*made)
    read: list[tuple[str, int]] = []

    class Counting(ArchiveReader):
        def read(self, stored: Stored) -> bytes | None:
            read.append((self.archive.about.run, stored.rollout_id))
            return super().read(stored)

    for run in runs._runs.values():
        run.reader.__class__ = Counting
    judged = []
    for _ in range(3):
        read.clear()
        runs.judge(P, 0, [Piece([7, 7], text(99), 1.0)])
        assert {rollout for _, rollout in read} == {1, 2}
        assert len(read) == 2 * (RUNS_DRAFTED + JUDGED_OTHERS)
        judged.append({run for run, _ in read})
    assert {str(count - 1), str(count - 2)} <= judged[0]
    assert set.union(*judged) == {str(n) for n in range(count)}


def test_only_the_beginnings_of_some_responses_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [[n] * (3 * JUDGED_LENGTH) for n in range(3 * JUDGED_SAMPLES)]
    runs = runs_of(archive(tmp_path / "a", record(P, 1, *many), record(P, 2, *many)))
    indexed: list[list[Piece]] = []
    monkeypatch.setattr(earlier_module, "agreement", lambda pieces, said: indexed.append(pieces) or (1, 1))
    runs.judge(P, 0, [Piece([7, 7], [1], 1.0)])
    (pieces,) = indexed
    assert [len(piece.tokens) for piece in pieces] == [JUDGED_LENGTH] * 2 * JUDGED_SAMPLES


def test_what_was_found_out_is_told(tmp_path: Path) -> None:
    real = text(1, 240)
    good = archive(tmp_path / "good", record(P, 1, real), record(P, 2, real), run="good")
    bad = archive(tmp_path / "bad", record(P, 1, wrong(real)), run="bad", started=2)
    archive_of_another = archive(tmp_path / "other", record("c" * 32, 1, real))
    runs = runs_of(good, bad, archive_of_another)
    runs.known([P, Q])
    assert runs.reports(5, 3) == [
        EarlierRun(5, 3, "good", "", str(good.directory), 1, 2, 2, 0, 0, 0, False),
        EarlierRun(5, 3, "bad", "", str(bad.directory), 1, 2, 1, 0, 0, 0, False),
    ]
    runs.judge(P, 0, [Piece([7, 7], real, 1.0)])
    drafted(runs, P, 0)
    first, second = runs.reports(5, 3)
    assert (first.drafted_from, first.left_out, second.drafted_from, second.left_out) == (1, False, 0, True)
    assert first.right > 0.9 * first.judged > 100 and second.right < LEAST_RIGHT * second.judged


def test_agreement_counts_the_drafted_tokens_that_were_right() -> None:
    same = [Piece([7, 7], text(1), 1.0)]
    right, drafts = agreement(same, same)
    assert right == drafts > 100
    other = agreement([Piece([7, 7], text(2), 1.0)], same)
    assert other[0] <= LEAST_RIGHT * max(other[1], 1)
    assert agreement(same, [Piece([7], [5], 1.0)]) == (0, 0)


# --- hostile archives


@pytest.mark.parametrize("bad", [[VOCABULARY], [2**31 - 1], [1, 2, VOCABULARY]])
def test_tokens_that_the_model_lacks_are_never_drafted(tmp_path: Path, bad: list[int]) -> None:
    made = archive(tmp_path / "a", record(P, 1, [1, 2], bad, [VOCABULARY - 1]))
    assert drafted(runs_of(made), P, 0) == [[1, 2], [VOCABULARY - 1]]


def hostile(directory: Path, **changes: int) -> Archive:
    """An archive whose one record is whole, but says something impossible of its sizes."""
    names = ("rollout", "key", "lengths", "earlier", "pieces", "tokens", "block")
    encoded = bytearray(encode(record(P, 1, [1, 2, 3])))
    fields = dict(zip(names, HEAD.unpack_from(encoded), strict=True)) | changes
    HEAD.pack_into(encoded, 0, *fields.values())
    writer = ArchiveWriter(directory, about(), 0, LIMIT)
    writer.add(bytes(encoded))
    return archives_in(directory)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1}, {"tokens": 2**20}, {"block": 0}, {"block": 2**62}, {"pieces": 2**31}, {"pieces": 0},
        {"lengths": 2**31}, {"earlier": 2**31}, {"lengths": 0}, {"rollout": -(2**62)},
    ],
)  # fmt: skip
def test_impossible_sizes_cost_drafts_at_most(tmp_path: Path, changes: dict[str, int]) -> None:
    said: list[str] = []
    runs = runs_of(hostile(tmp_path / "a", **changes), archive(tmp_path / "b", record(P, 1, [5])), said=said)
    assert [5] in drafted(runs, P, 0)
    runs.judge(P, 0, [Piece([7, 7], text(1), 1.0)])
    assert isinstance(runs.lengths(P, 0), tuple)


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200), st.integers(0, HEAD.size + 60))
def test_any_record_costs_drafts_at_most(tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int) -> None:
    directory = tmp_path_factory.mktemp("hostile")
    encoded = bytearray(encode(record(P, 1, [1, 2, 3])))
    encoded[place : place + len(noise)] = noise
    writer = ArchiveWriter(directory / "a", about(), 0, LIMIT)
    writer.add(bytes(encoded))
    runs = runs_of(archives_in(directory / "a")[0])
    for visit in (0, 1):
        runs.pieces(runs.choose(P, visit))
        runs.lengths(P, visit)
        runs.judge(P, visit, [Piece([7, 7], [1, 2, 3], 1.0)])


def test_a_record_that_unpacks_to_more_than_it_says_is_absent(tmp_path: Path) -> None:
    """A bomb: a thousand bytes that decompress to a megabyte."""
    encoded = bytearray(encode(Record(P, 1, (Piece([], [0] * 2**18, 1.0),), (2**18,))))
    fields = list(HEAD.unpack_from(encoded))
    fields[5] = 4
    HEAD.pack_into(encoded, 0, *fields)
    writer = ArchiveWriter(tmp_path / "a", about(), 0, LIMIT)
    writer.add(bytes(encoded))
    assert drafted(runs_of(archives_in(tmp_path / "a")[0]), P, 0) == []


# --- archives that change


def test_a_store_is_seen_as_it_grows(tmp_path: Path) -> None:
    runs = runs_of(stores=[tmp_path / "store"])
    assert not runs.has(P)
    writer = ArchiveWriter(tmp_path / "store" / "a", about("sibling"), 0, LIMIT)
    ArchiveWriter(tmp_path / "store" / "b", about("other", "another tokenizer"), 0, LIMIT).add(
        encode(record(P, 1, [9]))
    )
    writer.add(encode(record(P, 1, [1])))
    runs.refresh()
    assert drafted(runs, P, 0) == [[1]]
    writer.add(encode(record(P, 2, [2])))
    runs.refresh()
    assert drafted(runs, P, 0) == [[1], [2]]
    assert runs.known([P]) == [Known(str(tmp_path / "store" / "a"), "sibling", 1, 2)]


def test_a_run_reads_no_more_than_the_newest_of_a_store(tmp_path: Path) -> None:
    """In a sweep runs come and go for days: what a run holds of them is bounded."""
    named = archive(tmp_path / "named", record(P, 1, [1]), run="named", started=-1)
    sources = Sources((named,), (tmp_path / "store",), TOKENIZER, VOCABULARY)
    runs = EarlierRuns(sources, lambda _: True, 10**6, pytest.fail)
    sizes = []
    for number in range(MOST_RUNS + 5):
        archive(tmp_path / "store" / str(number), record(P, 1, [number]), run=str(number), started=number)
        runs.refresh()
        sizes.append(runs.data_bytes)
    assert {one.run for one in runs.known([P])} == {"named", *map(str, range(5, MOST_RUNS + 5))}
    assert sizes[-1] == sizes[MOST_RUNS] == max(sizes)
    # Deleted ones are forgotten too.
    for one in archives_in(tmp_path / "store"):
        delete(one)
    runs.refresh()
    assert [one.run for one in runs.known([P])] == ["named"]
    assert runs.data_bytes == sizes[0] // 2


def test_a_stores_descriptions_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        archive(tmp_path / str(number), record(P, 1, [number]))
    read: list[Path] = []
    read_archive = store_module.read_archive
    monkeypatch.setattr(store_module, "read_archive", lambda path: read.append(path) or read_archive(path))
    runs = runs_of(stores=[tmp_path])
    runs.refresh()
    assert len(read) == 3


def test_a_run_never_drafts_from_its_own_archive(tmp_path: Path) -> None:
    archive(tmp_path / "store" / "mine", record(P, 1, [1]))
    sources = Sources((), (tmp_path / "store",), TOKENIZER, VOCABULARY, tmp_path / "store" / "mine")
    runs = EarlierRuns(sources, lambda _: True, 10**6, pytest.fail)
    runs.refresh()
    assert not runs.has(P)


def test_with_limits_nothing_that_came_later_is_read(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", record(P, 1, [1]))
    limits = {str(made.directory): made.sizes}
    archive(tmp_path / "a", record(P, 2, [2]))
    assert drafted(runs_of(made, limits=limits), P, 0) == [[1]]
    assert drafted(runs_of(made), P, 0) == [[1], [2]]


def test_lengths_are_those_of_the_same_visit(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", record(P, 1, [1], [1, 1]), record(P, 2, [2] * 5))
    runs = runs_of(made)
    assert [runs.lengths(P, visit) for visit in (0, 1, 2)] == [(1, 2), (5,), (5,)]
    assert runs.lengths(Q, 0) == ()


def test_a_worker_reads_only_its_own_prompts(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", record(P, 1, [1]), record(Q, 1, [2]))
    runs = EarlierRuns(Sources((made,), (), TOKENIZER, VOCABULARY), lambda key: key == Q, 10**6, pytest.fail)
    runs.refresh()
    assert (runs.has(P), runs.has(Q)) == (False, True)


def test_struct_sizes_are_those_of_the_reader() -> None:
    # The reader looks at a record's head without its tokens.
    assert HEAD.size == struct.calcsize("<qIIIIQQ")
    assert ArchiveReader.__dataclass_fields__["limits"].default is None
