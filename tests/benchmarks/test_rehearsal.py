"""Rehearsed samples draft for those that are decoded, as far as the bubble let them come, and count nowhere."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("rhyme_openrlhf._drafting")

from rehearsal import HELD_OUT, TWO, WITHOUT, compared, held_out, replayed
from replay import ENGINES

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import Record

STEPS, LENGTH = 4, 120


def steps(alike: bool) -> list[list[Record]]:
    """Two prompts in each step, never seen before; each one's samples are all the same, or all different."""
    rng = random.Random(3)

    def response() -> list[int]:
        return [rng.randrange(100_000) for _ in range(LENGTH)]

    def record(step: int, place: int) -> Record:
        samples = [response()] * (HELD_OUT + 1) if alike else [response() for _ in range(HELD_OUT + 1)]
        return Record(f"{step}-{place}", step, tuple(Piece([1, 2, 3], one, 1.0) for one in samples))

    return [[record(step, place) for place in range(ENGINES)] for step in range(STEPS)]


def test_samples_that_repeat_a_rehearsal_take_fewer_decode_steps() -> None:
    found = compared(steps(alike=True))
    assert found[WITHOUT]["epoch 1"]["tokens_per_step"] < 1.1
    assert found[TWO]["epoch 1"]["tokens_per_step"] > 4


def test_samples_that_repeat_nothing_take_as_many() -> None:
    found = compared(steps(alike=False))
    assert found[TWO]["epoch 1"]["decode_steps"] == found[WITHOUT]["epoch 1"]["decode_steps"] == LENGTH - 1


def test_a_shorter_bubble_gives_fewer_drafts_and_the_first_step_none() -> None:
    lengths = [[LENGTH] * ENGINES] * STEPS
    whole, half, nothing = (replayed(steps(alike=True), 1, share, lengths) for share in (None, 0.5, 0.0))
    assert whole[0] == half[0] == nothing[0]
    assert whole[1]["steps"] < half[1]["steps"] < nothing[1]["steps"]
    # All tokens of the samples that are decoded, but the first ones, which prefill gives; and no others.
    assert {total["tokens"] for total in (*whole, *half, *nothing)} == {ENGINES * (LENGTH - 1)}


def test_held_out_samples_have_names_of_their_own() -> None:
    (record, *_), *_ = steps(alike=True)
    assert [sample.name for sample in held_out(record, 2)] == ["rehearsed 0-0-0-0", "rehearsed 0-0-0-1"]
