"""The home of samples on the pair of real engines: what OpenRLHF's callers get, with and without moves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

from rhyme_openrlhf.scheduling.engine_status import EngineStatus
from rhyme_openrlhf.scheduling.move import MoveRefused
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.moves import MoveSettings, ReallocationSettings
from rhyme_openrlhf.telemetry.events import Event, SampleMoved
from rhyme_openrlhf.telemetry.samples import ROUNDS
from tests.moves.engines import TIMEOUT_S, Engines, a_home, prompt

ROUNDS_EACH = 2
THRESHOLD = 3


class TwoTurns:
    """An agent with two rounds: its second prompt is the first answer and a question."""

    async def execute(self, prompt: str, sampling_params: Any, llm_engine: Any, **_: Any) -> dict[str, Any]:
        tokens, answers = list(range(10, 50)), []
        for _number in range(ROUNDS_EACH):
            output = await llm_engine.generate(tokens, sampling_params)
            answers.append(list(output.outputs[0].token_ids))
            tokens = tokens + answers[-1] + [7, 8, 9]
        return {"prompt": prompt, "reward": 1.0, "scores": 1.0, "answers": answers}


def test_both_rounds_of_a_conversation_move(pair: Engines) -> None:
    from vllm import SamplingParams

    settings = dataclasses.replace(RhymeSettings(), move=MoveSettings(enable=True, news_s=0.02))
    parameters = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logprobs=1)

    async def conversations(moving: bool) -> tuple[list[Any], list[Event]]:
        events: list[Event] = []
        home = a_home(pair.engines, settings, TwoTurns(), events.append)
        await home.open()
        home.begin_step(3)
        # The first rounds do not end before this process gets to their moves.
        pair.engines[0].hold_at(110 if moving else 0)
        task = asyncio.create_task(home.generate_responses(0, **prompt("p", parameters, 600, 3)))
        while not task.done():
            for engine in (0, 1):
                for number, tokens in home.running(engine).items():
                    # Each round once: it begins where the one before ended.
                    if moving and tokens > 100 and not any(e.sample == str(number) for e in events):
                        # Or it has ended while another was moved.
                        with contextlib.suppress(KeyError):
                            try:
                                assert await home.move(number, 1 - engine, "reallocation") in ("moved", "cancelled")
                            except MoveRefused as refused:
                                # A second round begins with over 100 tokens: until its engine has answered, it is tried
                                # again.
                                assert "is being moved already" in str(refused)
            if sum(isinstance(e, SampleMoved) and e.outcome == "moved" for e in events) >= 3:
                pair.engines[0].hold_at(0)
            await asyncio.sleep(0.005)
        home.close()
        assert home.unfinished(0) == home.unfinished(1) == 0
        return await task, events

    def run(moving: bool) -> tuple[list[Any], list[Event]]:
        return asyncio.run(asyncio.wait_for(conversations(moving), TIMEOUT_S))

    expected, nothing = run(False)
    assert nothing == [] and [one.engine for response in expected for one in response[ROUNDS]] == [0] * 6
    responses, events = run(True)
    assert [r["answers"] for r in responses] == [r["answers"] for r in expected]
    assert all(isinstance(event, SampleMoved) and event.step == 3 for event in events)
    moved = [event for event in events if event.outcome == "moved"]
    assert len(moved) >= 3 and {event.carrier for event in moved} == {"kv_transfer"}
    assert all(event.tokens > 100 for event in moved)
    # None of a round that ended before its next token was seen.
    known = [event for event in moved if event.downtime_seconds is not None]
    assert known and all(0 < event.downtime_seconds <= event.seconds for event in known)
    for response in responses:
        assert [one.tokens for one in response[ROUNDS]] == [200, 200]
        assert [one.finish_reason for one in response[ROUNDS]] == ["length", "length"]


class OneTurn:
    """An agent that only asks; each sample for another length."""

    def __init__(self) -> None:
        self._asked = 0

    async def execute(self, prompt: str, sampling_params: Any, llm_engine: Any, **_: Any) -> dict[str, Any]:
        self._asked += 1
        parameters = sampling_params.clone()
        # As long as there is room for: those that move have to begin elsewhere before they end.
        parameters.max_tokens = 400 + 20 * self._asked
        output = await llm_engine.generate([*range(10, 30), self._asked], parameters)
        return {"prompt": prompt, "reward": 1.0, "scores": 1.0, "answer": list(output.outputs[0].token_ids)}


def test_samples_are_evened_out_while_they_run(pair: Engines) -> None:
    """All begin at one engine; those above the threshold go on at the other one, as if nothing had happened."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)

    async def generate(enable: bool) -> tuple[list[Any], list[Event], dict[int, EngineStatus]]:
        settings = dataclasses.replace(
            RhymeSettings(),
            move=MoveSettings(news_s=0.02),
            reallocation=ReallocationSettings(enable=enable, threshold=THRESHOLD, cooldown_steps=1, status_s=0.02),
        )
        events: list[Event] = []
        home = a_home(pair.engines, settings, OneTurn(), events.append)
        await home.open()
        # As many as are to move do not end before they have, however seldom this process hears of them.
        pair.engines[0].hold_at(200 if enable else 0)
        running = asyncio.create_task(home.generate_responses(0, **prompt("p", parameters, 600, 8)))
        busy: dict[int, EngineStatus] = {}
        while not running.done():
            reports = home.reports.statuses if home.reports is not None else {}
            if sum(isinstance(event, SampleMoved) and event.outcome == "moved" for event in events) >= THRESHOLD:
                pair.engines[0].hold_at(0)
            busy |= {engine: status for engine, status in reports.items() if status.samples and status.decode}
            await asyncio.sleep(0.02)
        home.close()
        return await running, events, busy

    def run(enable: bool) -> tuple[list[Any], list[Event], dict[int, EngineStatus]]:
        return asyncio.run(asyncio.wait_for(generate(enable), TIMEOUT_S))

    expected, nothing, _ = run(False)
    assert nothing == []
    responses, events, statuses = run(True)
    assert [r["answer"] for r in responses] == [r["answer"] for r in expected]
    moves = [event for event in events if isinstance(event, SampleMoved)]
    assert events == moves and sum(event.outcome == "moved" for event in moves) >= THRESHOLD
    assert {(event.source_engine, event.destination_engine, event.cause) for event in moves[:THRESHOLD]} == {
        (0, 1, "reallocation")
    }
    # A sample that is moved late may end before this process asks when its first token came.
    downtimes = [event.downtime_seconds for event in moves if event.outcome == "moved"]
    assert all(downtimes[:THRESHOLD]) and all(one is None or one > 0 for one in downtimes)
    assert set(statuses) == {0, 1}
    for status in statuses.values():
        assert status.open and 0 < len(status.samples) <= 8 and all(sample.context > 20 for sample in status.samples)
        assert status.tokens_per_second > 0 and status.decode is not None and status.decode.running >= 1
        assert status.free_tokens > 0 and status.free_seats > 0 and status.decode_steps > 0


