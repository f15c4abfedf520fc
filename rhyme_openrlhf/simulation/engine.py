"""One simulated engine: continuous batching with prefill, a bounded KV cache, preemption, speculation.

Between two changes (a sample ends, the KV cache is full, a prefill is done) every decode step is alike but for the
context, so the engine goes from change to change, not from step to step.

What it is like, and what it leaves out: prompts are computed in chunks of `step_tokens` beside the running samples'
steps, and the time of a prefill is spread over its chunks; the samples of a prompt that come in together share one
prefill, as a prefix cache makes them. The KV cache is counted in tokens, not in blocks, and a shared prompt is counted
for each of its samples. If it is full, the sample that came last is preempted, waits in front of the others, and is
computed again. Speculation enters as what it gives in the mean: tokens and draft tokens per step.

Invariants: a job is waiting, in prefill, running, or gone; every token of a response is generated once; time never goes
back; at least one sample makes progress, or KvCacheTooSmall is raised.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.simulation.job import Job
from rhyme_openrlhf.simulation.step_times import StepTimes

# A sample's end in nominal steps is a quotient: what is this much short of it has ended.
_ROUNDING = 1e-6


class KvCacheTooSmall(ValueError):
    """One sample alone does not fit into the engine's KV cache."""


@dataclass(frozen=True)
class EngineKind:
    """What engines of one tensor-parallel size are like.

    `kv_tokens`: room for this many tokens of context; `most_running`: samples at once; `step_tokens`: prompt tokens
    computed per step; `prefill_seconds`: of sequences of such lengths together.
    """

    times: StepTimes
    transfer: TransferModel
    prefill_seconds: Callable[[list[int]], float]
    kv_tokens: int
    most_running: int
    step_tokens: int


@dataclass(slots=True)
class _Running:
    job: Job
    begin: float
    came: int
    had: float  # tokens generated when it began here


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
    """`pace`: what speculation gives by now, for steps from the next change on.

    `slowness`: how many times as long as its kind's its steps take; changed by `slow_down` only.
    """

    kind: EngineKind
    pace: PaceOf
    now: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: dict[int, _Running] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    slowness: float = 1.0

    def __post_init__(self) -> None:
        self._ends: list[tuple[float, int, int]] = []
        self._place = 0.0  # nominal steps done since the engine began
        self._context = 0.0
        self._growth = 0.0
        self._drafts = 0.0
        self._came = 0
        self._prefill: _Prefill | None = None
        self._plan: tuple[int, float, Pace] | None = None

    # What others ask

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self._prefill)

    @property
    def load(self) -> int:
        """Samples here, in whatever state."""
        return len(self.running) + len(self.waiting) + (len(self._prefill.jobs) if self._prefill else 0)

    @property
    def free_tokens(self) -> int:
        """Tokens of KV cache that nobody has; what waits has none."""
        taken = self._context + (sum(job.context for job in self._prefill.jobs) if self._prefill else 0)
        return int(self.kind.kv_tokens - taken)

    def jobs_running(self) -> list[Job]:
        """The running samples, `generated` as of now."""
        found = []
        for job, generated in self._at(self._place):
            job.generated = generated
            found.append(job)
        return found

    def near(self, time: float) -> tuple[int, float]:
        """Decode steps done by then and tokens of context of the running samples, between two changes as if all steps
        took alike."""
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

    def running_at(self, time: float) -> list[tuple[Job, float]]:
        """The running samples, and the tokens each has generated by the end of the step that goes on at `time`, which
        must not lie behind the next change."""
        place = self._place
        if time > self.now and self.next_change() < math.inf:
            assert self._plan is not None
            steps, _, pace = self._plan
            extra = self._prefill.seconds_each if self._prefill else 0.0
            place += self._steps_until(steps, pace, extra, time - self.now) * pace.part
        return self._at(place)

    def speculation(self) -> tuple[float, float]:
        """Tokens and draft tokens of a sample's decode step, in the mean of those that run now; (1, 0) if none does."""
        count = len(self.running)
        if not count:
            return 1.0, 0.0
        pace = self.pace(count, self._context, self._drafts)
        return self._growth * pace.part / count, pace.drafts / count

    def jobs_waiting(self) -> list[Job]:
        """Those without a step so far: in prefill, or before it."""
        return [*(self._prefill.jobs if self._prefill else ()), *self.waiting]

    def next_change(self) -> float:
        """When something changes; infinity if there is nothing to run. Begins what can begin."""
        if self._plan is None:
            self._admit()
            self._plan = self._planned()
        return self.now + self._plan[1] if self._plan[0] else math.inf

    # What happens

    def give(self, jobs: list[Job], now: float) -> None:
        """New samples at `now`, which must not lie before a step that is going on; those computed elsewhere run on."""
        if self.idle:
            self.now = max(self.now, now)
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
        if not self.running and not self._prefill:
            self._context = self._growth = self._drafts = 0.0
        return ended

    # How

    def _generated(self, item: _Running) -> float:
        job = item.job
        generated = item.had + (self._place - item.begin) * job.tokens_per_step
        return generated if generated < job.length else float(job.length)

    def _at(self, place: float) -> list[tuple[Job, float]]:
        """The running samples, and what `_generated` says of each when the engine is there: asked of all of them often,
        and a call for each would take longer than the rest."""
        return [
            (job, generated if generated < job.length else float(job.length))
            for item in self.running.values()
            for job in (item.job,)
            for generated in (item.had + (place - item.begin) * job.tokens_per_step,)
        ]

    def _run(self, job: Job, came: int = 0) -> None:
        """It runs from now on; `came`: if it did before, as which one."""
        job.computed = True
        if not came:
            came = self._came = self._came + 1
        self.running[job.sample] = _Running(job, self._place, came, job.generated)
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
        if self._prefill or not self.waiting:
            return
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
        if not self.running and not self._prefill:
            return 0, 0.0, _NO_SAMPLES
        while self.running and self._context + self._growth > self.kind.kv_tokens:
            self._preempt()
        pace = self.pace(len(self.running), self._context, self._drafts) if self.running else _NO_SAMPLES
        steps = self._prefill.chunks if self._prefill else 1 << 62
        if self.running:
            while self._ends[0][2] not in self.running or self.running[self._ends[0][2]].came != self._ends[0][1]:
                heapq.heappop(self._ends)
            steps = min(steps, max(1, math.ceil((self._ends[0][0] - self._place) / pace.part - _ROUNDING)))
            room = (self.kind.kv_tokens - self._context) / (self._growth * pace.part)
            steps = min(steps, max(1, math.floor(room)))
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
