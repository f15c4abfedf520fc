"""The fronts of a home, as the home sees them: one on each node that has engines.

A prompt goes to the front on the node of its first engine. When a front dies, its prompts go to another one: the home
gives up what they had at engines and sends them again, from their beginning. So a lost node ends no run that could go
on. A front that cannot be reached is not dead; it counts as dead after UNREACHED_SECONDS. When none is left the run
ends, with a sentence that says what ended the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.engine_errors import last_line
from rhyme_openrlhf.moves.front import HomeUnreached

# How long a front may not be reached in succession, and how long a prompt waits until it is sent again.
UNREACHED_SECONDS = 30.0
AGAIN_SECONDS = 1.0


class FrontLost(RuntimeError):
    """A front did not answer a prompt because it is gone (`dead`), or was not reached."""

    def __init__(self, sentence: str, dead: bool) -> None:
        super().__init__(sentence)
        self.dead = dead


class NoFrontError(RuntimeError):
    """No front is left; the message says why, and what to do."""


class FrontPort(Protocol):
    """One front, wherever it is: an actor, or an object of this process."""

    async def ready(self) -> None:
        """Answer once it has started."""

    async def generate_responses(self, call: int, engine: int, **arguments: Any) -> list[Any]:
        """Return the responses to a prompt (front.py), each perhaps `Packed`. Raises FrontLost, and what they raise."""


class Fronts:
    """The fronts of a home, by node. `start(node)` makes one; `warn(sentence)` tells the user of a loss."""

    def __init__(self, start: Callable[[str], FrontPort], warn: Callable[[str], None]) -> None:
        self._start = start
        self._warn = warn
        self._of: dict[str, FrontPort] = {}
        # Of a front that is not reached, by node: since when, and when last.
        self._unreached: dict[str, tuple[float, float]] = {}
        self._ready: set[str] = set()
        self._last_loss = ""

    async def open(self, nodes: Collection[str]) -> None:
        """Have a front on each of these nodes, and wait until they have started. Raises what ended one before.

        One that dies later is found by its first prompt, which another one then answers.
        """
        for node in sorted(set(nodes)):
            if node not in self._of:
                self._of[node] = self._start(node)
        await asyncio.gather(*(front.ready() for node, front in self._of.items() if node not in self._ready))
        self._ready.update(self._of)

    async def generate_responses(self, node: str, call: int, engine: int, **arguments: Any) -> list[Any]:
        """Return the responses to a prompt by the front on `node`, or another if there is none.

        Raises FrontLost when the prompt is to be sent again, NoFrontError when there is no front to send it to, and
        what the prompt's samples raise.
        """
        if not self._of:
            raise NoFrontError(
                "the run has lost the last process that runs its agent and rewards: "
                f"{self._last_loss}. If the agent or a reward function ends its process, or needs more memory than "
                "there is, mend that and resume with --ckpt.load_enable"
            )
        at = node if node in self._of else min(self._of)
        try:
            responses = await self._of[at].generate_responses(call, engine, **arguments)
        except FrontLost as lost:
            await self._failed(at, lost)
            raise
        self._unreached.pop(at, None)
        return responses

    async def _failed(self, node: str, lost: FrontLost) -> None:
        now = asyncio.get_running_loop().time()
        since, last = self._unreached.get(node, (now, now))
        if now - last > UNREACHED_SECONDS:
            # Its prompts have run since: this is another time.
            since = now
        self._unreached[node] = since, now
        if not lost.dead and now - since < UNREACHED_SECONDS:
            await asyncio.sleep(AGAIN_SECONDS)
            return
        # All of its prompts come here.
        if self._of.pop(node, None) is None:
            return
        self._last_loss = str(lost)
        if self._of:
            self._warn(f"{lost}; its prompts are generated again, their rewards and agents run on other nodes")


class RayFront:
    """A front in a Ray actor."""

    def __init__(self, node: str, actor: Any, *arguments: Any) -> None:
        # Not counted: it waits for engines and reward functions.
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        self._node = node
        self._handle = actor.options(scheduling_strategy=where).remote(*arguments)

    async def ready(self) -> None:
        """Answer once it has started."""
        await self._handle.ready.remote()

    async def generate_responses(self, call: int, engine: int, **arguments: Any) -> list[Any]:
        """Return the responses to a prompt, packed. Raises FrontLost, and what they raise."""
        try:
            responses: list[Any] = await self._handle.packed_responses.remote(call, engine, **arguments)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, HomeUnreached):
                raise FrontLost(str(error.cause), dead=False) from error
            # As if it had been raised here: callers read its class and its last line.
            raise error.cause from None
        except ray.exceptions.RayError as error:
            front = f"the front of samples on node {self._node}"
            if isinstance(error, ray.exceptions.ActorUnavailableError):
                raise FrontLost(f"{front} was not reached: {last_line(error)}", dead=False) from error
            # Ray's words are guesses in several sentences; the supervisor records the cause.
            raise FrontLost(f"{front} died", dead=True) from error
        return responses
