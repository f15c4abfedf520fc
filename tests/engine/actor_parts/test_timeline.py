"""One engine's time, and the cause of its bubbles."""

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.engine.actor_parts.timeline import ELSEWHERE, CausedTimeline, EngineTimeline, TimelineInterval


def test_a_whole_stage() -> None:
    timeline = EngineTimeline(0.0)
    timeline.enter("sync", 4.0, 0)
    timeline.enter("idle", 5.0, 1)
    timeline.enter("generate", 11.0, 1)
    timeline.enter("idle", 17.0, 1)
    assert timeline.take(10.0, 20.0) == [
        TimelineInterval("idle", 0.0, 4.0, "trainer", 0),
        TimelineInterval("sync", 4.0, 5.0, "sync", 0),
        TimelineInterval("idle", 5.0, 10.0, "trainer", 1),
        TimelineInterval("idle", 10.0, 11.0, "weights", 1),
        TimelineInterval("generate", 11.0, 17.0, "", 1),
        TimelineInterval("idle", 17.0, 20.0, "tail", 1),
    ]


def test_an_engine_that_got_nothing_waits_for_weights() -> None:
    assert EngineTimeline(0.0).take(1.0, 2.0) == [
        TimelineInterval("idle", 0.0, 1.0, "trainer", 0),
        TimelineInterval("idle", 1.0, 2.0, "weights", 0),
    ]


def test_a_state_that_goes_on_is_cut_at_the_stages_end() -> None:
    timeline = EngineTimeline(0.0)
    timeline.enter("generate", 1.0, 0)
    assert timeline.take(0.0, 5.0)[-1] == TimelineInterval("generate", 1.0, 5.0, "", 0)
    assert timeline.take(6.0, 8.0) == [TimelineInterval("generate", 5.0, 8.0, "", 0)]


@given(
    st.lists(st.tuples(st.sampled_from(["generate", "idle", "sync"]), st.floats(0, 10)), max_size=12),
    st.floats(0, 30),
    st.floats(0, 30),
)
def test_intervals_are_contiguous_and_handed_out_once(
    changes: list[tuple[str, float]], first: float, second: float
) -> None:
    timeline = EngineTimeline(0.0)
    now = 0.0
    for version, (state, gap) in enumerate(changes):
        now += gap
        timeline.enter(state, now, version)
    start, middle = sorted((first, second))
    end = max(middle, now) + 1
    taken = timeline.take(start, max(middle, now)) + timeline.take(end, end + 5)
    for before, after in zip(taken, taken[1:], strict=False):
        assert before.end == after.start
    assert all(interval.start < interval.end for interval in taken)
    assert taken[0].start == 0.0 and taken[-1].end == end + 5
    assert all(bool(interval.cause) == (interval.state != "generate") for interval in taken)


def test_time_in_which_its_devices_are_another_layouts_is_in_no_interval() -> None:
    timeline = EngineTimeline(0.0)
    timeline.enter(ELSEWHERE, 1.0, 0)
    timeline.enter("switch", 12.0, 0)
    timeline.enter("generate", 13.0, 0)
    timeline.enter(ELSEWHERE, 15.0, 0)
    assert timeline.state == ELSEWHERE
    assert timeline.take(10.0, 20.0) == [
        TimelineInterval("idle", 0.0, 1.0, "trainer", 0),
        TimelineInterval("switch", 12.0, 13.0, "", 0),
        TimelineInterval("generate", 13.0, 15.0, "", 0),
    ]


def test_causes_are_those_of_their_moment_and_borders_divide() -> None:
    timeline = CausedTimeline(0.0)
    timeline.enter("generate", 1.0, 0)
    timeline.because("tail", 1.0)
    timeline.enter("idle", 5.0, 0)
    timeline.because("weights", 5.0)
    timeline.enter("sync", 7.0, 0)
    timeline.enter("idle", 8.0, 1)
    timeline.enter("generate", 8.0, 1)
    assert timeline.take(0.5, 6.0) == [
        TimelineInterval("idle", 0.0, 1.0, "trainer", 0),
        TimelineInterval("generate", 1.0, 5.0, "", 0),
        TimelineInterval("idle", 5.0, 6.0, "weights", 0),
    ]
    assert timeline.take(6.0, 9.0) == [
        TimelineInterval("idle", 6.0, 7.0, "weights", 0),
        TimelineInterval("sync", 7.0, 8.0, "sync", 0),
        TimelineInterval("generate", 8.0, 9.0, "", 1),
    ]


def test_time_in_which_the_devices_are_another_layouts_is_in_no_state() -> None:
    timeline = CausedTimeline(0.0)
    timeline.because("weights", 0.0)
    timeline.enter(ELSEWHERE, 2.0, 0)
    assert timeline.take(0.0, 3.0) == [TimelineInterval("idle", 0.0, 2.0, "weights", 0)]
    timeline.enter("idle", 5.0, 0)
    timeline.enter("generate", 6.0, 0)
    assert timeline.take(3.0, 7.0) == [
        TimelineInterval("idle", 5.0, 6.0, "weights", 0),
        TimelineInterval("generate", 6.0, 7.0, "", 0),
    ]


STATES = st.sampled_from(["generate", "idle", "sync", "tail", "weights"])


@given(st.lists(st.tuples(STATES, st.integers(0, 5)), max_size=30), st.lists(st.integers(0, 9), max_size=5))
def test_states_add_up_to_wall_time(changes: list[tuple[str, int]], asked: list[int]) -> None:
    timeline, now = CausedTimeline(0.0), 0
    taken: list[TimelineInterval] = []
    border = 0.0
    for number, (state, seconds) in enumerate(changes):
        if state in ("tail", "weights"):
            timeline.because(state, float(now))
        else:
            timeline.enter(state, float(now), number % 3)
        now += seconds
        if number in asked:
            # A border of some moments ago: what happened since is the next stage's.
            start, border = border, max(border, now - 1.5)
            taken += timeline.take(start, border)
    taken += timeline.take(border, float(now))
    ends = [interval.end for interval in taken]
    assert [interval.start for interval in taken] == [0.0, *ends[:-1]] if taken else now == 0
    assert sum(interval.end - interval.start for interval in taken) == now
    assert all((interval.cause != "") == (interval.state != "generate") for interval in taken)
