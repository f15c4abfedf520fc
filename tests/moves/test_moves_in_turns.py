"""Two real engines of a pipelined run: a sample that is too long goes on at the other one, and holds its turn up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.scheduling.turns import training_turn
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.histopipe import HistoPipeSettings
from rhyme_openrlhf.settings.moves import MoveSettings
from rhyme_openrlhf.telemetry.events import Event, SampleMoved
from rhyme_openrlhf.telemetry.samples import ROUNDS
from tests.engine.actors import model_with, stored
from tests.moves.engines import TIMEOUT_S, LocalEngine, a_home, prompt, variables

FIRST, SECOND, THIRD = (training_turn(step, 0) for step in (1, 2, 3))
LONG = 560


@pytest.fixture
def engines(starts_engine: None) -> Iterator[list[LocalEngine]]:
    with variables():
        found = [LocalEngine(index, pipelined=True) for index in (0, 1)]
        for engine in found:
            assert engine.raw
    yield found
    for engine in found:
        engine.stop()


class OneTurn:
    """Asks for as many tokens as its label says."""

    async def execute(self, prompt: str, label: str, sampling_params: Any, llm_engine: Any, **_: Any) -> dict[str, Any]:
        parameters = sampling_params.clone()
        parameters.max_tokens = int(label)
        output = await llm_engine.generate(list(range(10, 40)), parameters)
        return {"prompt": prompt, "reward": 1.0, "scores": 1.0, "tokens": list(output.outputs[0].token_ids)}


def test_a_sample_holds_up_the_turn_it_moved_into_until_it_is_deferred(
    engines: list[LocalEngine], tmp_path: Path
) -> None:
    from vllm import SamplingParams

    settings = dataclasses.replace(
        RhymeSettings(),
        histopipe=HistoPipeSettings(enable=True),
        move=MoveSettings(enable=True, news_s=0.02, carrier="kv_transfer"),
    )
    parameters = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
    events: list[Event] = []
    # Made before anything runs: it takes as long as a sample.
    segment = stored(model_with(0.9), 1, tmp_path)

    async def main() -> None:
        home = a_home(engines, settings, OneTurn(), events.append)
        await home.open()

        def call(engine: int, number: int, place: int, tokens: int, samples: int = 1) -> Any:
            sent = prompt("p", parameters, 600, samples, label=str(tokens))
            return asyncio.create_task(home.generate_in_turn(engine, number, place, **sent))

        async def running(engine: int, tokens: int, of: Any) -> tuple[int, ...]:
            while True:
                assert not of.done(), "it ended before it was seen"
                there = await engines[engine].call("running_samples")
                for sample in there.samples:
                    if sample[2] >= tokens:
                        return sample
                await asyncio.sleep(0.01)

        for engine in engines:
            await engine.call("hand_turn", FIRST, 2, [])
        others = [call(0, FIRST.number, 0, 5), call(1, FIRST.number, 2, 5, samples=2)]
        # The sample does not end before it has moved, nor before the turn it moved into has been looked at.
        engines[0].hold_at(100)
        engines[1].hold_at(300)
        long = call(0, FIRST.number, 1, LONG)
        turn, place, _, number = await running(0, 20, long)
        assert (turn, place) == (FIRST.number, 1)
        assert await home.move(number, 1, "outlier_intra") == "moved"
        # Where it was, the turn is over; where it is now, it is not, though all its own samples have ended.
        await asyncio.gather(*others)
        assert (await engines[0].call("turn_report", FIRST.number)).weight_version == 0
        loads = [asyncio.create_task(engine.call("offer_weights", segment, [])) for engine in engines]
        # Offered before the turn is handed, which could else begin without them.
        await asyncio.sleep(0)
        for engine in engines:
            await engine.call("hand_turn", SECOND, 1, [])
        assert (await loads[0]).seconds > 0
        before = await running(1, 60, long)
        assert engines[1].raw.weight_version == 0 and not loads[1].done() and not long.done()
        # Deferred, it goes on below newer weights.
        await engines[1].call("defer", FIRST.number, 1)
        await loads[1]
        (second,) = await call(1, SECOND.number, 0, 5)
        assert second[ROUNDS][0].tokens_by_version() == {1: 5} and not long.done()
        engines[1].hold_at(0)
        (response,) = await long
        (at,) = response[ROUNDS]
        ((version, tokens),) = at.loads
        assert version == 1 and before[2] <= tokens < LONG == len(response["tokens"])
        assert at.tokens_by_version() == {0: tokens, 1: LONG - tokens}

        # A prompt group with a sample at an engine that is gone is not patched up: its caller hears of it.
        engines[1].hold_at(100)
        lost = call(0, SECOND.number, 4, LONG)
        *_, number = await running(0, 10, lost)
        assert await home.move(number, 1, "outlier_intra") == "moved"
        engines[1].gone = True
        with pytest.raises(EngineLost, match="engine 1 is gone"):
            await lost
        engines[1].purge()
        home.close()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert [(e.cause, e.outcome) for e in events if isinstance(e, SampleMoved)] == [("outlier_intra", "moved")] * 2
