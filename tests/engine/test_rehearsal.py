"""Rehearsals on a real engine: drafts for the real samples, ended at once by these and by weights, counted nowhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.engine import requests
from rhyme_openrlhf.engine.calls import RehearsalCalls, SchedulerMeter
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.rehearsal import RehearsalSettings
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from tests.engine.test_actor import LONG, Actor, an_actor, model_with, sampling, stored, until_running

PROMPT = list(range(10, 60))
# Tokens of a response, and of one that is not over within a test.
SHORT = 40


class Words:
    """A tokenizer whose text is its tokens."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def text(first: int) -> str:
    return " ".join(str(token) for token in [first, *PROMPT])


@pytest.fixture(scope="module")
def actor(starts_engine: None) -> Iterator[Actor]:
    siblings = HistoSpecSettings(own_output=False, shared_tokens=0, extend_confidence=1.0)
    with an_actor(
        rehearsal=RehearsalSettings(enable=True), histospec=siblings, drafting=DraftingSettings(probe_share=0)
    ) as found:
        yield found


def expect(actor: Actor, *prompts: str, max_tokens: int = SHORT) -> None:
    parameters = sampling(max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)
    for part in actor.raw.parts.values():
        part.asked(requests.Sampling(parameters, 760, Words()))
    actor.call(actor.raw.expect_prompts(list(prompts)))


def unfinished(actor: Actor) -> int:
    return len(actor.call(actor.raw.scheduler(SchedulerMeter.output_lengths)))


def until(condition: Any) -> None:
    deadline = time.time() + 60
    while not condition():
        assert time.time() < deadline
        time.sleep(0.005)


def until_rehearsed(actor: Actor, samples: int) -> None:
    """Wait until `samples` rehearsals of the prompts that are to come have begun, and all are over."""
    part: Any = actor.raw.parts[RehearsalCalls]
    until(lambda: sum(part._begun.values()) == samples and part.uncounted() == 0)
    until(lambda: not unfinished(actor))


async def answered(actor: Actor, prompt: str, max_tokens: int) -> Any:
    """Generate one real sample of a prompt, as a call of OpenRLHF's does."""

    async def one(plain: str) -> list[dict[str, Any]]:
        tokens = [int(word) for word in plain.split()]
        parameters = sampling(max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)
        output = await actor.raw.generate(tokens, parameters)
        return [{"tokens": list(output.outputs[0].token_ids)}]

    return (await actor.raw.seeds.answers(prompt, 1, one))[0]["tokens"]


def measured(actor: Actor, prompt: str) -> tuple[list[int], EngineCounters]:
    """Return a real sample's tokens, and what was counted of it."""
    before = actor.call(actor.raw.totals())
    tokens = actor.call(answered(actor, prompt, SHORT))
    return tokens, actor.call(actor.raw.totals()) - before


def test_an_idle_engine_rehearses_what_comes_next_and_counts_nothing(actor: Actor) -> None:
    before = actor.call(actor.raw.totals())
    began = time.time()
    expect(actor, text(1), text(2))
    assert actor.raw.get_num_unfinished_requests() == 0
    until_rehearsed(actor, 4)
    states = [one.state for one in actor.raw.timeline.take(began, time.time())]
    assert "rehearse" in states and "generate" not in states
    assert actor.call(actor.raw.totals()) == before


def test_a_real_sample_is_drafted_from_its_rehearsal_until_it_has_ended(actor: Actor) -> None:
    expect(actor, text(3))
    until_rehearsed(actor, 2)
    first, done = measured(actor, text(3))
    assert done.response_tokens == SHORT and done.finished_samples == 1
    # At temperature 0 the rehearsal was the same text.
    assert done.accepted_siblings > SHORT // 2
    # Dropped with the prompt's last sample: then only its own votes draft.
    again, without = measured(actor, text(3))
    assert again == first and 1.5 * done.sample_steps < without.sample_steps


def test_a_real_sample_ends_all_rehearsals_at_once(actor: Actor) -> None:
    expect(actor, *(text(number) for number in range(4, 12)), max_tokens=LONG)
    until(lambda: unfinished(actor) == 8 * 2)
    # Two tokens: a prefill, and one decode step.
    running = actor.start(answered(actor, text(20), LONG))
    until_running(actor)
    until(lambda: unfinished(actor) > 0)
    assert unfinished(actor) == 1 and actor.raw.timeline.state == "generate"
    assert len(running.result(60)) == LONG
    # It rehearses on behind it, no prompt more than twice in all.
    assert unfinished(actor) == 0


def test_a_weight_load_ends_all_rehearsals(actor: Actor, tmp_path: Path) -> None:
    expect(actor, *(text(number) for number in range(30, 38)), max_tokens=LONG)
    until(lambda: unfinished(actor) == 8 * 2)
    actor.call(actor.raw.load_weights(stored(model_with(1.0), 1, tmp_path)))
    assert unfinished(actor) == 0 and actor.raw.weight_version == 1
    assert actor.raw.timeline.state == "idle"


def test_prompts_that_never_came_leave_nothing(actor: Actor) -> None:
    expect(actor, text(40))
    until_rehearsed(actor, 2)
    expect(actor)
    expect(actor)
    first, outdated = measured(actor, text(40))
    again, never = measured(actor, text(40))
    assert again == first and outdated.sample_steps == never.sample_steps
