"""The bubble timeline's figures."""

import pytest

from rhyme_openrlhf.webui.figures.drawing import bubbles, occupancy, palette, timeline
from rhyme_openrlhf.webui.figures.drawing.bubbles import StepBucket
from rhyme_openrlhf.webui.figures.drawing.timeline import StageSpan
from rhyme_openrlhf.webui.figures.queries.timeline import engine_numbers, parts_backwards, stage_spans
from tests.webui.figure_rows import MIDNIGHT, Options, interval, lane, move, rows, switch, traces, two_lanes


def test_a_lane_an_engine_coloured_by_what_it_does() -> None:
    figure = timeline.lanes(rows(), None)
    drawn = traces(figure)
    assert list(figure.layout.yaxis.ticktext) == ["Trainer", "Engine 0", "Engine 3"]
    generating = drawn["Generating"]
    assert list(generating.y) == [1, 2] and list(generating.base) == [1, 2] and list(generating.x) == [9, 4]
    assert generating.marker.color == palette.STATES["generate"]
    tail = drawn["Others' tail"]
    assert list(tail.y) == [2] and tail.marker.color == palette.CAUSES["tail"]
    assert tail.text[0] == "Engine 3, step 2, weights v1<br>Waits: others' tail, 4.0 s from 00:00:06 UTC"
    assert list(drawn["Trainer: train"].base) == [10] and list(drawn["Trainer: train"].x) == [5]
    assert "engine 3 waited longest" in figure.layout.meta["description"] and figure.layout.meta["empty"] is None


def test_weight_versions_are_written_where_they_change() -> None:
    written = traces(timeline.lanes(rows(), None))["Weight version"]
    assert list(written.text) == ["v1", "v0", "v1"] and list(written.x) == [0, 0, 1]


def test_moves_are_arrows_with_cause_and_cost() -> None:
    figure = timeline.lanes(rows(moves=[move(3, 0, 5), move(0, 9, 6)]), None)
    arrow = traces(figure)["Move: outlier, within a machine"]
    # Engine 9 has no lane: its move is not drawn.
    assert list(arrow.x) == [4.5, 5, None] and list(arrow.y) == [2, 1, None]
    assert arrow.text[0] == (
        "Sample s1: engine 3 to 0<br>outlier, within a machine, kv transfer, moved"
        "<br>1,200 tokens in 0.5 s, 00:00:05 UTC<br>0.1 s without an engine, 0.2 s expected"
    )


def test_switches_and_steps_have_their_marks() -> None:
    figure = timeline.lanes(rows(switches=[switch(7)]), None)
    assert list(figure.layout.yaxis.ticktext)[:2] == ["Trainer", "Layout"]
    mark = traces(figure)["Layout switch"]
    assert list(mark.text) == ["TP 1 → 2"] and list(mark.textposition) == ["middle right"]
    assert [note.text for note in figure.layout.annotations] == ["Step 2"] and len(figure.layout.shapes) == 1


def test_the_heat_map_has_the_share_of_time_waited() -> None:
    first, second = two_lanes()
    for one, share in ((first, 0.1), (second, 0.6)):
        shares = occupancy.waiting_shares(one, MIDNIGHT, 10 / occupancy.BINS)
        assert sum(part or 0 for part in shares) / occupancy.BINS == pytest.approx(share, abs=0.005)
    drawn = traces(occupancy.heat(rows(), None))
    waiting = drawn["More than 95%"]
    assert list(waiting.y) == [0, 1, 1] and list(waiting.base) == pytest.approx([0, 0, 6], abs=0.05)
    assert sum(drawn["Waits up to 5%"].x) == pytest.approx(13, abs=0.1)


def test_time_that_an_engine_did_not_report_is_empty_not_idle() -> None:
    lanes = [lane(0, interval(0, "generate", 0, 10)), lane(1, interval(1, "generate", 0, 5))]
    drawn = traces(occupancy.heat(rows(lanes=lanes), None))
    assert list(drawn["Waits up to 5%"].x) == pytest.approx([10, 5], abs=0.05)
    assert not drawn["More than 95%"].x


def test_engines_are_counted_by_state() -> None:
    drawn = traces(occupancy.states(rows(), None))
    assert max(drawn["Generating"].y) == pytest.approx(2) and min(drawn["Generating"].y) == pytest.approx(0)
    together = [sum(values) for values in zip(*(trace.y for trace in drawn.values()), strict=True)]
    assert together == pytest.approx([2.0] * occupancy.BINS, abs=0.01)


def bucket(first: int, last: int, **causes: float) -> StepBucket:
    return StepBucket(first, last, float(last), 100.0, {**dict.fromkeys(palette.CAUSES, 0.0), **causes})


def test_the_bubble_fraction_is_stacked_by_cause() -> None:
    figure = bubbles.fraction([bucket(1, 5, tail=10, weights=5), bucket(6, 10, tail=30)], Options())
    drawn = traces(figure)
    assert set(drawn) == {"Others' tail", "First request"}
    assert list(drawn["Others' tail"].y) == [0.1, 0.3] and list(drawn["Others' tail"].x) == [3, 8]
    assert list(drawn["Others' tail"].customdata) == [5, 10]
    assert "others' tail 20.0%, first request 2.5%" in figure.layout.meta["description"]
    assert list(traces(bubbles.fraction([bucket(1, 5, tail=1)], Options("time")))["Others' tail"].x) == [5.0]


def test_many_buckets_of_bubbles_are_areas_that_lead_to_their_steps_too() -> None:
    many = [bucket(step, step, tail=step) for step in range(1, 101)]
    (area,) = bubbles.fraction(many, Options()).data
    assert (area.type, area.stackgroup, len(area.x)) == ("scatter", "causes", 100)
    assert list(area.customdata) == list(area.x) and area.text[7] == "Step 8: others' tail 8.0%"


def test_stages_end_with_the_next_or_with_their_step() -> None:
    finished = {1: MIDNIGHT + 20, 2: None}
    starts = [(MIDNIGHT + 8, 1, "experience"), (MIDNIGHT + 10, 1, "train"), (MIDNIGHT + 30, 2, "experience")]
    assert stage_spans(starts, finished) == [
        StageSpan(1, "experience", MIDNIGHT + 8, MIDNIGHT + 10),
        StageSpan(1, "train", MIDNIGHT + 10, MIDNIGHT + 20),
    ]


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
