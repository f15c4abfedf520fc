"""The bubble timeline."""

from rhyme_openrlhf.webui.figures.drawing import palette, timeline
from tests.webui.figure_rows import move, rows, switch, traces


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
