"""A front without engines: what it asks the home for, what it makes of the responses, and what ends with a sample."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, RewardLateError
from rhyme_openrlhf.engine.messages import LOADS, Packed, unpacked
from rhyme_openrlhf.engine.requests import SampleIdentity, VisitedPrompt, request_seed  # first: installs the shims
from rhyme_openrlhf.moves.front import Front, PlainFrontActor, RoundRequest, RoundResponse, all_or_none
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.run import RunSettings
from rhyme_openrlhf.telemetry.samples import ROUNDS, Round
from tests import virtual_time
from tests.moves.engines import prompt

REPRODUCIBLE = dataclasses.replace(RhymeSettings(), run=RunSettings(reproducible=True))


class Home:
    """Answers every round with its number as the one token; each moves to the next engine."""

    def __init__(self, version: int | None = 3, loads: Any = ()) -> None:
        self.asked: list[tuple[int, RoundRequest]] = []
        self._version, self._loads = version, list(loads)

    async def respond(self, call: int, asked: RoundRequest) -> RoundResponse:
        self.asked.append((call, asked))
        await asyncio.sleep(0)
        output = NS(outputs=[NS(token_ids=[asked.round], text="", finish_reason="stop", logprobs=None)])
        if self._loads:
            setattr(output, LOADS, self._loads)
        noted = Round(asked.engine, 2, len(asked.tokens))
        return RoundResponse(Packed(pickle.dumps(output)), noted, asked.engine + 1, self._version)


class Parameters(NS):
    """The part of vLLM's parameters that a front uses."""

    def clone(self) -> Parameters:
        return Parameters(**vars(self))


def parameters() -> Parameters:
    return Parameters(max_tokens=8, stop=[], logprobs=1, detokenize=True, seed=None)


class Rounds:
    """An agent of two rounds."""

    async def execute(self, prompt: str, hf_tokenizer: Any, llm_engine: Any, sampling_params: Any, **_: Any) -> Any:
        tokens = hf_tokenizer(prompt)
        for _round in range(2):
            output = await llm_engine.generate(tokens, sampling_params)
            tokens = [*tokens, *output.outputs[0].token_ids, 7]
        return {"prompt": prompt, "reward": 1, "tokens": tokens}


def a_front(home: Any, settings: RhymeSettings, executor: Any) -> Front:
    front = Front(home, settings, 5, None, None, lambda text: [ord(letter) for letter in text])
    front.executor = executor
    return front


def test_a_round_begins_where_the_round_before_ended_and_all_are_noted() -> None:
    home, sent = Home(), parameters()
    front = a_front(home, REPRODUCIBLE, Rounds())
    asked = prompt(VisitedPrompt("ab", 4), sent, 100, 2)
    responses = asyncio.run(front.generate_responses(9, 6, **asked))
    assert [response["tokens"] for response in responses] == [[97, 98, 0, 7, 1, 7]] * 2
    assert [(call, one.sample, one.round, one.engine, one.tokens) for call, one in home.asked] == [
        (9, 0, 0, 6, (97, 98)), (9, 1, 0, 6, (97, 98)),
        (9, 0, 1, 7, (97, 98, 0, 7)), (9, 1, 1, 7, (97, 98, 0, 7)),
    ]  # fmt: skip
    # As an engine would have seeded them; what an agent reads of an output is not known, so it gets all.
    seeds = [request_seed(5, SampleIdentity("ab", 4, one.sample), len(one.tokens)) for _, one in home.asked]
    assert [one.parameters.seed for _, one in home.asked] == seeds and len(set(seeds)) == 4
    assert all(one.parameters.detokenize and one.parameters.logprobs == 1 for _, one in home.asked)
    assert sent.seed is None
    for response in responses:
        assert [(one.engine, one.weight_version, one.context) for one in response[ROUNDS]] == [(6, 2, 2), (7, 2, 4)]
        assert [(one.tokens, one.last_weight_version) for one in response[ROUNDS]] == [(1, 3)] * 2


@pytest.mark.parametrize(("loads", "version"), [((), 2), (((5, 1), (6, 1)), 6)], ids=["none", "two"])
def test_in_a_turn_the_output_says_what_was_loaded_below(loads: Any, version: int) -> None:
    front = a_front(Home(None, loads), RhymeSettings(), Rounds())
    (response,) = asyncio.run(front.generate_responses(0, 0, **prompt("a", parameters(), 100)))
    assert [(one.loads, one.last_weight_version) for one in response[ROUNDS]] == [(list(loads), version)] * 2


def test_openrlhfs_own_executor_gets_what_it_reads_and_no_more() -> None:
    home = Home()
    front = Front(home, RhymeSettings(), 5, None, None, None)
    assert type(front.executor) is CheckedExecutor
    identity = SampleIdentity("a", 0, 0)
    asyncio.run(front.respond(0, identity, 0, [1], parameters(), None))
    ((_, asked),) = home.asked
    assert (asked.parameters.detokenize, asked.parameters.logprobs, asked.parameters.seed) == (False, 0, None)


def test_when_a_sample_fails_its_siblings_are_given_up() -> None:
    """Also those that a user's code keeps: they are not waited for."""
    ended: list[str] = []

    async def late() -> dict[str, Any]:
        await asyncio.sleep(1)
        raise RewardLateError("no reward")

    async def other(seconds: float) -> dict[str, Any]:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append("cancelled")
            await asyncio.sleep(seconds)
        return {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RewardLateError):
            await all_or_none([other(30), late(), other(20)])
        assert loop.time() == pytest.approx(1, abs=0.1)
        await asyncio.sleep(0.1)
        assert ended == ["cancelled"] * 2

    virtual_time.run(main(), 60)


def test_responses_travel_packed_also_with_an_agents_own_classes() -> None:
    class Kept:
        value = 3

    class Agent(Rounds):
        async def execute(self, *args: Any, **kwargs: Any) -> Any:
            return {**await super().execute(*args, **kwargs), "kept": Kept()}

    actor = PlainFrontActor.__new__(PlainFrontActor)
    Front.__init__(actor, Home(), RhymeSettings(), 5, None, None, lambda text: [1])
    actor.executor = Agent()
    (packed,) = asyncio.run(actor.packed_responses(0, 0, **prompt("a", parameters(), 100)))
    assert isinstance(packed, Packed)
    response = unpacked(packed)
    assert response["kept"].value == 3 and response["reward"] == 1.0 and unpacked(response) is response
