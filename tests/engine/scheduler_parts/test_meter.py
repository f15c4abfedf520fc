"""Counting an engine's steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.drafter import FROM_HISTORY, FROM_OWN, SOURCE_NAMES
from rhyme_openrlhf.drafting.source import Attribution, Verified
from rhyme_openrlhf.engine.scheduler_parts import DecodeStep
from rhyme_openrlhf.engine.scheduler_parts.meter import PADDING, TIMED_EACH, DraftTraces, StatusFigures, StepMeter
from rhyme_openrlhf.telemetry.metrics import EngineCounters, acceptance_rate, speculation_rate, tokens_per_step


@dataclass
class Output:
    """The fields of vLLM's EngineCoreOutput that the meter reads."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None


def counters(meter: StepMeter) -> EngineCounters:
    return EngineCounters.from_dict(meter.counters())


def running(*names: str, response_tokens: int = 1) -> StepMeter:
    meter = StepMeter()
    for name in names:
        meter.start(name, response_tokens, True)
    return meter


def step(meter: StepMeter, scheduled: dict[str, int], outputs: list[Output], seconds: float = 0.1) -> None:
    meter.begin_step(scheduled, scheduled)
    meter.end_step([outputs], seconds)


def plain(drafts: Verified) -> tuple[list[str], list[int], list[int]]:
    return drafts.requests, drafts.drafted.tolist(), drafts.accepted.tolist()


def test_a_prefill_step_emits_no_decode_token() -> None:
    meter = running("a", response_tokens=0)
    step(meter, {"a": 8}, [], 0.25)
    step(meter, {"a": 4}, [Output("a", [7])], 0.25)
    done = counters(meter)
    assert (done.prompt_tokens, done.response_tokens, done.decode_tokens, done.decode_steps) == (12, 1, 0, 0)
    assert done.busy_seconds == 0.5
    step(meter, {"a": 1}, [Output("a", [7])])
    done = counters(meter)
    assert (done.prompt_tokens, done.response_tokens, done.decode_tokens, done.decode_steps) == (12, 2, 1, 1)


def test_a_sample_that_ends_with_its_first_token_has_no_decode_token() -> None:
    meter = running("a", response_tokens=0)
    meter.begin_step({"a": 8}, {"a"})
    meter.finish("a")
    meter.end_step([[Output("a", [7], "stop")]], 0.1)
    done = counters(meter)
    assert (done.prompt_tokens, done.response_tokens, done.decode_tokens, done.finished_samples) == (8, 1, 0, 1)


def test_plain_decoding_yields_one_token_a_step() -> None:
    meter = running("a", "b")
    for last in (False, False, True):
        step(meter, {"a": 1, "b": 1}, [Output("a", [5]), Output("b", [5], "stop" if last else None)])
    done = counters(meter)
    assert (done.decode_steps, done.sample_steps, done.decode_tokens, done.finished_samples) == (3, 6, 6, 1)
    assert tokens_per_step(done) == 1.0
    assert speculation_rate(done) == 0.0


def test_a_step_without_output_still_counts_for_its_sample_and_an_aborted_one_does_not() -> None:
    meter = running("a", "gone")
    meter.begin_step({"a": 1, "gone": 1}, {"a"})
    meter.end_step([], 0.1)
    assert counters(meter).sample_steps == 1


def test_samples_that_are_not_to_be_counted_are_not() -> None:
    meter = running("a")
    meter.start("check", 0, False)
    meter.begin_step({"a": 1, "check": 9}, {"a", "check"})
    found = meter.verified_drafts({"check": [1]}, ["check"], np.array([2]), dict.fromkeys(("a", "check")))
    assert plain(found) == ([], [], [])
    meter.finish("check")
    meter.end_step([[Output("a", [5]), Output("check", [5, 6], "stop")]], 0.1)
    done = counters(meter)
    assert (done.response_tokens, done.sample_steps, done.finished_samples, done.prompt_tokens) == (1, 1, 0, 0)
    meter.start("check", 0, False)
    step(meter, {"check": 9}, [Output("check", [5])])
    assert counters(meter) == done


