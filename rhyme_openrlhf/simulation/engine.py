"""One simulated engine, and a sample on its way: continuous batching, a bounded KV cache, preemption, speculation.

Between two changes (a sample ends, the KV cache is full, a prefill is done) every decode step is alike but for the
context, so the engine goes from change to change, not from step to step.

What it is like, and what it leaves out: prompts are computed in chunks of `step_tokens` beside the running samples'
steps, and the time of a prefill is spread over its chunks; the samples of a prompt that come in together share one
prefill, as a prefix cache makes them. The KV cache is counted in tokens, not in blocks, and a shared prompt is counted
for each of its samples. If it is full, the sample that came last is preempted, waits in front of the others, and is
computed again. Speculation enters as what it gives in the mean: tokens and draft tokens per step.

Invariants: a job is waiting, in prefill, running, or gone; every token of a response is generated once; what a job has
generated never falls, and never exceeds its length; time never goes back; at least one sample makes progress, or
KvCacheTooSmall is raised.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rhyme_openrlhf.simulation.engine_kinds import EngineKind


@dataclass(slots=True)
class Job:
    """A sample on its way. `length`: tokens its response will have; `generated`: so far.

    `tokens_per_step`, `drafts_per_step`: what speculation gives it with a full window. `later`: from which token of the
    response on it gives something else, ascending; (token, tokens per step, drafts per step) each.
    """

    sample: int
    prompt: int
    prompt_tokens: int
    length: int
    tokens_per_step: float = 1.0
    drafts_per_step: float = 0.0
    generated: float = 0.0
    later: tuple[tuple[float, float, float], ...] = ()
    # A sample that is moved or was preempted is computed again with all its tokens; one that is sent is not.
    computed: bool = False

    @property
    def context(self) -> float:
        return self.prompt_tokens + self.generated

    @property
    def pause(self) -> float:
        """The token with which its end, or another pace, comes."""
        return self.later[0][0] if self.later else float(self.length)

    def next_pace(self) -> bool:
        """Go on as it does behind its pause; False: there is nothing behind it."""
        if not self.later or self.generated >= self.length:
            return False
        (_, self.tokens_per_step, self.drafts_per_step), *rest = self.later
        self.later = tuple(rest)
        return True


# A sample's end in nominal steps is a quotient: what is this much short of it has ended.
_ROUNDING = 1e-6


class KvCacheTooSmall(ValueError):
    """One sample alone does not fit into the engine's KV cache."""


@dataclass(slots=True)
class _Running:
    job: Job
    begin: float
    came: int
    had: float  # tokens generated when it began here
    rate: float  # the job's tokens per step and length, which are asked for together with these
    length: int


@dataclass
class _Prefill:
    jobs: list[Job]
    chunks: int
    seconds_each: float


class Pace(NamedTuple):
    """How a step of so many samples goes on: draft tokens in all, and the part of a full window's gain it yields."""

    drafts: int
    part: float


# Of a step with that many samples, tokens of context, and draft tokens of full windows.
PaceOf = Callable[[int, float, float], Pace]
# Of a step that only computes prompts.
_NO_SAMPLES = Pace(0, 1.0)


@dataclass
class Counts:
    """What an engine did: tokens generated, decode steps, the same times their samples, draft tokens, preemptions,
    seconds with something to run."""

    tokens: float = 0.0
    steps: int = 0
    sample_steps: int = 0
    drafts: float = 0.0
    preemptions: int = 0
    busy_seconds: float = 0.0


