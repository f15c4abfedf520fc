"""The sentence that names the waiting engine, its reason and its time."""

import pytest

from rhyme_openrlhf.webui.figures.drawing.engine_waits import answer, lane_state, waits
from tests.webui.figure_rows import MIDNIGHT, interval, lane, two_lanes


def test_the_engine_that_waits_most_comes_first_with_its_cause() -> None:
    worst, other = waits(two_lanes())
    assert (worst.engine, other.engine) == (3, 0)
    assert worst.seconds == pytest.approx(6) and worst.share == pytest.approx(0.6)
    assert worst.cause == "tail" and worst.by_cause == pytest.approx({"sync": 1, "weights": 1, "tail": 4})
    assert (worst.longest, worst.longest_cause, worst.longest_since) == (pytest.approx(4), "tail", MIDNIGHT + 6)


def test_the_answer_names_engine_cause_and_moment() -> None:
    first, longest, together = answer(waits(two_lanes()), 8, 10, 2)
    assert first == (
        "In steps 8 to 10, engine 3 waited longest: 6.0 s (60% of its time), "
        "mostly waiting for the others' tail (4.0 s)."
    )
    assert longest == "Its longest wait in one piece: 4.0 s, since 00:00:06 UTC, waiting for the others' tail."
    assert together == (
        "Over these steps, training included, the 2 engines together had nothing to run for 35% of their time: "
        "others' tail 20%, first request 10%, loading weights 5%."
    )


def test_engines_that_are_not_shown_are_said() -> None:
    assert answer(waits(two_lanes()), 8, 8, 64)[-1].startswith(
        "Over these steps, training included, the 2 engines shown (of 64) together"
    )


def test_one_engine_and_engines_that_never_wait() -> None:
    (only,) = waits([lane(5, interval(5, "generate", 0, 4))])
    assert only.seconds == 0 and only.cause == ""
    assert answer([only], 1, 1, 1) == ["In step 1, no engine that is shown had to wait."]
    assert answer([], 1, 1, 0) == [] and waits([lane(1)]) == []


def test_a_wait_in_several_intervals_is_one_and_a_new_cause_ends_it() -> None:
    (one,) = waits(
        [
            lane(
                0,
                interval(0, "idle", 0, 2, "trainer"),
                interval(0, "idle", 2.0005, 5, "trainer"),
                interval(0, "idle", 5, 8, "weights"),
            )
        ]
    )
    assert one.longest == pytest.approx(5) and one.longest_since == MIDNIGHT


def test_what_nobody_explained_is_said_so() -> None:
    assert lane_state(interval(0, "idle", 0, 1)) == "unexplained"
    assert lane_state(interval(0, "idle", 0, 1, "a newer cause")) == "unexplained"
    assert lane_state(interval(0, "sync", 0, 1, "sync")) == "sync"
    assert "without a reported cause" in answer(waits([lane(0, interval(0, "idle", 0, 1))]), 1, 1, 1)[0]
