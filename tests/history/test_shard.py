"""A shard keeps each prompt's last rollout, whole and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from rhyme_openrlhf.history.index import DraftIndex, Piece
from rhyme_openrlhf.history.shard import HistoryShard

OLD = Piece([1, 2, 3], [4, 5], 1.0)
NEW = Piece([1, 2, 3], [6, 7], 1.0)


def drafts(shard: HistoryShard, key: str = "p") -> list[int]:
    return DraftIndex.from_buffer(shard.index(key)).draft([1, 2, 3], 7, 3, 8).tokens


def test_an_unknown_prompt_has_no_history() -> None:
    shard = HistoryShard()
    assert (shard.index("p"), shard.median_length("p"), shard.prompts, shard.memory_bytes()) == (None, None, 0, 0)


def test_a_newer_rollout_replaces_the_last() -> None:
    shard = HistoryShard()
    assert shard.record("p", 3, [OLD, OLD], [2, 2])
    assert drafts(shard) == [4, 5]
    assert shard.record("p", 8, [NEW], [10])
    assert drafts(shard) == [6, 7]
    assert shard.median_length("p") == 10


def test_parts_of_one_rollout_add_up() -> None:
    shard = HistoryShard()
    shard.record("p", 3, [OLD], [2])
    assert drafts(shard) == [4, 5]
    assert shard.record("p", 3, [NEW, NEW], [4, 9])
    assert drafts(shard) == [6, 7]
    assert shard.median_length("p") == 4


def test_an_older_rollout_is_ignored() -> None:
    shard = HistoryShard()
    shard.record("p", 3, [NEW], [2])
    assert not shard.record("p", 2, [OLD, OLD], [7, 7])
    assert drafts(shard) == [6, 7]
    assert shard.median_length("p") == 2


def test_prompts_do_not_mix() -> None:
    shard = HistoryShard()
    shard.record("p", 1, [OLD], [1])
    shard.record("q", 9, [NEW], [5])
    assert (drafts(shard, "p"), drafts(shard, "q"), shard.prompts) == ([4, 5], [6, 7], 2)


def test_the_index_is_cached_and_read_only() -> None:
    shard = HistoryShard()
    shard.record("p", 1, [OLD], [2])
    index = shard.index("p")
    assert index is not None and index is shard.index("p")
    assert not index.flags.writeable


def test_lengths_without_a_piece_count_too() -> None:
    shard = HistoryShard()
    shard.record("p", 1, [], [3, 5, 100, 7])
    assert shard.index("p") is None
    assert shard.median_length("p") == 6


@pytest.mark.parametrize(("piece", "length"), [(Piece([], [-5], 1.0), 1), (OLD, -1)])
def test_a_bad_record_changes_nothing(piece: Piece, length: int) -> None:
    shard = HistoryShard()
    shard.record("p", 1, [OLD], [2])
    with pytest.raises(ValueError):
        shard.record("p", 2, [NEW, piece], [length])
    assert drafts(shard) == [4, 5]
    assert shard.median_length("p") == 2


def test_tokens_are_copied() -> None:
    tokens = np.array([4, 5], dtype=np.int32)
    shard = HistoryShard()
    shard.record("p", 1, [Piece([1, 2, 3], tokens, 1.0)], [2])
    tokens[:] = 9
    assert drafts(shard) == [4, 5]


def test_memory_is_at_most_24_bytes_a_token() -> None:
    shard = HistoryShard()
    tokens = np.arange(1000, dtype=np.int64)
    shard.record("p", 1, [Piece([], tokens, 1.0)], [1000])
    assert shard.memory_bytes() == 4000
    shard.index("p")
    assert 4000 < shard.memory_bytes() <= 24 * 1000


def copied(shard: HistoryShard, up_to: int | None = None) -> HistoryShard:
    copy = HistoryShard()
    for record in shard.records(up_to):
        copy.record(record.prompt_key, record.rollout_id, record.pieces, record.lengths)
    return copy


def test_records_make_an_equal_shard() -> None:
    shard = HistoryShard()
    shard.record("p", 4, [OLD, NEW], [2, 3])
    shard.record("q", 5, [], [6])
    copy = copied(shard)
    assert (copy.prompts, drafts(copy), copy.median_length("p"), copy.median_length("q")) == (2, [6, 7], 2.5, 6)
    assert not copy.record("p", 3, [OLD], [1])


def test_a_step_that_was_not_completed_is_left_out_and_what_it_replaced_is_there() -> None:
    shard = HistoryShard()
    shard.record("p", 1, [OLD], [2])
    shard.record("q", 2, [OLD], [2])
    shard.record("p", 3, [NEW], [9])
    shard.record("new", 3, [NEW], [9])
    for source in (shard, copied(shard)):
        before = copied(source, up_to=2)
        assert (before.prompts, drafts(before), before.median_length("p")) == (2, [4, 5], 2)
        assert drafts(copied(source, up_to=3)) == [6, 7]
    # The next step keeps what it replaces itself, and no more of the one before.
    shard.record("q", 4, [NEW], [9])
    assert [record.prompt_key for record in shard.records(up_to=2)] == ["q"]
    assert {(record.prompt_key, record.rollout_id) for record in shard.records(up_to=3)} == {
        ("p", 3), ("new", 3), ("q", 2),
    }  # fmt: skip
