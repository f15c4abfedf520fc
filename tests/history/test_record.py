"""Encoded records come back equal, and damaged blocks are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import Record, decode, encode, packed, read_head, unpacked

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=12)
pieces = st.lists(st.builds(Piece, tokens, tokens, st.floats(allow_nan=False)), max_size=4).map(tuple)
earlier = st.lists(st.tuples(st.integers(0, 2**50), st.floats(0, 1e6)), max_size=3).map(tuple)
records = st.builds(
    Record, st.text("0aü漢", max_size=5), st.integers(-1, 2**62), pieces,
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple), earlier,
)  # fmt: skip


@settings(deadline=None)
@given(records)
def test_a_record_comes_back_equal(record: Record) -> None:
    encoded = encode(record)
    found = decode(encoded)
    assert (found.prompt_key, found.rollout_id, found.lengths, found.earlier) == (
        record.prompt_key, record.rollout_id, record.lengths, record.earlier,
    )  # fmt: skip
    assert [(p.context.tolist(), p.tokens.tolist(), p.reward) for p in found.pieces] == [
        (p.context, p.tokens, p.reward) for p in record.pieces
    ]
    head = read_head(encoded)
    assert (head.pieces, head.tokens) == (
        len(record.pieces),
        sum(len(p.context) + len(p.tokens) for p in record.pieces),
    )


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_come_back_from_planes(content: bytes) -> None:
    array = np.frombuffer(content, dtype=np.uint8)
    assert unpacked(packed(array), array.size).tobytes() == content


def test_token_ids_become_small() -> None:
    ids = np.random.default_rng(0).integers(0, 150_000, 10_000, dtype=np.int32)
    assert len(packed(ids.view(np.uint8))) < 2.5 * ids.size


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b[:5] + b"xxxxx" + b[10:], lambda b: b""])
def test_a_damaged_block_is_refused(damage: object) -> None:
    array = np.arange(400, dtype=np.uint8)
    with pytest.raises(ValueError, match="compressed block"):
        unpacked(damage(packed(array)), array.size)  # type: ignore[operator]


def test_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 4 bytes, not 8"):
        unpacked(packed(np.zeros(4, dtype=np.uint8)), 8)
