"""The authority on lost engines: who finds a loss, who is told, and what is no loss."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

import ray

from rhyme_openrlhf import engine_losses
from rhyme_openrlhf.engine.calls import EngineCalls, TurnCalls
from rhyme_openrlhf.engine.port import LivePort, RayEngine
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.engine_losses import UNREACHED_SECONDS, EngineLosses, LostEngine
from tests import virtual_time
from tests.faults.schedule import core_dead, unreachable

GONE = ray.exceptions.ActorDiedError
CORE = core_dead()


class Handle:
    """An engine's handle: each call takes the next of its answers, or the last again; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), 0

    def __getattr__(self, name: str) -> Any:
        return NS(remote=lambda *_: self._call())

    async def _call(self) -> Any:
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def get(ref: Any) -> Any:
    return asyncio.run(ref)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ray's calls on handles of this process; gives what is killed."""
    found: list[Any] = []
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "kill", found.append)
    return found


def test_a_loss_is_told_once_to_each_subscriber_and_stays() -> None:
    losses, told = EngineLosses(), list[tuple[int, str]]()
    losses.subscribe(lambda number, reason: told.append((number, reason)))
    for reason in ("it was killed", "something else"):
        losses.publish(2, reason)
    assert told == [(2, "it was killed")] and 2 in losses and 1 not in losses and losses.reason(2) == "it was killed"
    # Another process asks for itself.
    assert len(pickle.loads(pickle.dumps(losses))) == 0


@pytest.mark.parametrize("error", [GONE(), CORE])
def test_an_engine_whose_actor_or_core_is_dead_is_replaced(killed: list[Any], error: Exception) -> None:
    losses, engines = EngineLosses(), [Handle(None), Handle(error)]
    losses.look(engines)
    losses.look(engines)
    assert isinstance(engines[1], LostEngine) and not isinstance(engines[0], LostEngine) and engines[0].calls == 2
    # So it is in every list of engines of this process.
    others: list[Any] = [Handle(None), Handle(None)]
    losses.look(others)
    assert isinstance(others[1], LostEngine) and others[1].reason == engines[1].reason and killed == []
    engines[0] = Handle(error)
    with pytest.raises(RuntimeError, match="all 2 engines are gone"):
        losses.look(engines)


def test_an_engine_that_cannot_be_reached_is_lost_only_after_a_while(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(engine_losses.time, "monotonic", lambda: now)
    losses, engines = EngineLosses(), [Handle(None), Handle(unreachable(), unreachable(), None, unreachable())]
    there = engines[1]
    # Its answer at the third question begins the time anew.
    for now in (0, UNREACHED_SECONDS - 1, UNREACHED_SECONDS + 1, UNREACHED_SECONDS + 2, 2 * UNREACHED_SECONDS):  # noqa: B007
        losses.look(engines, wait_s=0)
        assert len(losses) == 0
    now = 3 * UNREACHED_SECONDS
    losses.look(engines, wait_s=0)
    assert 1 in losses and killed == [there] and isinstance(engines[1], LostEngine)


def test_who_has_time_to_wait_is_told_what_became_of_an_engine_that_cannot_be_reached(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(engine_losses.time, "monotonic", lambda: now)
    monkeypatch.setattr(engine_losses.time, "sleep", sleep)
    losses, engines = EngineLosses(), [Handle(unreachable(), unreachable(), None), Handle(unreachable())]
    (lost,) = losses.look(engines)
    assert lost.number == 1 and engines[0].calls > 3 and len(killed) == 1 and now > UNREACHED_SECONDS


def test_a_broken_connection_is_no_death(killed: list[Any]) -> None:
    """Before, one broken connection gave an engine up for good, whose samples went on there and elsewhere."""

    async def main() -> None:
        broken = Handle(unreachable(), unreachable(), "node")
        assert await RayEngine(3, broken).call(EngineCalls.node_id) == "node" and broken.calls == 3 and killed == []
        away, clock = Handle(unreachable()), asyncio.get_running_loop().time
        began = clock()
        with pytest.raises(EngineLost, match="engine 3 could not be reached for 90 s, and was killed") as raised:
            await RayEngine(3, away).call(EngineCalls.node_id)
        assert raised.value.engine == 3 and killed == [away] and clock() - began >= UNREACHED_SECONDS

    virtual_time.run(main(), 100)


def test_a_call_that_is_never_answered_ends_with_its_engine() -> None:
    """A prompt waits for a turn whose engine waits for weights; vLLM answers nothing any more when its core is dead."""

    class Silent:
        async def call(self, *_: Any) -> Any:
            await asyncio.Event().wait()

    async def main() -> None:
        losses = EngineLosses()
        known = LivePort(1, Silent(), losses)
        waiting = [asyncio.create_task(known.call(TurnCalls.enter_turn, 2, 0, 1)) for _ in range(2)]
        await asyncio.sleep(1)
        waiting[0].cancel()
        losses.publish(1, "its core is dead")
        first, second = await asyncio.gather(*waiting, return_exceptions=True)
        # Who gave the call up himself is not told of a loss.
        assert isinstance(first, asyncio.CancelledError)
        assert isinstance(second, EngineLost) and second.engine == 1 and "its core is dead" in str(second)

    virtual_time.run(main(), 10)
