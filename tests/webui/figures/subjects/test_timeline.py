"""Stages of the trainer, and engines that a reader chooses."""

import pytest

from rhyme_openrlhf.webui.figures.drawing.timeline import StageSpan
from rhyme_openrlhf.webui.figures.subjects.timeline import engine_numbers, parts_backwards, stage_spans
from tests.webui.figure_rows import MIDNIGHT


def test_stages_end_with_the_next_or_with_their_step() -> None:
    finished = {1: MIDNIGHT + 20, 2: None}
    starts = [(MIDNIGHT + 8, 7, 1, "experience"), (MIDNIGHT + 10, 7, 1, "train"), (MIDNIGHT + 30, 7, 2, "experience")]
    assert stage_spans(starts, finished, {7: None}) == [
        StageSpan(1, "experience", MIDNIGHT + 8, MIDNIGHT + 10),
        StageSpan(1, "train", MIDNIGHT + 10, MIDNIGHT + 20),
    ]


def test_no_stage_goes_on_while_a_run_is_stopped() -> None:
    starts = [(MIDNIGHT + 8, 7, 1, "checkpoint"), (MIDNIGHT + 240, 8, 2, "experience"), (MIDNIGHT + 250, 8, 2, "train")]
    assert stage_spans(starts, {1: MIDNIGHT + 7, 2: None}, {7: MIDNIGHT + 10, 8: None}) == [
        StageSpan(1, "checkpoint", MIDNIGHT + 8, MIDNIGHT + 10),
        StageSpan(2, "experience", MIDNIGHT + 240, MIDNIGHT + 250),
    ]
    # In an attempt without a known end it has no end either.
    assert [one.step for one in stage_spans(starts, {}, {7: None, 8: None})] == [2]


def test_parts_without_stages_end_with_their_step() -> None:
    assert parts_backwards(4, 100.0, (3.0, 10.0, 1.0)) == [
        StageSpan(4, "experience", 86.0, 89.0),
        StageSpan(4, "train", 89.0, 99.0),
        StageSpan(4, "sync", 99.0, 100.0),
    ]
    assert parts_backwards(4, None, (3.0, 10.0, 1.0)) == [] and parts_backwards(4, 9.0, (None, None, None)) == []


@pytest.mark.parametrize(
    "ranges, engines",
    [("", []), ("3", [3]), ("0, 3,8 - 10", [0, 3, 8, 9, 10]), ("5,5,4", [4, 5]), ("3-1", []), ("1,", [1])],
)
def test_engines_are_chosen_by_numbers_and_ranges(ranges: str, engines: list[int]) -> None:
    assert engine_numbers(ranges) == engines


def test_a_huge_range_is_cut() -> None:
    assert len(engine_numbers("0-9999999")) <= 257
