"""Errors of failing engines, and the stand-in for an engine that is gone.

A run may outlive an engine. With samples at home (moves/) the samples go on elsewhere, and the streaming pipeline has
prompt groups generated again. Calls to all engines (weights, reports, sleep) then reach a `LostEngine` in place of the
one that is gone, so that engines keep their numbers.

Invariants:
- An engine is left out only if its actor or its vLLM process is gone, never because it is slow.
- A run without an engine ends, and says so.
- An engine that dies within a weight sync is left out, too: what it has loaded matters to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

# Engines answer between two decode steps; one that does not is not lost.
ALIVE_SECONDS = 10.0
# Ray takes up to half a minute to find that a node is gone. Until then its actors are only out of reach.
GONE_SECONDS = 90.0
ASK_AGAIN_SECONDS = 0.5


class EngineCoreError(RuntimeError):
    """The vLLM process behind an engine is gone."""


class WeightLoadError(RuntimeError):
    """An engine was told to load weights at a moment when it must not, or could not load them."""


class RefusedParameterError(ValueError):
    """A request asks for sampling parameters that an engine with drafts cannot apply."""


class EngineLost(RuntimeError):
    """The engine is gone, and with it everything that was only there."""


class OrderFailed(RuntimeError):
    """The engine is well, but a call to it raised; the message says what."""


class EngineCallError(RuntimeError):
    """The engine failed, or did not answer in time; the message says what was waited for."""


class LostEngine:
    """Answers None to everything it is asked. `number`: of the engine; `reason`: one sentence."""

    def __init__(self, number: int, reason: str) -> None:
        self.number = number
        self.reason = reason

    @property
    def sentence(self) -> str:
        """Return the sentence that the record and the terminal have of it."""
        return f"the run goes on without engine {self.number}, and its samples at the others: {self.reason}"

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        import ray

        return SimpleNamespace(remote=lambda *args, **kwargs: ray.put(None))


def leave_out_lost(engines: list[Any]) -> list[LostEngine]:
    """Replace the engines that are gone, in place; return those that were replaced now.

    An engine that is out of reach is asked again until it answers or Ray finds it gone, for GONE_SECONDS at most.
    Raises RuntimeError if none is left.
    """
    import ray

    found: list[LostEngine] = []
    ask, until = engines_left(engines), time.monotonic() + GONE_SECONDS
    while ask:
        asked = {number: engines[number].alive.remote() for number in ask}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ALIVE_SECONDS)
        ask = []
        for number, question in asked.items():
            if question not in answered:
                continue
            try:
                ray.get(question)
            except ray.exceptions.ActorUnavailableError:
                ask.append(number)
            except ray.exceptions.RayError as error:
                engines[number] = LostEngine(number, last_line(error))
                found.append(engines[number])
        if time.monotonic() > until:
            break
        if ask:
            time.sleep(ASK_AGAIN_SECONDS)
    if engines and not engines_left(engines):
        raise RuntimeError(f"all {len(engines)} engines are gone: {'; '.join(engine.reason for engine in engines)}")
    return found


def engines_left(engines: Sequence[Any]) -> list[int]:
    """Return the numbers of the engines that were not replaced."""
    return [number for number, engine in enumerate(engines) if not isinstance(engine, LostEngine)]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message: what is wrong, of one that goes on with details."""
    return _lines(error)[0].strip()


def last_line(error: Exception) -> str:
    """Return the last line of an error's message: of a remote one, what was raised."""
    return _lines(error)[-1].strip()


def _lines(error: Exception) -> list[str]:
    return str(error).strip().splitlines() or ["no message"]
