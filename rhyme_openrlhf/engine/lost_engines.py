"""A run that outlives an engine: what stands in the lists of its engines once one is gone.

With samples at home (moves/) an engine takes nothing with it but its share of the speed: its samples go on
elsewhere. Everything else that calls all engines (weights, reports, sleep) calls a `LostEngine` in its place, so that
engines keep their numbers.

Invariants: an engine is left out only if its actor or its vLLM process is gone, never because it is slow; a run without
an engine ends, and says so. An engine that dies within a weight sync or a check still ends the run: what it had loaded
is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ray

from rhyme_openrlhf.telemetry.services import Layouts

# Engines answer between two decode steps; one that does not is not lost.
ALIVE_SECONDS = 10.0


class LostEngine:
    """Answers None to everything it is asked. `number`: of the engine; `reason`: one sentence."""

    def __init__(self, number: int, reason: str) -> None:
        self.number = number
        self.reason = reason

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *args, **kwargs: ray.put(None))


def leave_out_lost(engines: list[Any]) -> list[LostEngine]:
    """Replace the engines that are gone, in place; returns those that were replaced now.

    Raises RuntimeError if none is left.
    """
    asked = {number: engines[number].alive.remote() for number in engines_left(engines)}
    answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ALIVE_SECONDS) if asked else ([], [])
    found = []
    for number, question in asked.items():
        if question not in answered:
            continue
        try:
            ray.get(question)
        except ray.exceptions.ActorUnavailableError:
            # Not reached just now: it may well be there.
            continue
        except ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or ["no message"])[-1].strip()
            found.append(LostEngine(number, reason))
            engines[number] = found[-1]
    if engines and not engines_left(engines):
        raise RuntimeError(f"all {len(engines)} engines are gone: {'; '.join(engine.reason for engine in engines)}")
    return found


def prompt_engines_left(engines: Sequence[Any], layouts: Layouts | None) -> list[int]:
    """Of `engines_left` those that prompts go to: none of a tail layout."""
    left = engines_left(engines)
    return left if layouts is None else layouts.aligned(left)


def engines_left(engines: Sequence[Any]) -> list[int]:
    """The numbers of the engines that were not replaced."""
    return [number for number, engine in enumerate(engines) if not isinstance(engine, LostEngine)]
