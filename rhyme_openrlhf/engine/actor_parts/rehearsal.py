"""An engine's rehearsals: while it has nothing to run, it generates samples of the prompts that it gets next.

Which prompts come next, the samples generator says (`expect_prompts`); in the streaming pipeline they are the calls
that wait for their turn here (`expect`). Those with a history are left out. `scheduling/rehearsal.py` decides when to
rehearse which prompts. `scheduler_parts/rehearsal.py` ends rehearsals in the engine core.

Invariants:
- Rehearsals change nothing of a run but its drafts. They have no seed, no reward, and no place in counters or history.
  A cache salt of their own keeps their KV blocks from real requests.
- Real requests and weight loads wait for the engine core's decode step under way, and for nothing else: the core ends
  rehearsals between two decode steps. vLLM's frontend hears of it afterwards, in one message for all.
- No task that may be in the middle of handing a request to vLLM is cancelled: vLLM would keep that request for ever.
- An engine that rehearses has a bubble all the same. Its timeline has the state "rehearse", with the cause for which it
  would be idle.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from vllm.utils import random_uuid
from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine import requests
from rhyme_openrlhf.engine.actor_parts.part import Engine, Part
from rhyme_openrlhf.engine.actor_parts.timeline import IDLE, REHEARSE
from rhyme_openrlhf.engine.calls import SchedulerRehearsal
from rhyme_openrlhf.engine_errors import first_line
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.scheduling.rehearsal import SAMPLES_EACH, to_rehearse

# An engine that has nothing to run for less than this is between two requests, turns or weights. A rehearsal that
# begins there would only make the next request wait for a decode step.
SETTLE_S = 0.05
# A request that vLLM's frontend did not know yet when it was aborted is aborted again after this.
ABORT_AGAIN_S = 0.05


class Rehearsal(Part):
    """The rehearsals of one engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        # How the samples of the last call were generated, and of each prompt that is to come.
        self._last: requests.Sampling | None = None
        self._coming: dict[str, tuple[str, requests.Sampling]] = {}
        # Prompts that were expected before those, and may have texts here.
        self._earlier: set[str] = set()
        self._begun: Counter[str] = Counter()
        # By request: the rehearsals that run, and those that are being ended.
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None

    # --- which prompts come next

    def asked(self, how: requests.Sampling) -> None:
        """Note how real samples are generated."""
        self._last = how

    async def expect_prompts(self, prompts: list[str]) -> None:
        """Rehearse these prompts from now on, and no others, as the samples of the last call are generated."""
        how = self._last
        coming = {prompt_key(prompt): (prompt, how) for prompt in prompts} if how is not None else {}
        # Not the prompts that were expected last: their real samples may be on their way.
        outdated = self._earlier - coming.keys() - self._coming.keys()
        self._earlier, self._coming = set(self._coming), coming
        self._begun = Counter({key: self._begun[key] for key in coming if key in self._begun})
        if outdated:
            await self.engine.scheduler(SchedulerRehearsal.forget_rehearsed, sorted(outdated))
        self._soon()

    def expect(self, prompt: str, how: requests.Sampling) -> None:
        """Rehearse this prompt, too, whose call waits for its turn."""
        self._coming[prompt_key(prompt)] = (prompt, how)
        self._soon()

    # --- when

    def sample_started(self, request_id: str) -> None:
        """End the rehearsals, because a real sample starts; its prompt is to come no more."""
        identity = requests.current_sample.get()
        if identity is not None:
            key = prompt_key(identity.prompt)
            self._coming.pop(key, None)
            self._begun.pop(key, None)
        self._end()

    def sample_ended(self, request_id: str) -> None:
        """Rehearse soon if that was the last real sample."""
        self._soon()

    def uncounted(self) -> int:
        """Return how many rehearsals vLLM has."""
        return len(self._running) + len(self._ending)

    async def closes(self) -> None:
        """End the rehearsals, in the engine core too, because weights are about to load."""
        self._end()
        if self._ending:
            await self.engine.scheduler(SchedulerRehearsal.end_rehearsals)

    def _soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._look)

    def _look(self) -> None:
        if self._starting is not None:
            return
        found = self._to_rehearse()
        if found:
            self._starting = asyncio.create_task(self._start(found))
        elif not self._running:
            self._rest()

    def _to_rehearse(self) -> list[str]:
        most = self.engine.llm.vllm_config.scheduler_config.max_num_seqs
        under_way, real = self.uncounted(), len(self.engine.running)
        return to_rehearse(list(self._coming), self._begun, under_way, most, real, self.engine.is_open)

    async def _start(self, prompts: Sequence[str]) -> None:
        """Start one rehearsal after the other, and let everything else that waits run in between."""
        new = [key for key in dict.fromkeys(prompts) if key not in self._begun]
        for key in await self.engine.histories.feed.answered(new):
            # Its history drafts as well.
            self._begun[key] = SAMPLES_EACH
        for key in prompts:
            if key in self._coming and self._begun[key] < SAMPLES_EACH:
                self._begun[key] += 1
                self._start_one(key)
            await asyncio.sleep(0)
        self._starting = None
        # The first ones may be over, or there was none.
        self._look()

    def _start_one(self, key: str) -> None:
        if not self._running:
            self.engine.rests = REHEARSE
            self.engine.timeline.enter(REHEARSE, time.time(), self.engine.weight_version)
        request_id = random_uuid()
        task = asyncio.create_task(self._rehearse(request_id, key, *self._coming[key]))
        self._running[request_id] = task
        task.add_done_callback(lambda done: self._over(request_id, done))

    async def _rehearse(self, request_id: str, key: str, prompt: str, how: requests.Sampling) -> None:
        tokens, parameters = requests.rehearsal(key, prompt, how, self.engine.weight_version)
        async for _ in self.engine.llm.generate(tokens, parameters, request_id=request_id):
            pass

    def _over(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._ending.pop(request_id, None)
        ended = self._running.pop(request_id, None) is not None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._coming.clear()
            # An engine whose core died says so to the next real request.
            if not isinstance(error, EngineDeadError):
                self.engine.histories.feed.note(f"engine {self.engine.index} stops rehearsing: {first_line(error)}")
        if ended:
            self._look()

    def _end(self) -> None:
        """End the rehearsals for this process, and have vLLM abort them."""
        if self._timer is not None:
            self._timer.cancel()
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        if self._running:
            self._ending |= self._running
            self._running = {}
            abort = asyncio.create_task(self._abort(dict(self._ending)))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
        self._rest()

    async def _abort(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        while left := [name for name, task in tasks.items() if not task.done()]:
            try:
                await self.engine.llm.abort(left)
            except EngineDeadError:
                return
            await asyncio.wait([tasks[name] for name in left], timeout=ABORT_AGAIN_S)

    def _rest(self) -> None:
        self.engine.rests = IDLE
        if self.engine.timeline.state == REHEARSE:
            self.engine.timeline.enter(IDLE, time.time(), self.engine.weight_version)