@dataclass
class Engine:
    """`pace`: what speculation gives by now, for steps from the next change on. `load`: samples here.

    `slowness`: how many times as long as its kind's its steps take; changed by `slow_down` only.
    """

    kind: EngineKind
    pace: PaceOf
    now: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: dict[int, _Running] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    slowness: float = 1.0
    load: int = 0

    def __post_init__(self) -> None:
        self._ends: list[tuple[float, int, int]] = []
        self._place = 0.0  # nominal steps done since the engine began
        self._context = 0.0
        self._growth = 0.0
        self._drafts = 0.0
        self._came = 0
        self._prefill: _Prefill | None = None
        self._plan: tuple[int, float, Pace] | None = None
        self._planned_by: PaceOf | None = None

    # What others ask

    @property
    def idle(self) -> bool:
        return not self.load

    @property
    def free_tokens(self) -> int:
        """Tokens of KV cache that nobody has; what waits has none."""
        taken = self._context + (sum(job.context for job in self._prefill.jobs) if self._prefill else 0)
        return int(self.kind.kv_tokens - taken)

    def prompts_at_work(self) -> list[tuple[int, int, float]]:
        """Of the running samples: prompt, its tokens, and the tokens that each has generated by now."""
        place = self._place
        return [
            (item.job.prompt, item.job.prompt_tokens, t if t < item.length else item.length)
            for item in self.running.values()
            for t in (item.had + (place - item.begin) * item.rate,)
        ]

    def near(self, time: float) -> tuple[int, float]:
        """Decode steps done by then and tokens of context of what runs; as if all steps up to a change took alike."""
        if self.next_change() == math.inf or not self.running:
            return self.counts.steps, self._context
        assert self._plan is not None
        steps, seconds, pace = self._plan
        done = steps * min(max(time - self.now, 0.0) / seconds, 1.0) if seconds else 0.0
        return self.counts.steps + int(done), self._context + done * pace.part * self._growth

    def prompts_running(self) -> list[tuple[int, int]]:
        """Sample and prompt of those that run."""
        return [(sample, item.job.prompt) for sample, item in self.running.items()]

    def generated(self, sample: int) -> float:
        """Tokens that a running sample has generated by now."""
        return self._generated(self.running[sample])

    def contexts_at(self, time: float) -> list[tuple[int, float, int]]:
        """Of the running samples by the end of the step that goes on at `time`, which must not lie behind the next
        change: whole tokens of context, draft tokens accepted per step, and which one it is."""
        place = self._place
        if time > self.now and self.next_change() < math.inf:
            assert self._plan is not None
            steps, _, pace = self._plan
            extra = self._prefill.seconds_each if self._prefill else 0.0
            place += self._steps_until(steps, pace, extra, time - self.now) * pace.part
        # As `_generated`, here and in `prompts_at_work`: of all of them often, where a call for each would take longer.
        return [
            (round(item.job.prompt_tokens + (t if t < item.length else item.length)), item.rate - 1, sample)
            for sample, item in self.running.items()
            for t in (item.had + (place - item.begin) * item.rate,)
        ]

    def speculation(self) -> tuple[float, float]:
        """Tokens and draft tokens of a sample's decode step, in the mean of those that run now; (1, 0) if none does."""
        count = len(self.running)
        if not count:
            return 1.0, 0.0
        # Asked of all engines at each look: what is planned by the pace of now was planned for what runs now.
        planned = self._plan if self._planned_by is self.pace else None
        pace = planned[2] if planned else self.pace(count, self._context, self._drafts)
        return self._growth * pace.part / count, pace.drafts / count

    def jobs_waiting(self) -> list[Job]:
        """Those without a step so far: in prefill, or before it."""
        return [*(self._prefill.jobs if self._prefill else ()), *self.waiting]

    def next_change(self) -> float:
        """When something changes; infinity if there is nothing to run. Begins what can begin."""
        if self._plan is None:
            if self.waiting and not self._prefill:
                self._admit()
            self._plan = self._planned()
        return self.now + self._plan[1] if self._plan[0] else math.inf

    # What happens

    def give(self, jobs: list[Job], now: float) -> None:
        """New samples at `now`, which must not lie before a step that is going on; those computed elsewhere run on."""
        if self.idle:
            self.now = max(self.now, now)
        self.load += len(jobs)
        for job in jobs:
            if job.computed:
                self._run(job)
            else:
                self.waiting.append(job)
        self._plan = None

    def become(self, kind: EngineKind) -> None:
        """Go on with the step times of `kind`; its place between two steps does not change."""
        self.kind = kind
        self._plan = None

    def slow_down(self, slowness: float) -> None:
        """Steps from now on take so many times as long as the kind's."""
        self.slowness = slowness
        self._plan = None

    def take(self, samples: set[int]) -> list[Job]:
        """Give up these running samples, in the order in which they came."""
        taken = []
        for sample in sorted(samples, key=lambda s: self.running[s].came):
            item = self.running[sample]
            item.job.generated = self._generated(item)
            self._stop(item)
            taken.append(item.job)
        self.load -= len(taken)
        self._plan = None
        return taken

    def take_all(self) -> list[Job]:
        """Give up everything: running samples first, then what was not computed yet."""
        found = self.take(set(self.running))
        if self._prefill:
            found += self._prefill.jobs
            self._prefill = None
        found += self.waiting
        self.waiting.clear()
        self.load = 0
        return found

    def run_until(self, time: float) -> list[Job]:
        """Go on to the end of the step that is going on at `time`, at most to the next change; the jobs that ended."""
        if self.idle:
            self.now = max(self.now, time)
        if time <= self.now or self.next_change() == math.inf:
            return []
        assert self._plan is not None
        steps, _, pace = self._plan
        extra = self._prefill.seconds_each if self._prefill else 0.0
        count = self._steps_until(steps, pace, extra, time - self.now)
        if count == steps:
            return self.change()
        self._go(count, pace, self._seconds(count, pace, extra))
        return []

    def change(self) -> list[Job]:
        """Go to the next change; the jobs that ended there."""
        if self.next_change() == math.inf:
            return []
        assert self._plan is not None
        steps, seconds, pace = self._plan
        self._go(steps, pace, seconds)
        if self._prefill and not self._prefill.chunks:
            jobs, self._prefill = self._prefill.jobs, None
            for job in jobs:
                self._run(job)
        ended = []
        while self._ends and self._ends[0][0] <= self._place + _ROUNDING:
            _, came, sample = heapq.heappop(self._ends)
            item = self.running.get(sample)
            if item is None or item.came != came:
                continue
            item.job.generated = self._generated(item) if item.job.later else item.job.length
            self._stop(item)
            if item.job.next_pace():
                self._run(item.job, item.came)
            else:
                item.job.generated = item.job.length
                ended.append(item.job)
        self.load -= len(ended)
        if not self.running and not self._prefill:
            self._context = self._growth = self._drafts = 0.0
        return ended

    # How

    def _generated(self, item: _Running) -> float:
        job = item.job
        generated = item.had + (self._place - item.begin) * job.tokens_per_step
        return generated if generated < job.length else float(job.length)

    def _run(self, job: Job, came: int = 0) -> None:
        """It runs from now on; `came`: if it did before, as which one."""
        job.computed = True
        if not came:
            came = self._came = self._came + 1
        self.running[job.sample] = _Running(job, self._place, came, job.generated, job.tokens_per_step, job.length)
        steps = max(math.ceil((job.pause - job.generated) / job.tokens_per_step - _ROUNDING), 0)
        heapq.heappush(self._ends, (self._place + steps, came, job.sample))
        self._context += job.context
        self._growth += job.tokens_per_step
        self._drafts += job.drafts_per_step

    def _stop(self, item: _Running) -> None:
        del self.running[item.job.sample]
        # What it added to the context, the last step's rounding included.
        added = (self._place - item.begin) * item.job.tokens_per_step
        self._context -= item.job.prompt_tokens + item.had + added
        self._growth -= item.job.tokens_per_step
        self._drafts -= item.job.drafts_per_step
        self.counts.tokens += item.job.generated - item.had

    def _admit(self) -> None:
        """Begin the prefill of those that wait, as many as there is room for."""
        jobs: list[Job] = []
        free = self.kind.kv_tokens - self._context
        # Room for one step of everybody, else what comes in is preempted at once.
        margin = self._growth
        while self.waiting and len(self.running) + len(jobs) < self.kind.most_running:
            job = self.waiting[0]
            margin += job.tokens_per_step
            if job.context + margin > free:
                break
            free -= job.context
            jobs.append(self.waiting.popleft())
        if not jobs:
            if not self.running:
                raise KvCacheTooSmall(
                    f"a sample of {self.waiting[0].context:.0f} tokens does not fit into a KV cache of "
                    f"{self.kind.kv_tokens} tokens"
                )
            return
        lengths = [round(job.context) for job in jobs if job.generated]
        # The samples of one prompt that come in together share its prefill.
        lengths += list({job.prompt: job.prompt_tokens for job in jobs if not job.generated}.values())
        chunks = max(1, math.ceil(sum(lengths) / self.kind.step_tokens))
        self._prefill = _Prefill(jobs, chunks, self.kind.prefill_seconds(lengths) / chunks)

    def _planned(self) -> tuple[int, float, Pace]:
        """Steps to the next change, their seconds, and their pace; no steps: nothing to run."""
        running, ends = self.running, self._ends
        if not running and not self._prefill:
            return 0, 0.0, _NO_SAMPLES
        while running and self._context + self._growth > self.kind.kv_tokens:
            self._preempt()
        steps, pace = self._prefill.chunks if self._prefill else 1 << 62, _NO_SAMPLES
        if running:
            pace, self._planned_by = self.pace(len(running), self._context, self._drafts), self.pace
            while (item := running.get(ends[0][2])) is None or item.came != ends[0][1]:
                heapq.heappop(ends)
            room = (self.kind.kv_tokens - self._context) / (self._growth * pace.part)
            until = math.ceil((ends[0][0] - self._place) / pace.part - _ROUNDING)
            steps = min(steps, max(1, until), max(1, math.floor(room)))
        extra = self._prefill.seconds_each if self._prefill else 0.0
        return steps, self._seconds(steps, pace, extra), pace

    def _preempt(self) -> None:
        if len(self.running) == 1:
            raise KvCacheTooSmall(
                f"a sample of {self._context:.0f} tokens outgrows a KV cache of {self.kind.kv_tokens} tokens"
            )
        item = max(self.running.values(), key=lambda r: r.came)
        (job,) = self.take({item.job.sample})
        job.computed = False
        self.waiting.appendleft(job)
        self.load += 1
        self.counts.preemptions += 1

    def _seconds(self, steps: int, pace: Pace, extra: float) -> float:
        seconds = steps * extra
        if self.running:
            growth = self._growth * pace.part
            seconds += self.kind.times.total(len(self.running), self._context, pace.drafts, steps, growth)
        return seconds * self.slowness

    def _steps_until(self, most: int, pace: Pace, extra: float, seconds: float) -> int:
        seconds /= self.slowness
        if not self.running:
            return min(most, math.ceil(seconds / extra)) if extra else most
        growth = self._growth * pace.part
        return self.kind.times.steps_until(len(self.running), self._context, pace.drafts, most, growth, seconds, extra)

    def _go(self, steps: int, pace: Pace, seconds: float) -> None:
        self.now += seconds
        self.counts.busy_seconds += seconds
        if self.running:
            self.counts.steps += steps
            self.counts.sample_steps += steps * len(self.running)
            self.counts.drafts += steps * pace.drafts
            self._place += steps * pace.part
            self._context += steps * pace.part * self._growth
        if self._prefill:
            self._prefill.chunks -= steps
        self._plan = None
