"""Rehearsals in vLLM's real scheduler: none is left beside a real request, and their texts are its drafts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.engine.requests import PROMPT_KEY, REHEARSED_PROMPT, UNCOUNTED
from rhyme_openrlhf.engine.scheduler_parts.rehearsal import Rehearsals
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from tests.engine.scheduler_parts.test_drafting import PROMPT, RESPONSE, scheduler_of

DECODE_STEPS = 12


@pytest.fixture
def scheduler() -> Any:
    found = scheduler_of("rules", 8, 512, DraftingSettings(probe_share=0))
    found.drafting.use(HistoryDrafter(HistoSpecSettings(window_start=8, own_output=False, shared_tokens=0)))
    rehearsals = Rehearsals(found, found.drafting)
    found.parts.append(rehearsals)
    found.calls |= {"end_rehearsals": rehearsals.end_rehearsals, "forget_rehearsed": rehearsals.forget_rehearsed}
    return found


def add(scheduler: Any, name: str, **arguments: Any) -> None:
    parameters = SamplingParams(temperature=1, max_tokens=100, extra_args=arguments)
    parameters.update_from_generation_config({}, eos_token_id=None)
    scheduler.add_request(Request(name, PROMPT, parameters, None))


def rehearse(scheduler: Any, name: str, prompt: str = "p") -> None:
    add(scheduler, name, **{UNCOUNTED: True, REHEARSED_PROMPT: prompt})


def step(scheduler: Any) -> Any:
    """Make a decode step in which every sample writes the response's next token, regardless of drafts."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    written = [[RESPONSE[scheduler.requests[name].num_output_tokens]] for name in names]
    places = {name: place for place, name in enumerate(names)}
    scheduler.update_from_output(output, ModelRunnerOutput(names, places, written))
    scheduler.update_draft_token_ids(DraftTokenIds(names, [[] for _ in names]))
    return output


def test_a_real_request_leaves_no_rehearsal_to_the_next_step(scheduler: Any) -> None:
    for number in range(3):
        rehearse(scheduler, f"rehearsal {number}")
    for _ in range(DECODE_STEPS):
        assert len(step(scheduler).num_scheduled_tokens) == 3
    add(scheduler, "real", **{PROMPT_KEY: "p"})
    assert list(step(scheduler).num_scheduled_tokens) == ["real"]
    # A rehearsal that comes late does not begin.
    rehearse(scheduler, "late")
    assert list(step(scheduler).num_scheduled_tokens) == ["real"]


def test_its_text_is_drafted_from_until_the_prompts_last_sample_has_ended(scheduler: Any) -> None:
    rehearse(scheduler, "rehearsal")
    for _ in range(DECODE_STEPS):
        step(scheduler)
        assert not scheduler.requests["rehearsal"].spec_token_ids
    add(scheduler, "other", **{PROMPT_KEY: "q"})
    for name in ("one", "two"):
        add(scheduler, name, **{PROMPT_KEY: "p"})
    for _ in range(3):
        step(scheduler)
    drafts = {name: request.spec_token_ids for name, request in scheduler.requests.items()}
    assert drafts["one"] == RESPONSE[3 : 3 + len(drafts["one"])] and len(drafts["one"]) > 1
    assert not drafts["other"]
    held = scheduler.drafting.source.memory_bytes()
    scheduler.finish_requests(["one", "two"], scheduler.requests["one"].status.FINISHED_ABORTED)
    assert scheduler.drafting.source._kept == {}
    assert scheduler.drafting.source.memory_bytes() < held


def test_texts_of_prompts_that_never_came_are_dropped(scheduler: Any) -> None:
    for prompt in ("p", "q"):
        rehearse(scheduler, prompt, prompt)
    step(scheduler)
    scheduler.calls["end_rehearsals"]()
    assert not scheduler.requests
    add(scheduler, "real", **{PROMPT_KEY: "q"})
    scheduler.calls["forget_rehearsed"](["p", "q"])
    # That of a prompt with a real sample stays.
    assert set(scheduler.drafting.source._kept) == {"q"}


def test_rehearsals_count_nowhere(scheduler: Any) -> None:
    before = scheduler.meter.counters()
    rehearse(scheduler, "rehearsal")
    for _ in range(DECODE_STEPS):
        step(scheduler)
    scheduler.calls["end_rehearsals"]()
    assert scheduler.meter.counters() == before
    assert scheduler.drafting.take_decisions().get("running", []) == []


REAL = st.tuples(st.just("real"), st.sampled_from("pq"))
REHEARSE = st.tuples(st.just("rehearse"), st.sampled_from("pqr"))
OTHERS = st.sampled_from([("step", ""), ("abort real", ""), ("end", ""), ("forget", "r"), ("abort rehearsals", "")])
# In which rehearsals and steps are the most frequent.
ACTS = st.lists(st.one_of(REHEARSE, st.just(("step", "")), OTHERS, REAL), max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTS)
def test_whatever_happens_real_samples_never_share_a_step_and_nothing_is_counted_or_left(
    scheduler: Any, acts: list[tuple[str, str]]
) -> None:
    """The order of requests, aborts and steps is free; real samples' figures are those of their own steps alone."""
    source = scheduler.drafting.source
    began = scheduler.meter.counters()
    expected = {"response_tokens": 0, "sample_steps": 0, "prompt_tokens": 0}
    for number, (act, prompt) in enumerate(acts):
        real = [name for name in scheduler.requests if name.startswith("real")]
        rehearsed = [name for name in scheduler.requests if name.startswith("rehearsal")]
        if act == "real":
            add(scheduler, f"real {number}", **{PROMPT_KEY: prompt})
        elif act == "rehearse":
            rehearse(scheduler, f"rehearsal {number}", prompt)
        elif act == "abort real":
            scheduler.finish_requests(real, RequestStatus.FINISHED_ABORTED)
        elif act == "abort rehearsals":
            scheduler.finish_requests(rehearsed, RequestStatus.FINISHED_ABORTED)
        elif act == "end":
            scheduler.calls["end_rehearsals"]()
        elif act == "forget":
            scheduler.calls["forget_rehearsed"]([prompt])
        elif scheduler.requests:
            new = [name for name in real if not scheduler.requests[name].num_output_tokens]
            scheduled = step(scheduler).num_scheduled_tokens
            # Some wait for a seat.
            computed = scheduled.keys() & real
            assert computed == scheduled.keys() or not real
            first = len(computed.intersection(new))
            expected["response_tokens"] += len(computed)
            expected["sample_steps"] += len(computed) - first
            expected["prompt_tokens"] += first * len(PROMPT)
        names = list(scheduler.requests)
        assert not (any("real" in name for name in names) and any("rehearsal" in name for name in names))
    counted = scheduler.meter.counters()
    assert {name: counted[name] - began[name] for name in expected} == expected
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    scheduler.calls["forget_rehearsed"](["p", "q", "r"])
    assert source._kept == {} and source._samples == {}
