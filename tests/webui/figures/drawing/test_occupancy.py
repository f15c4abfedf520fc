"""Overviews of many engines: which waited when, and how many were in which state."""

import pytest

from rhyme_openrlhf.webui.figures.drawing import occupancy
from tests.webui.figure_rows import MIDNIGHT, draw, interval, lane, rows, traces, two_lanes


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
    drawn = traces(draw("timeline_states", rows()))
    assert max(drawn["Generating"].y) == pytest.approx(2) and min(drawn["Generating"].y) == pytest.approx(0)
    together = [sum(values) for values in zip(*(trace.y for trace in drawn.values()), strict=True)]
    assert together == pytest.approx([2.0] * occupancy.BINS, abs=0.01)
