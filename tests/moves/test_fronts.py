"""The front that answers a prompt, and the fate of prompts whose front is gone or out of reach."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.moves.fronts import UNREACHED_SECONDS, FrontLost, Fronts, NoFrontError
from tests import virtual_time


class Scripted:
    """Answers with its node, unless it is said to fail."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.fails: Exception | None = None
        self.asked = 0

    async def ready(self) -> None:
        await asyncio.sleep(3)

    async def generate_responses(self, call: int, engine: int, **_: Any) -> list[Any]:
        self.asked += 1
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return [self.node]


def fronts_of(said: list[str]) -> tuple[Fronts, dict[str, Scripted]]:
    made: dict[str, Scripted] = {}

    def start(node: str) -> Scripted:
        assert node not in made, "it has one"
        made[node] = Scripted(node)
        return made[node]

    return Fronts(start, said.append), made


def test_a_prompt_is_answered_on_its_engines_node_while_there_is_a_front() -> None:
    async def main() -> None:
        said: list[str] = []
        fronts, made = fronts_of(said)
        await asyncio.gather(fronts.open({"a", "b"}), fronts.open({"b", "a"}))
        assert asyncio.get_running_loop().time() == pytest.approx(3) and sorted(made) == ["a", "b"]
        assert await fronts.generate_responses("b", 0, 0) == ["b"]
        # An engine that was gone when the home asked is on no node.
        assert await fronts.generate_responses("", 1, 0) == ["a"]

        # What a sample raises is no loss.
        made["b"].fails = ValueError("of a sample")
        with pytest.raises(ValueError, match="of a sample"):
            await fronts.generate_responses("b", 2, 0)
        assert said == []

        made["b"].fails = FrontLost("the front of samples on node b is gone: killed", dead=True)
        lost = await asyncio.gather(*(fronts.generate_responses("b", n, 0) for n in (3, 4)), return_exceptions=True)
        assert [type(one) for one in lost] == [FrontLost] * 2
        assert await fronts.generate_responses("b", 5, 0) == ["a"]
        (sentence,) = said
        assert sentence.startswith("the front of samples on node b is gone: killed; its prompts are generated again")

        made["a"].fails = FrontLost("the front of samples on node a is gone: out of memory", dead=True)
        with pytest.raises(FrontLost):
            await fronts.generate_responses("a", 6, 0)
        with pytest.raises(NoFrontError, match=r"agent and rewards: the front .* gone: out of memory\."):
            await fronts.generate_responses("a", 7, 0)
        assert len(said) == 1

    virtual_time.run(main(), 60)


def test_a_front_that_is_not_reached_is_asked_again_for_a_while() -> None:
    async def main() -> None:
        said: list[str] = []
        fronts, made = fronts_of(said)
        await fronts.open({"a", "b"})
        unreached = FrontLost("the front of samples on node a was not reached: a connection broke", dead=False)

        async def until(node: str) -> float:
            began = asyncio.get_running_loop().time()
            while True:
                try:
                    assert await fronts.generate_responses("a", 0, 0) == [node]
                    return asyncio.get_running_loop().time() - began
                except FrontLost:
                    continue

        async def heal(after: float) -> None:
            await asyncio.sleep(after)
            made["a"].fails = None

        for _ in range(3):
            # Each time anew: it was reached between.
            made["a"].fails = unreached
            times = await asyncio.gather(*(until("a") for _ in range(20)), heal(0.6 * UNREACHED_SECONDS))
            assert max(times[:-1]) < UNREACHED_SECONDS
        assert said == []
        made["a"].fails = unreached
        asked = made["a"].asked
        assert UNREACHED_SECONDS <= await until("b") < UNREACHED_SECONDS + 3
        assert len(said) == 1 and made["a"].asked - asked < 2 * UNREACHED_SECONDS

    virtual_time.run(main(), 600)


def test_two_broken_connections_with_running_prompts_between_are_no_loss() -> None:
    async def main() -> None:
        said: list[str] = []
        fronts, made = fronts_of(said)
        await fronts.open({"a", "b"})
        for _ in range(3):
            made["a"].fails = FrontLost("the front of samples on node a was not reached", dead=False)
            with pytest.raises(FrontLost):
                await fronts.generate_responses("a", 0, 0)
            # Sent again, its prompts run, and none has ended yet.
            await asyncio.sleep(2 * UNREACHED_SECONDS)
        made["a"].fails = None
        assert await fronts.generate_responses("a", 1, 0) == ["a"] and said == []

    virtual_time.run(main(), 600)


def test_a_front_that_dies_before_its_first_prompt_ends_no_run() -> None:
    async def main() -> None:
        said: list[str] = []
        fronts, made = fronts_of(said)
        await fronts.open({"a", "b"})
        dead = FrontLost("the front of samples on node a died", dead=True)

        async def gone() -> None:
            raise dead

        made["a"].fails, made["a"].ready = dead, gone  # type: ignore[method-assign]
        await fronts.open({"a", "b"})
        with pytest.raises(FrontLost):
            await fronts.generate_responses("a", 0, 0)
        assert await fronts.generate_responses("a", 0, 0) == ["b"] and len(said) == 1

    virtual_time.run(main(), 60)
