"""The journal: all complete records can be read again, however its last write ended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.history import journal
from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.journal import NO_RUN, JournaledShard, JournalError, read_entries, write_entries
from rhyme_openrlhf.history.record import Record, decode, encode
from rhyme_openrlhf.history.shard import HistoryShard
from tests.examples import examples

TOKEN = b"a run's own 16 b"
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=12)
pieces = st.builds(Piece, tokens, tokens, st.floats(allow_nan=False))
lengths = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
# Few prompts and steps, so that records replace each other, add up and come late.
record = st.builds(
    Record, st.sampled_from(["p", "q", "ü 漢"]), st.integers(0, 4), st.lists(pieces, max_size=3).map(tuple), lengths
)
batches = st.lists(st.lists(record, max_size=4), max_size=6)


def plain(encoded: Iterable[bytes]) -> list[tuple[object, ...]]:
    return [
        (
            one.prompt_key,
            one.rollout_id,
            [(list(p.context), list(p.tokens), p.reward) for p in one.pieces],
            one.lengths,
            one.earlier,
        )
        for one in map(decode, encoded)
    ]


def nothing() -> list[bytes]:
    return []


def open_journal(path: Path) -> JournaledShard:
    return JournaledShard(path, TOKEN, nothing)


@settings(deadline=None)
@given(batches)
def test_what_was_recorded_is_there_again(
    tmp_path_factory: pytest.TempPathFactory, written: list[list[Record]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "worker-0.journal"
    first = open_journal(path)
    for batch in written:
        for one in batch:
            first.add(encode(one))
    again = open_journal(path)
    # In another order after a replay of replaced rollouts, but the same content.
    for up_to in (None, 0, 2, 4):
        kept, found = plain(first.shard.encoded(up_to)), plain(again.shard.encoded(up_to))
        assert sorted(map(repr, kept)) == sorted(map(repr, found))


@settings(max_examples=examples(60), deadline=None)
@given(batches, st.data())
def test_a_torn_tail_costs_only_what_was_being_written(
    tmp_path_factory: pytest.TempPathFactory, written: list[list[Record]], data: st.DataObject
) -> None:
    """Cut the file anywhere behind its header, or damage it: what is whole before comes back, and writing goes on."""
    path = tmp_path_factory.mktemp("journal") / "worker-0.journal"
    whole = open_journal(path)
    sizes, states = [path.stat().st_size], [plain(whole.shard.encoded())]
    for batch in written:
        for one in batch:
            whole.add(encode(one))
            sizes.append(path.stat().st_size)
            states.append(plain(whole.shard.encoded()))
    cut = data.draw(st.integers(sizes[0], sizes[-1]) | st.sampled_from(sizes))
    damaged = bytearray(path.read_bytes()[:cut])
    if cut > sizes[0] and data.draw(st.booleans()):
        # Or a part of what was written is something else, as after a power cut.
        cut = data.draw(st.integers(sizes[0], cut - 1))
        damaged[cut] ^= 0x55
    path.write_bytes(damaged)
    survived = max(n for n, size in enumerate(sizes) if size <= cut)
    again = open_journal(path)
    assert sorted(map(repr, plain(again.shard.encoded()))) == sorted(map(repr, states[survived]))
    later = Record("later", 9, (Piece([1], [2], 0.5),), (1,))
    again.add(encode(later))
    assert plain([encode(later)])[0] in plain(open_journal(path).shard.encoded())


def noise(step: int) -> Record:
    tokens = np.random.default_rng(step).integers(0, 2**31, 1000)
    return Record("p", step, (Piece([], tokens, 1.0),), (1000,))


def test_a_journal_is_shortened_when_it_is_twice_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SHORTEN_FROM_BYTES", 1000)
    path = tmp_path / "worker-0.journal"
    kept = open_journal(path)
    one = len(encode(noise(0)))
    largest = 0
    for step in range(20):
        kept.add(encode(noise(step)))
        largest = max(largest, path.stat().st_size)
    # Live are the last rollout and, until the next begins, the one it replaced.
    assert 2 * one < largest < 4.5 * one
    again = open_journal(path)
    assert plain(again.shard.encoded(up_to=18)) == plain(kept.shard.encoded(up_to=18)) != []
    assert not list(tmp_path.glob("*.partial"))


def test_another_runs_journal_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.journal"
    open_journal(path).add(encode(Record("p", 1, (), (3,))))
    started = [encode(Record("from the checkpoint", 5, (), (4,)))]
    other = JournaledShard(path, b"another run's 16", lambda: started)
    assert plain(other.shard.encoded()) == plain(started)
    # What it began with is in the file: a second start reads that and asks for nothing.
    again = JournaledShard(path, b"another run's 16", lambda: pytest.fail("asked again"))
    assert plain(again.shard.encoded()) == plain(started)
    # Nor is a file that is no journal at all.
    path.write_bytes(b"")
    assert plain(JournaledShard(path, TOKEN, lambda: started).shard.encoded()) == plain(started)


def test_records_in_a_file_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "history"
    shard = HistoryShard()
    shard.record("p", 7, [Piece([1, 2], [2**31 - 1, 0], -0.25)], [2, 8])
    assert write_entries(path, NO_RUN, shard.encoded()) == path.stat().st_size
    found = list(read_entries(path, NO_RUN))
    assert plain(encoded for encoded, _ in found) == [("p", 7, [([1, 2], [2**31 - 1, 0], -0.25)], (2, 8), ())]
    assert found[-1][1] == path.stat().st_size
    with pytest.raises(JournalError, match="is another run's history journal"):
        list(read_entries(path, TOKEN))


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"something else, longer than a header of a journal")
    with pytest.raises(JournalError, match="is not a history journal"):
        list(read_entries(path, NO_RUN))
    path.write_bytes(journal.HEADER.pack(journal.MAGIC, 9, NO_RUN))
    with pytest.raises(JournalError, match="version 9, this code reads version 2"):
        list(read_entries(path, NO_RUN))