def test_a_move_is_recorded_with_what_was_expected_of_it(pair: Engines) -> None:
    """Of the first one nothing is known; of the second one what the first has shown, beside what it really took."""
    from vllm import SamplingParams

    settings = dataclasses.replace(
        RhymeSettings(),
        move=MoveSettings(news_s=0.02),
        # Only this test asks for reports.
        reallocation=ReallocationSettings(enable=True, threshold=8, status_s=60),
    )
    parameters = SamplingParams(temperature=0, ignore_eos=True, logprobs=1, max_tokens=600)

    class Long(OneTurn):
        """One that is still there after two moves, and one at each engine that makes steps to report."""

        async def execute(self, prompt: str, sampling_params: Any, llm_engine: Any, **_: Any) -> dict[str, Any]:
            output = await llm_engine.generate([*range(10, 30), int(prompt)], parameters)
            return {"prompt": prompt, "reward": 1.0, "scores": 1.0, "answer": list(output.outputs[0].token_ids)}

    async def main() -> list[Event]:
        events: list[Event] = []
        home = a_home(pair.engines, settings, Long(), events.append)
        await home.open()
        home.begin_step(2)
        for engine in pair.engines:
            engine.hold_at(120)
        tasks = [
            asyncio.create_task(home.generate_responses(engine, **prompt(str(number), parameters, 640)))
            for number, engine in ((40, 0), (41, 0), (42, 1))
        ]
        assert home.reports is not None
        for source, tokens, held in ((0, 100, 240), (1, 220, 480)):
            # Every sample has made steps since the last report, and waits.
            while not all(home.running(n) and min(home.running(n).values()) > tokens for n in (0, 1)):
                await asyncio.sleep(0.005)
            await home.reports.hear()
            for engine in pair.engines:
                engine.hold_at(held)
            assert await home.move(0, 1 - source, "reallocation") == "moved"
        home.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for engine in pair.engines:
            engine.hold_at(0)
        return events

    first, second = asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert isinstance(first, SampleMoved) and isinstance(second, SampleMoved)
    assert (first.step, first.sample, first.cause, first.carrier, first.outcome) == (
        2, "0", "reallocation", "kv_transfer", "moved",
    )  # fmt: skip
    assert (second.source_engine, second.destination_engine) == (1, 0) and second.tokens > first.tokens > 100
    assert first.predicted_seconds is None and second.predicted_seconds is not None and second.predicted_seconds > 0
    for event in (first, second):
        assert event.downtime_seconds is not None and 0 < event.downtime_seconds <= event.seconds
