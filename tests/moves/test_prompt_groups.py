"""The calls for prompts at a home over faithful fakes of engines: when one ends, none of its samples runs on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.engine.checked_reward import RewardLateError
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.moves.front import RoundRequest
from rhyme_openrlhf.moves.fronts import FrontLost, Fronts, NoFrontError
from rhyme_openrlhf.moves.home import SampleHome
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.histopipe import HistoPipeSettings
from rhyme_openrlhf.settings.moves import MoveSettings
from tests import virtual_time
from tests.moves.fakes import FakeEngine

MOVES = dataclasses.replace(RhymeSettings(), move=MoveSettings(enable=True, news_s=0.02))
PIPELINED = dataclasses.replace(MOVES, histopipe=HistoPipeSettings(enable=True))
# Tokens of a sample that still runs after two seconds: these engines make a thousand a second.
LONG = 3000


@dataclass
class Engine(FakeEngine):
    """A fake on a node of its own, with turns that begin at once."""

    node: str = "a"
    turns: list[Any] = field(default_factory=list)

    async def node_id(self) -> str:
        await asyncio.sleep(0.1)
        return self.node

    def enter_turn(self, *call: int) -> None:
        self.turns.append(("enter", *call))

    def leave_turn(self, *call: int) -> None:
        self.turns.append(("leave", *call))


# A front's answer to a prompt: what it does with the home, and with the number of the call.
Does = Callable[[SampleHome, int, int], Coroutine[Any, Any, list[Any]]]


class Scripted:
    """A front that answers its n-th prompt as the n-th of `does` says, and then as the last."""

    def __init__(self, home: Callable[[], SampleHome], does: list[Does]) -> None:
        self._home, self._does = home, does

    async def ready(self) -> None:
        pass

    async def generate_responses(self, call: int, engine: int, **_: Any) -> list[Any]:
        does = self._does.pop(0) if len(self._does) > 1 else self._does[0]
        return await does(self._home(), call, engine)


def request(sample: int, engine: int, tokens: int = 5, round_: int = 0) -> RoundRequest:
    return RoundRequest(sample, round_, engine, (sample + 1,), NS(max_tokens=tokens, seed=None))


async def answers(home: SampleHome, call: int, engine: int) -> list[Any]:
    return await asyncio.gather(*(home.respond(call, request(sample, engine)) for sample in range(2)))


def ends(error: Exception, begun: int = 2) -> Does:
    """Two long samples, of which `begun` begin; after a second the front ends so, and leaves them behind."""

    async def does(home: SampleHome, call: int, engine: int) -> list[Any]:
        for sample in range(begun):
            asyncio.create_task(home.respond(call, request(sample, engine, LONG))).add_done_callback(of_nobody.append)
        await asyncio.sleep(1)
        raise error

    return does


of_nobody: list[asyncio.Task[Any]] = []


def lost(dead: bool) -> FrontLost:
    return FrontLost("the front of samples on node a is gone: killed", dead)


def a_home(settings: RhymeSettings, fronts: dict[str, list[Does]], *engines: Engine) -> SampleHome:
    home = SampleHome(
        dict(enumerate(engines)),
        settings,
        Fronts(lambda node: Scripted(lambda: home, fronts[node]), str),
        lambda _: None,
    )
    return home


def engines() -> tuple[Engine, Engine]:
    return Engine(lambda method: "", node="a"), Engine(lambda method: "", node="b")


def sent(samples: int = 2) -> dict[str, Any]:
    return {"prompt": "p", "num_samples": samples}


async def nothing_runs(*there: Engine) -> None:
    await asyncio.sleep(0.5)
    assert [engine.here for engine in there] == [{} for _ in there]
    # What the front left behind has heard of it.
    assert of_nobody and all(isinstance(task.exception(), EngineLost) for task in of_nobody)
    of_nobody.clear()


def test_a_dead_fronts_prompts_are_generated_again_by_another() -> None:
    async def main() -> None:
        one, two = engines()
        home = a_home(MOVES, {"a": [ends(lost(dead=True))], "b": [answers]}, one, two)
        await home.open()
        first, second = await home.generate_responses(0, **sent())
        # At the engine that was chosen for them.
        assert (first.engine, second.engine) == (0, 0) and len(first.output) == len(second.output) == 5
        await nothing_runs(one, two)
        home.close()

    virtual_time.run(main(), 60)


def test_without_a_front_the_run_ends_with_what_ended_the_last() -> None:
    async def main() -> None:
        one, two = engines()
        one.node = two.node
        home = a_home(MOVES, {"b": [ends(lost(dead=True))]}, one, two)
        await home.open()
        with pytest.raises(NoFrontError, match="is gone: killed"):
            await home.generate_responses(0, **sent())
        await nothing_runs(one, two)
        home.close()

    virtual_time.run(main(), 60)


def test_a_front_that_was_not_reached_gets_the_prompt_again() -> None:
    async def main() -> None:
        one, two = engines()
        home = a_home(MOVES, {"a": [ends(lost(dead=False)), answers], "b": [ends(ValueError())]}, one, two)
        await home.open()
        assert len(await home.generate_responses(0, **sent())) == 2
        await nothing_runs(one, two)
        home.close()

    virtual_time.run(main(), 60)


@pytest.mark.parametrize("error", [RewardLateError("late"), EngineLost("engine 3 is gone"), ValueError("x")])
def test_when_a_sample_fails_no_sibling_runs_on_at_an_engine(error: Exception) -> None:
    async def main() -> None:
        one, two = engines()
        home = a_home(MOVES, {"a": [ends(error)], "b": [answers]}, one, two)
        await home.open()
        with pytest.raises(type(error)):
            await home.generate_responses(0, **sent())
        await nothing_runs(one, two)
        assert home.unfinished(0) == home.unfinished(1) == 0
        home.close()

    virtual_time.run(main(), 60)


@pytest.mark.parametrize("begun", [1, 2])
def test_in_a_turn_the_controller_hears_of_a_lost_front_and_the_turn_waits_for_none(begun: int) -> None:
    async def main() -> None:
        one, two = engines()
        home = a_home(PIPELINED, {"a": [ends(lost(dead=True), begun)], "b": [answers]}, one, two)
        await home.open()
        with pytest.raises(EngineLost, match="the front of samples on node a is gone"):
            await home.generate_in_turn(0, 7, 3, **sent())
        # Those that never began would else hold the turn up.
        assert one.turns == [("enter", 7, 3, 2), *([("leave", 7, 3, 1)] if begun == 1 else [])]
        await nothing_runs(one, two)
        home.close()

    virtual_time.run(main(), 60)


def test_an_agent_that_asks_for_nothing_holds_up_no_turn() -> None:
    async def silent(home: SampleHome, call: int, engine: int) -> list[Any]:
        return ["response"] * 2

    async def main() -> None:
        one, two = engines()
        home = a_home(PIPELINED, {"a": [silent], "b": [silent]}, one, two)
        await home.open()
        assert await home.generate_in_turn(0, 7, 3, **sent()) == ["response"] * 2
        assert one.turns == [("enter", 7, 3, 2), ("leave", 7, 3, 2)]
        home.close()

    virtual_time.run(main(), 60)


def test_a_sample_is_noted_with_the_weights_that_it_began_with() -> None:
    """Its engine's last news may be from before it had them."""

    async def main() -> None:
        one, two = engines()
        home = a_home(MOVES, {"a": [answers], "b": [answers]}, one, two)
        await home.open()
        await asyncio.sleep(0.1)
        one.weights = 1
        for response in await home.generate_responses(0, **sent()):
            assert (response.noted.weight_version, response.weight_version, response.noted.engine) == (1, 1, 0)
        home.close()

    virtual_time.run(main(), 60)


def test_whoever_opens_the_home_finds_it_open() -> None:
    """Also when the first attempt failed half-way, and while another one is under way."""

    async def main() -> None:
        faults = ["", "fails"]
        one = Engine(lambda method: "")
        two = Engine(lambda method: faults.pop() if method == "node_id" and faults else "", node="b")
        home = a_home(MOVES, {"a": [answers], "b": [answers]}, one, two)
        with pytest.raises(OrderFailed):
            await home.open()
        first = asyncio.create_task(home.open())
        await asyncio.sleep(0)
        await home.open()
        assert first.done() and len(await home.generate_responses(1, **sent())) == 2
        assert home._keeper._ears and len(home._keeper._ears) == 2
        home.close()

    virtual_time.run(main(), 60)