def test_accepted_drafts_count_only_as_far_as_they_became_response_tokens() -> None:
    meter = running("a", "b")
    meter.begin_step({"a": 5, "b": 5}, {"a", "b"})
    drafts = Verified.of(["a", "b"], [4, 4], [4, 1])
    accepted = [0] * len(SOURCE_NAMES)
    accepted[FROM_OWN], accepted[FROM_HISTORY] = 4, 1
    meter.count_drafts(
        drafts, Attribution(np.array([FROM_OWN, FROM_HISTORY]), np.array([0, 1]), accepted), SOURCE_NAMES
    )
    # The response of a ended inside its accepted draft: 3 of 5 sampled tokens are left of it.
    meter.end_step([[Output("a", [1, 2, 3], "stop")], [Output("b", [1, 2])]], 1)
    done = counters(meter)
    assert (done.accepted_own, done.accepted_siblings) == (3, 0)
    assert (done.drafts, done.drafted, done.accepted, done.decode_tokens) == (2, 8, 4, 5)
    assert acceptance_rate(done) == 0.5
    step(meter, {"b": 1}, [Output("b", [1])])
    assert counters(meter).drafts == 2


def test_verified_drafts_leave_padding_out() -> None:
    drafts = {"padded": [PADDING] * 8, "real": [5, 6, 7], "cut": [5, 6, PADDING], "lost": [1, 2], "gone": [1]}
    known = {name: None for name in drafts if name != "gone"}
    found = running(*drafts).verified_drafts(drafts, ["padded", "real", "cut", "gone"], np.array([1, 3, 1, 2]), known)
    assert plain(found) == (["real", "cut", "lost"], [3, 2, 2], [2, 0, 0])


@given(st.dictionaries(st.sampled_from("abcdefg"), st.tuples(st.integers(1, 5), st.integers(0, 6))), st.data())
def test_all_samples_at_once_are_counted_as_one_by_one(steps: dict[str, tuple[int, int]], data: st.DataObject) -> None:
    drafts = {name: [7] * length for name, (length, _) in steps.items()}
    sampling = data.draw(st.permutations(list(steps)))[: data.draw(st.integers(0, len(steps)))]
    counts = np.array([steps[name][1] for name in sampling], np.int64)
    one_by_one = running()
    # A sample that is not counted has each draft looked at.
    one_by_one.start("check", 0, False)
    found, expected = (meter.verified_drafts(drafts, sampling, counts, steps) for meter in (running(), one_by_one))
    assert plain(found) == plain(expected)
    lengths = np.array([length for length, _ in steps.values()], np.int64)
    assert plain(running().verified_drafts(drafts, sampling, counts, steps, lengths)) == plain(expected)


def test_draft_seconds_are_busy_seconds() -> None:
    meter = StepMeter()
    meter.add_draft_seconds(0.25)
    assert counters(meter).busy_seconds == counters(meter).draft_seconds == 0.25


def test_spans_are_where_accepted_tokens_lie() -> None:
    traces = DraftTraces()
    traces.start("a", "name-a")
    traces.start("b", None)
    assert "a" in traces and "b" not in traces and len(traces) == 1
    traces.add("a", 4, 2, 1, "history")
    traces.add("a", 2, 0, 4, "history")
    traces.add("a", 3, 3, 5, "own")
    traces.finish("a")
    traces.finish("b")
    assert "a" not in traces
    expected = {"drafted": 9, "spans": [(1, 3, "history"), (5, 8, "own")]}
    assert traces.take(["name-a", "unknown"]) == [expected, {"drafted": 0, "spans": []}]
    assert traces.take(["name-a"]) == [{"drafted": 0, "spans": []}]


def test_traces_that_nobody_takes_are_dropped_oldest_first() -> None:
    traces = DraftTraces(kept=2)
    for name in ("1", "2", "3"):
        traces.start(name, name)
        traces.add(name, 5, 1, 0, "own")
        traces.finish(name)
    assert [trace["drafted"] for trace in traces.take(["1", "2", "3"])] == [0, 5, 5]


def test_figures_of_a_status_are_of_the_time_since_the_last_one() -> None:
    figures = StatusFigures()
    timed = []
    for number in range(3 * TIMED_EACH):
        # The step before is known where the one after it was begun to time it.
        timed.append(figures.is_timed())
        figures.scheduled(None, DecodeStep(number, 10 * number, 2, 0.5) if timed[-1] else None)
    assert [at for at, is_timed in enumerate(timed) if is_timed] == [
        at for at in range(3 * TIMED_EACH) if (at + 1) % TIMED_EACH in (0, 1)
    ]
    counted = {"decode_steps": 24, "response_tokens": 90, "decode_tokens": 60, "sample_steps": 40}
    first = figures.take(counted)
    # Those at 0, 8 and 16.
    assert first["decode"] == [8, 80, 2, 0.5]
    assert (first["decode_steps"], first["tokens_per_step"]) == (24, 1.5)
    assert figures.take(counted) == {
        "decode_steps": 24, "tokens_per_second": 0, "tokens_per_step": 1.0, "decode": None,
    }  # fmt: skip
    assert figures.take({**counted, "decode_tokens": 90, "sample_steps": 50})["tokens_per_step"] == 3
