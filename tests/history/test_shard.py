"""A shard keeps each prompt's last rollout, whole and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from rhyme_openrlhf.history import shard as shard_module
from rhyme_openrlhf.history.index import DraftIndex, Piece
from rhyme_openrlhf.history.record import NO_ROLLOUT, read_head
from rhyme_openrlhf.history.shard import HistoryShard

OLD = Piece([1, 2, 3], [4, 5], 1.0)
NEW = Piece([1, 2, 3], [6, 7], 1.0)


def drafts(shard: HistoryShard, key: str = "p") -> list[int]:
    return DraftIndex.from_buffer(shard.build(key)).draft([1, 2, 3], 7, 3, 8).tokens


def median(shard: HistoryShard, key: str = "p") -> float:
    """Of the newest rollout."""
    return shard.median_lengths(key)[-1][1]


def test_an_unknown_prompt_has_no_history() -> None:
    shard = HistoryShard()
    assert (shard.build("p"), shard.median_lengths("p"), shard.prompts, shard.data_bytes) == (None, (), 0, 0)


def test_a_newer_rollout_replaces_the_last() -> None:
    shard = HistoryShard()
    assert shard.record("p", 3, [OLD, OLD], [2, 2])
    assert drafts(shard) == [4, 5]
    assert shard.record("p", 8, [NEW], [10])
    assert drafts(shard) == [6, 7]
    assert median(shard) == 10


def test_parts_of_one_rollout_add_up() -> None:
    shard = HistoryShard()
    shard.record("p", 3, [OLD], [2])
    assert drafts(shard) == [4, 5]
    assert shard.record("p", 3, [NEW, NEW], [4, 9])
    assert drafts(shard) == [6, 7]
    assert median(shard) == 4


def test_an_older_rollout_is_ignored() -> None:
    shard = HistoryShard()
    shard.record("p", 3, [NEW], [2])
    assert not shard.record("p", 2, [OLD, OLD], [7, 7])
    assert drafts(shard) == [6, 7]
    assert median(shard) == 2


def test_last_lengths_are_all_those_of_the_last_rollout_that_has_some() -> None:
    shard = HistoryShard(rollouts=2)
    shard.record("p", 3, [OLD], [2, 9])
    shard.record("p", 8, [], [5, 5])
    shard.record("p", 8, [NEW], [10])
    assert shard.last_lengths("p") == (5, 5, 10)
    shard.record("p", 9, [NEW], [])
    assert shard.last_lengths("p") == (5, 5, 10)
    assert shard.last_lengths("never seen") == ()


def test_prompts_do_not_mix() -> None:
    shard = HistoryShard()
    shard.record("p", 1, [OLD], [1])
    shard.record("q", 9, [NEW], [5])
    assert (drafts(shard, "p"), drafts(shard, "q"), shard.prompts) == ([4, 5], [6, 7], 2)


def test_lengths_without_a_piece_count_too() -> None:
    shard = HistoryShard()
    shard.record("p", 1, [], [3, 5, 100, 7])
    assert shard.build("p") is None and not shard.has_drafts("p")
    assert median(shard) == 6


@pytest.mark.parametrize(("piece", "length"), [(Piece([], [-5], 1.0), 1), (OLD, -1)])
def test_a_bad_record_changes_nothing(piece: Piece, length: int) -> None:
    shard = HistoryShard()
    shard.record("p", 1, [OLD], [2])
    with pytest.raises(ValueError):
        shard.record("p", 2, [NEW, piece], [length])
    assert drafts(shard) == [4, 5]
    assert median(shard) == 2


def test_tokens_are_copied() -> None:
    tokens = np.array([4, 5], dtype=np.int32)
    shard = HistoryShard()
    shard.record("p", 1, [Piece([1, 2, 3], tokens, 1.0)], [2])
    tokens[:] = 9
    assert drafts(shard) == [4, 5]


def test_what_is_kept_is_counted_and_small() -> None:
    shard = HistoryShard()
    tokens = np.random.default_rng(1).integers(0, 50_000, 10_000)
    shard.record("p", 1, [Piece([], tokens, 1.0)], [10_000])
    assert shard.data_bytes == encoded_bytes(shard) < 3 * 10_000
    shard.record("p", 2, [], [3])
    shard.record("p", 3, [], [3])
    assert shard.data_bytes == encoded_bytes(shard) < 300


def encoded_bytes(shard: HistoryShard) -> int:
    return sum(len(encoded) for encoded in shard.encoded() if read_head(encoded).rollout_id != NO_ROLLOUT)


def copied(shard: HistoryShard, up_to: int | None = None, rollouts: int = 1) -> HistoryShard:
    copy = HistoryShard(rollouts)
    for encoded in shard.encoded(up_to):
        copy.add(encoded)
    return copy


def test_records_make_an_equal_shard() -> None:
    shard = HistoryShard()
    shard.record("p", 4, [OLD, NEW], [2, 3])
    shard.record("q", 5, [], [6])
    copy = copied(shard)
    assert (copy.prompts, drafts(copy), median(copy), median(copy, "q")) == (2, [6, 7], 2.5, 6)
    assert not copy.record("p", 3, [OLD], [1])


def test_a_step_that_was_not_completed_is_left_out_and_what_it_replaced_is_there() -> None:
    shard = HistoryShard()
    shard.record("p", 1, [OLD], [2])
    shard.record("q", 2, [OLD], [2])
    shard.record("p", 3, [NEW], [9])
    shard.record("new", 3, [NEW], [9])
    for source in (shard, copied(shard)):
        before = copied(source, up_to=2)
        assert (before.prompts, drafts(before), median(before)) == (2, [4, 5], 2)
        assert drafts(copied(source, up_to=3)) == [6, 7]
    # The next step keeps what it replaces itself, and no more of the one before.
    shard.record("q", 4, [NEW], [9])
    assert rollouts_in(shard, up_to=2) == {("q", 2)}
    assert rollouts_in(shard, up_to=3) == {("p", 3), ("new", 3), ("q", 2)}


def rollouts_in(shard: HistoryShard, up_to: int) -> set[tuple[str, int]]:
    heads = map(read_head, shard.encoded(up_to))
    return {(head.prompt_key, head.rollout_id) for head in heads if head.rollout_id != NO_ROLLOUT}


def test_lengths_of_all_rollouts_are_known_and_survive_a_copy() -> None:
    shard = HistoryShard()
    for step, length in enumerate((4, 8, 6, 10)):
        shard.record("p", step, [OLD], [length, length])
    known = ((0, 4.0), (1, 8.0), (2, 6.0), (3, 10.0))
    assert shard.median_lengths("p") == copied(shard).median_lengths("p") == known
    # A checkpoint of step 2 knows nothing of step 3.
    assert copied(shard, up_to=2).median_lengths("p") == known[:3]
    assert copied(copied(shard, up_to=2)).median_lengths("p") == known[:3]


def test_the_length_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "EARLIER_KEPT", 3)
    shard = HistoryShard()
    for step in range(20):
        shard.record("p", step, [], [step])
    assert [rollout for rollout, _ in shard.median_lengths("p")] == [15, 16, 17, 18, 19]


def test_an_epoch_s_lengths_come_with_what_was_known_before_it() -> None:
    shard = HistoryShard()
    shard.record("p", 1, [OLD], [2, 4])
    shard.record("q", 2, [OLD], [7])
    shard.record("dropped from the second epoch", 2, [OLD], [9])
    shard.record("q", 3, [OLD], [5, 6, 7])
    shard.record("p", 4, [OLD], [1, 9])
    shard.record("new", 4, [OLD], [1])
    for source in (shard, copied(shard)):
        epoch = source.epoch_lengths(3, 4)
        found = dict(zip(epoch.before.tolist(), np.split(epoch.lengths, np.cumsum(epoch.counts)[:-1]), strict=True))
        assert {before: lengths.tolist() for before, lengths in found.items()} == {3.0: [1, 9], 7.0: [5, 6, 7]}
    assert shard.epoch_lengths(1, 2).before.size == 0


@pytest.mark.parametrize("rollouts", [1, 2, 3])
def test_the_last_rollouts_are_kept_and_one_more_while_the_newest_may_be_left_out(rollouts: int) -> None:
    shard = HistoryShard(rollouts)
    for step in range(1, 6):
        shard.record("p", step, [Piece([1, 2, 3], [10 * step, step], 1.0)], [2])
    kept = {("p", step) for step in range(6 - rollouts, 6)}
    assert rollouts_in(shard, up_to=5) == kept
    assert rollouts_in(shard, up_to=4) == {("p", step) for step in range(5 - rollouts, 5)}
    for source in (shard, copied(shard, rollouts=rollouts)):
        index = DraftIndex.from_buffer(source.build("p"))
        found = [index.draft([10 * step], 7, 1, 1).tokens for step in range(1, 6)]
        assert found == [[step] if ("p", step) in kept else [] for step in range(1, 6)]
    shard.record("q", 6, [OLD], [2])
    assert rollouts_in(shard, up_to=4) == kept - {("p", 5)}


@pytest.mark.parametrize("samples", [1, 2, 64])
def test_any_number_of_samples_and_duplicate_prompts_of_a_step_add_up(samples: int) -> None:
    shard = HistoryShard()
    for copy in range(2):
        pieces = [Piece([1, 2, 3], [100 + copy, sample, 7], 0.0) for sample in range(samples)]
        shard.record("p", 1, pieces, range(1, samples + 1))
    assert shard.epoch_lengths(1, 1).before.size == 0
    shard.record("p", 2, [], [1])
    assert shard.median_lengths("p")[0] == (1, (samples + 1) / 2)
    shard = copied(shard, up_to=1)
    index = DraftIndex.from_buffer(shard.build("p"))
    for copy in range(2):
        assert index.draft([100 + copy, samples - 1], 7, 2, 4).tokens == [7]


def test_a_response_of_32k_tokens_is_kept_whole() -> None:
    tokens = np.random.default_rng(0).permutation(32768).astype(np.int32)
    shard = HistoryShard()
    shard.record("p", 1, [Piece([], tokens, 1.0)], [tokens.size])
    index = DraftIndex.from_buffer(copied(shard).build("p"))
    assert index.draft(tokens[:16], 16, 3, 32).tokens == tokens[16:48].tolist()
    assert index.draft(tokens[-20:-4], 16, 3, 32).tokens == tokens[-4:].tolist()
