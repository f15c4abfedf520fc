"""The home's actor between OpenRLHF's dispatch, Ray's engines and its fronts. No Ray is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.engine_errors import EngineCoreError  # first: installs the shims where needed

import ray  # isort: skip

from rhyme_openrlhf.engine.calls import SampleCalls
from rhyme_openrlhf.engine.checked_reward import RewardLateError
from rhyme_openrlhf.engine.port import RayEngine
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.moves.front import HomeUnreached, RayHome
from rhyme_openrlhf.moves.fronts import FrontLost, RayFront
from rhyme_openrlhf.moves.home import door


def test_a_door_leads_each_engines_prompts_to_the_home() -> None:
    called: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> str:
        called.append((args, kwargs))
        return "reference"

    home = SimpleNamespace(
        generate_responses=SimpleNamespace(remote=note),
        unfinished=SimpleNamespace(remote=lambda engine: [7, 8][engine]),
    )
    second = door(home, 1)
    assert second.get_num_unfinished_requests.remote() == 8
    assert second.generate_responses.remote(prompt="p", num_samples=4) == "reference"
    assert called == [((1,), {"prompt": "p", "num_samples": 4})]


def raised_by(error: Exception) -> Exception:
    """What a keeper gets of an engine call that raises `error`."""

    async def method(*_: Any) -> None:
        raise error

    engine = RayEngine(3, SimpleNamespace(stop_sample=SimpleNamespace(remote=method)))
    with pytest.raises((EngineLost, OrderFailed, TimeoutError)) as caught:
        asyncio.run(engine.call(SampleCalls.stop_sample, "s"))
    return caught.value


def of_a_task(cause: Exception) -> Exception:
    """As Ray raises what a method of an actor raised."""
    return ray.exceptions.RayTaskError("stop_sample", f"Traceback\n{cause}", cause).as_instanceof_cause()


def test_an_engine_that_is_gone_is_told_from_one_that_raises() -> None:
    dead = raised_by(ray.exceptions.ActorDiedError())
    assert isinstance(dead, EngineLost) and str(dead).startswith("engine 3 is gone: ")
    core = raised_by(of_a_task(EngineCoreError("the vLLM engine core died")))
    assert isinstance(core, EngineLost) and "the vLLM engine core died" in str(core)
    bad = raised_by(of_a_task(KeyError("s")))
    assert isinstance(bad, OrderFailed) and str(bad).startswith("engine 3 failed to stop_sample: ")
    assert isinstance(raised_by(of_a_task(TimeoutError("waited 10 s"))), TimeoutError)


def of_a_front(error: Exception) -> Exception:
    """What a home gets of a front's call that raises `error`."""

    async def method(*_: Any, **__: Any) -> None:
        raise error

    front = RayFront.__new__(RayFront)
    front._node, front._handle = "n", SimpleNamespace(packed_responses=SimpleNamespace(remote=method))
    with pytest.raises(Exception) as caught:
        asyncio.run(front.generate_responses(0, 0, prompt="p"))
    return caught.value


def test_a_front_that_is_gone_is_told_from_one_whose_samples_fail() -> None:
    late = of_a_front(of_a_task(RewardLateError("the reward function did not answer")))
    # As if it had been raised in the home: the trainer shows the last line of one traceback, not of two.
    assert type(late) is RewardLateError and str(late) == "the reward function did not answer"
    dead = of_a_front(ray.exceptions.ActorDiedError())
    assert isinstance(dead, FrontLost) and dead.dead and str(dead) == "the front of samples on node n died"
    for error in (ray.exceptions.ActorUnavailableError("broken", None), of_a_task(HomeUnreached("no connection"))):
        unreached = of_a_front(error)
        assert isinstance(unreached, FrontLost) and not unreached.dead


def test_a_front_tells_the_homes_answer_from_a_broken_connection() -> None:
    def raised(error: Exception) -> Exception:
        async def method(*_: Any) -> None:
            raise error

        home = RayHome(SimpleNamespace(respond=SimpleNamespace(remote=method)))
        with pytest.raises(EngineLost) as caught:
            asyncio.run(home.respond(0, None))  # type: ignore[arg-type]
        return caught.value

    assert type(raised(of_a_task(EngineLost("no engine is left")))) is EngineLost
    assert type(raised(ray.exceptions.ActorUnavailableError("broken", None))) is HomeUnreached
