"""How a keeper calls an engine: one method, so that an engine may be a Ray actor, an object of this process or a fake.

Invariant: an engine that is gone, or whose vLLM process is, is an EngineLost, however that shows.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol


class EngineLost(RuntimeError):
    """The engine is gone, and with it everything that was only there."""


class OrderFailed(RuntimeError):
    """The engine is well, but a call to it raised; the message says what."""


class EnginePort(Protocol):
    """One engine (MovableEngine's methods, by name)."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the method answers. Raises EngineLost, TimeoutError if the method does, and OrderFailed for the rest."""
        ...


async def problem_of(port: EnginePort, number: int, limit_s: float, method: str, *arguments: Any) -> str:
    """Have engine `number` do something within so many seconds: "" or why it is not done. One that is gone has nothing
    to do."""
    try:
        async with asyncio.timeout(limit_s):
            await port.call(method, *arguments)
    except EngineLost:
        return ""
    except TimeoutError:
        return f"{method} was not answered by engine {number} within {limit_s:g} s"
    except OrderFailed as error:
        return str(error)
    return ""


class RayEngine:
    """An engine in a Ray actor."""

    def __init__(self, number: int, handle: Any) -> None:
        self._number = number
        self._handle = handle

    async def call(self, method: str, *arguments: Any) -> Any:
        import ray
        from vllm.v1.engine.exceptions import EngineDeadError

        from rhyme_openrlhf.engine.actor import EngineCoreError

        try:
            return await getattr(self._handle, method).remote(*arguments)
        except (ray.exceptions.RayActorError, EngineCoreError, EngineDeadError) as error:
            # An error of a task is raised as one of its cause's class, too.
            raise EngineLost(f"engine {self._number} is gone: {last_line(error)}") from error
        except TimeoutError:
            raise
        except ray.exceptions.RayError as error:
            raise OrderFailed(f"engine {self._number} failed to {method}: {last_line(error)}") from error


def last_line(error: Exception) -> str:
    """The last line of an error's message: of a remote one, what was raised."""
    return (str(error).strip().splitlines() or ["no message"])[-1].strip()
