"""An engine's rehearsals: while it has nothing to run, it generates samples of the prompts that it gets next.

Which prompts come next, the samples generator tells (`expect_prompts`), or in the streaming pipeline the calls that
wait for their turn here (`expect`). `scheduling/rehearsal.py` decides when to rehearse which of them.
`scheduler_parts/rehearsal.py` keeps the texts and ends rehearsals in the engine core.

Invariants:
- Rehearsals change nothing of a run but its drafts. They have no seed, no reward, and no place in counters or history.
  A cache salt of their own keeps their KV blocks from real requests.
- Real requests wait for no rehearsal. A weight load waits until the engine core has ended them: a decode step at most.
- An engine that rehearses has a bubble all the same: its timeline has the state "rehearse", with the cause for which
  it would be idle.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.utils import random_uuid
from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine import requests
from rhyme_openrlhf.engine.actor_parts.part import Engine, Part
from rhyme_openrlhf.engine.actor_parts.timeline import IDLE, REHEARSE
from rhyme_openrlhf.engine.calls import SchedulerRehearsal
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.scheduling.rehearsal import to_rehearse


@dataclass(frozen=True)
class Coming:
    """A prompt that is to come, and how its real samples are generated."""

    prompt: str
    sampling_params: Any
    max_length: int
    hf_tokenizer: Any


class Rehearsal(Part):
    """The rehearsals of one engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._coming: dict[str, Coming] = {}
        # Prompts that were expected before those, and may have texts here.
        self._earlier: set[str] = set()
        self._begun: Counter[str] = Counter()
        self._under_way: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None

    # --- which prompts come next

    async def expect_prompts(
        self, prompts: list[str], sampling_params: Any, max_length: int, hf_tokenizer: Any
    ) -> None:
        """Rehearse these prompts from now on, and no others."""
        coming = {prompt_key(prompt): Coming(prompt, sampling_params, max_length, hf_tokenizer) for prompt in prompts}
        # Not the prompts that were expected last: their real samples may be on their way.
        outdated = self._earlier - coming.keys() - self._coming.keys()
        self._earlier, self._coming = set(self._coming), coming
        self._begun = Counter({key: self._begun[key] for key in coming})
        if outdated:
            await self.engine.scheduler(SchedulerRehearsal.forget_rehearsed, sorted(outdated))
        self._look()

    def expect(self, prompt: str, sampling_params: Any, max_length: int, hf_tokenizer: Any) -> None:
        """Rehearse this prompt too, whose call waits for its turn."""
        self._coming[prompt_key(prompt)] = Coming(prompt, sampling_params, max_length, hf_tokenizer)
        self._look()

    # --- when

    def sample_started(self, request_id: str) -> None:
        """End the rehearsals: here comes a real sample, whose prompt is to come no more."""
        identity = requests.current_sample.get()
        if identity is not None:
            key = prompt_key(identity.prompt)
            self._coming.pop(key, None)
            self._begun.pop(key, None)
        self._end()

    def sample_ended(self, request_id: str) -> None:
        """Rehearse if that was the last real sample."""
        # The engine takes the sample off its list when this returns.
        asyncio.get_running_loop().call_soon(self._look)

    def uncounted(self) -> int:
        """Return how many rehearsals run."""
        return len(self._under_way)

    async def closes(self) -> None:
        """End the rehearsals, in the engine core too, because weights are about to load."""
        self._end()
        await self.engine.scheduler(SchedulerRehearsal.end_rehearsals)

    def _look(self) -> None:
        if self._starting is not None or type(self.engine.executor) is not CheckedExecutor:
            return
        found = self._to_rehearse()
        if found:
            self._starting = asyncio.create_task(self._start(found))
        elif not self._under_way:
            self._rest()

    def _to_rehearse(self) -> list[str]:
        most = self.engine.llm.vllm_config.scheduler_config.max_num_seqs
        real, under_way = len(self.engine.running), len(self._under_way)
        return to_rehearse(list(self._coming), self._begun, under_way, most, real, self.engine.is_open)

    async def _start(self, prompts: list[str]) -> None:
        """Start one rehearsal after the other, and let everything else that waits run in between."""
        self.engine.rests = REHEARSE
        self.engine.timeline.enter(REHEARSE, time.time(), self.engine.weight_version)
        for key in prompts:
            coming = self._coming.get(key)
            if coming is not None:
                self._begun[key] += 1
                task = asyncio.create_task(self._rehearse(key, coming))
                self._under_way.add(task)
                task.add_done_callback(self._over)
            await asyncio.sleep(0)
        self._starting = None
        # The first ones may be over.
        self._look()

    async def _rehearse(self, key: str, coming: Coming) -> None:
        prompt, parameters = requests.rehearsal(
            key, coming.prompt, coming.sampling_params, coming.max_length, coming.hf_tokenizer,
            self.engine.weight_version,
        )  # fmt: skip
        try:
            await requests.generate(self.engine.llm, prompt, parameters, random_uuid())
        except EngineDeadError:
            # The next real request fails with the reason.
            return

    def _over(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._look()

    def _end(self) -> None:
        """End the rehearsals here; vLLM aborts the request of a task that is cancelled."""
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        for task in self._under_way:
            task.remove_done_callback(self._over)
            task.cancel()
        self._under_way = set()
        self._rest()

    def _rest(self) -> None:
        self.engine.rests = IDLE
        if self.engine.timeline.state == REHEARSE:
            self.engine.timeline.enter(IDLE, time.time(), self.engine.weight_version)
