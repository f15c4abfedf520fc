"""What an engine does for samples that come from elsewhere: mixed into MovableEngine.

In a move that hands over, a sample is expected before its engine has stopped it. Its request waits in the engine core
(engine/scheduler_parts/moves.py), which goes on with it as soon as it is handed over. What it then makes is held back
from its keeper until `go_on` brings what the core does not have: the log-probabilities of what was generated elsewhere.
Invariants: nothing is told of an expected sample before that; a core that went on with other tokens than its keeper
knows counts as one that did not.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rhyme_openrlhf.engine.actor_parts.orders_lock import OrdersLock
from rhyme_openrlhf.engine.actor_parts.timeline import ELSEWHERE
from rhyme_openrlhf.engine.messages import Progress, Started
from rhyme_openrlhf.engine.patches.resumed_outputs import ResumedOutputs

# vLLM's frontend and engine core know of a request one after the other, both within a step.
KNOWN_SECONDS = 10.0
KNOWN_POLL_SECONDS = 0.001
# Only a record waits for it.
FIRST_TOKEN_POLL_SECONDS = 0.02


class ExpectingEngine:
    """The samples that are to come by a handover, and when those that came had their first token."""

    llm: Any
    _outputs: ResumedOutputs
    _here: Any
    # Expected samples by place, with vLLM's name of each.
    _expected: dict[str, str]

    async def expect(self, place: str) -> str:
        """Wait until the engine core expects a sample that has just begun here; "" or why it does not."""
        state = await self._when_known(place)
        limit = asyncio.get_running_loop().time() + KNOWN_SECONDS
        while state is not None and not await self.call_scheduler("expects", state.request_id):
            if asyncio.get_running_loop().time() > limit:
                raise TimeoutError(f"waited {KNOWN_SECONDS:g} s for the engine core to expect sample {place}")
            await asyncio.sleep(KNOWN_POLL_SECONDS)
            state = self._outputs.state(place)
        if state is None:
            return f"sample {place} was given up before it was expected"
        self._expected[place] = state.request_id
        return ""

    async def go_on(self, place: str, progress: Progress | None) -> Started | None:
        """What became of a sample that was expected here, and has come to `progress`; None: it is to be started.

        Then nothing is left of it here.
        """
        request_id = self._expected.pop(place, None)
        if request_id is None:
            return None
        gone_on = await self.call_scheduler("gone_on", request_id)
        refused = self._refuses(progress)
        if gone_on is None or refused or progress is None or gone_on[0] != len(progress.tokens):
            await self.discard_sample(place)
            return Started(refused) if refused else None
        ended_by_text = self._outputs.release(place, progress)
        if ended_by_text:
            await self.llm.engine_core.abort_requests_async(ended_by_text)
        return Started(not_carried=gone_on[1])

    async def first_token_at(self, place: str, wait_s: float) -> float | None:
        """When a sample that came here had its first token here, unix seconds; None if it has none after `wait_s`."""
        limit = asyncio.get_running_loop().time() + wait_s
        state = self._outputs.state(place)
        if state is None:
            return None
        while (at := await self.call_scheduler("take_first_token", state.request_id)) is None:
            if place not in self._here or asyncio.get_running_loop().time() > limit:
                return None
            await asyncio.sleep(FIRST_TOKEN_POLL_SECONDS)
        return float(at)

    # --- two layouts on the same devices

    async def stand_by(self) -> None:
        """From now on, while this engine runs nothing, its devices are another layout's."""
        self._rests = ELSEWHERE
        await self.lend_devices()

    async def lend_devices(self) -> None:
        """Its devices are another layout's until it generates again."""
        if not self._running:
            self._timeline.enter(ELSEWHERE, time.time(), self.weight_version)

    async def begin_switch(self) -> None:
        """Samples are on their way here from the other layout."""
        if not self._running:
            self._timeline.enter("switch", time.time(), self.weight_version)

    async def end_switch(self) -> None:
        """They are here, or will not come."""
        if not self._running:
            self._timeline.enter(self._rests, time.time(), self.weight_version)

    async def sleep_kv(self) -> None:
        """Give the KV cache's memory to another layout. Samples that are here wait, and are computed again after it."""
        async with self._orders.all():
            await self.llm.pause_generation(mode="keep", clear_cache=True)
            await self.llm.collective_rpc("rhyme_sleep_kv")

    async def wake_kv(self) -> None:
        """Have it again, and go on."""
        async with self._orders.all():
            await self.llm.collective_rpc("rhyme_wake_kv")
            await self.llm.resume_generation()

    # --- of MovableEngine

    weight_version: int
    _running: set[str]
    _orders: OrdersLock
    _rests: str
    _timeline: Any
    call_scheduler: Any
    discard_sample: Any
    _refuses: Any
    _when_known: Any
