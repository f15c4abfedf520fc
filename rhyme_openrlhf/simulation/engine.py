"""One simulated engine and its samples: continuous batching, a bounded KV cache, preemption, speculation.

A change is the end of a sample, a full KV cache, or the end of a prefill. Decode steps between two changes differ only
in their context, so the engine advances from change to change, not from step to step.

The model and its simplifications:

- Prompts are computed in chunks of `step_tokens` within the running samples' steps. A prefill's time is spread evenly
  over its chunks.
- Samples of one prompt that are admitted together share one prefill, as with a prefix cache.
- The KV cache is counted in tokens, not in blocks. A shared prompt is counted for each of its samples.
- A full KV cache preempts the sample that was admitted last. That sample waits in front of the others and is then
  recomputed.
- Speculation is modeled by its mean effect: tokens and draft tokens per step.

Invariants:

- A job is waiting, in prefill, running, or gone.
- Every token of a response is generated once.
- A job's number of generated tokens never falls and never exceeds the job's length.
- Time never goes back.
- At least one sample makes progress, or KvCacheTooSmall is raised.
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
    """A sample that is being generated.

    - `length`: tokens that its finished response will have.
    - `generated`: response tokens so far.
    - `tokens_per_step`, `drafts_per_step`: tokens and draft tokens of a decode step that drafts a full window.
    - `later`: changes of these two rates, in ascending order. Each entry is (response token at which the new rates
      begin, tokens per step, drafts per step).
    """

    sample: int
    prompt: int
    prompt_tokens: int
    length: int
    tokens_per_step: float = 1.0
    drafts_per_step: float = 0.0
    generated: float = 0.0
    later: tuple[tuple[float, float, float], ...] = ()
    # A moved or preempted sample is recomputed with all its tokens, unless its KV cache is sent.
    computed: bool = False

    @property
    def context(self) -> float:
        return self.prompt_tokens + self.generated

    @property
    def pause(self) -> float:
        """The response token at which the sample ends or changes its pace."""
        return self.later[0][0] if self.later else float(self.length)

    def next_pace(self) -> bool:
        """Switch to the pace after the pause; return False if the response ends there."""
        if not self.later or self.generated >= self.length:
            return False
        (_, self.tokens_per_step, self.drafts_per_step), *rest = self.later
        self.later = tuple(rest)
        return True


# Tolerance in nominal steps: a sample this close to its end has ended, because the end is a rounded quotient.
_ROUNDING = 1e-6


class KvCacheTooSmall(ValueError):
    """One sample alone does not fit into the engine's KV cache."""


@dataclass(slots=True)
class _Running:
    job: Job
    begin: float
    came: int
    had: float  # tokens generated before it began here
    rate: float  # the job's tokens per step; copied, like `length`, because both are read with the fields above
    length: int


@dataclass
class _Prefill:
    jobs: list[Job]
    chunks: int
    seconds_each: float


class Pace(NamedTuple):
    """The pace of one decode step: total draft tokens, and the fraction of a full window's gain that they yield."""

    drafts: int
    part: float


# Maps a step's number of samples, tokens of context, and draft tokens of full windows to its pace.
PaceOf = Callable[[int, float, float], Pace]
# Pace of a step that only computes prompts.
_NO_SAMPLES = Pace(0, 1.0)


@dataclass
class Counts:
    """The work of one engine so far.

    - `tokens`: generated tokens.
    - `steps`: decode steps.
    - `sample_steps`: decode steps, each counted once for every sample in it.
    - `drafts`: draft tokens.
    - `preemptions`: preempted samples.
    - `busy_seconds`: seconds with something to run.
    """

    tokens: float = 0.0
    steps: int = 0
    sample_steps: int = 0
    drafts: float = 0.0
    preemptions: int = 0
    busy_seconds: float = 0.0


@dataclass
class Engine:
    """One simulated engine.

    - `pace`: the current pace under speculation; a new one applies from the next change on.
    - `load`: number of samples on this engine.
    - `slowness`: duration of a step divided by the duration that `kind` gives; only `slow_down` changes it.
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

    # Queries

    @property
    def idle(self) -> bool:
        return not self.load

    @property
    def free_tokens(self) -> int:
        """Unused tokens of KV cache; waiting samples use none."""
        taken = self._context + (sum(job.context for job in self._prefill.jobs) if self._prefill else 0)
        return int(self.kind.kv_tokens - taken)

    def prompts_at_work(self) -> list[tuple[int, int, float]]:
        """Return the prompt, its number of tokens, and the tokens generated so far, for each running sample."""
        place = self._place
        return [
            (item.job.prompt, item.job.prompt_tokens, t if t < item.length else item.length)
            for item in self.running.values()
            for t in (item.had + (place - item.begin) * item.rate,)
        ]

    def near(self, time: float) -> tuple[int, float]:
        """Return the decode steps done by `time` and the running samples' tokens of context at that time.

        The estimate takes all steps up to the next change as equally long.
        """
        if self.next_change() == math.inf or not self.running:
            return self.counts.steps, self._context
        assert self._plan is not None
        steps, seconds, pace = self._plan
        done = steps * min(max(time - self.now, 0.0) / seconds, 1.0) if seconds else 0.0
        return self.counts.steps + int(done), self._context + done * pace.part * self._growth

    def prompts_running(self) -> list[tuple[int, int]]:
        """Return the sample and the prompt of each running sample."""
        return [(sample, item.job.prompt) for sample, item in self.running.items()]

    def generated(self, sample: int) -> float:
        """Return the tokens that a running sample has generated so far."""
        return self._generated(self.running[sample])

    def contexts_at(self, time: float) -> list[tuple[int, float, int]]:
        """Return the state of each running sample at the end of the step in progress at `time`.

        Each entry is (whole tokens of context, draft tokens accepted per step, sample). `time` must not be later than
        the next change.
        """
        place = self._place
        if time > self.now and self.next_change() < math.inf:
            assert self._plan is not None
            steps, _, pace = self._plan
            extra = self._prefill.seconds_each if self._prefill else 0.0
            place += self._steps_until(steps, pace, extra, time - self.now) * pace.part
        # Same as `_generated`, written out here and in `prompts_at_work`. Both run often over all running samples, and
        # a call per sample would be slower.
        return [
            (round(item.job.prompt_tokens + (t if t < item.length else item.length)), item.rate - 1, sample)
            for sample, item in self.running.items()
            for t in (item.had + (place - item.begin) * item.rate,)
        ]

    def speculation(self) -> tuple[float, float]:
        """Return tokens and draft tokens of a sample's decode step, averaged over the running samples.

        Without running samples the result is (1, 0).
        """
        count = len(self.running)
        if not count:
            return 1.0, 0.0
        # Every periodic check calls this on all engines, so reuse the plan: if it was made with the current pace, it
        # was made for the samples that run now.
        planned = self._plan if self._planned_by is self.pace else None
        pace = planned[2] if planned else self.pace(count, self._context, self._drafts)
        return self._growth * pace.part / count, pace.drafts / count

    def jobs_in_prefill(self) -> list[Job]:
        """Return the jobs whose prompts are being computed."""
        return self._prefill.jobs if self._prefill else []

    def next_change(self) -> float:
        """Return the time of the next change, or infinity if there is nothing to run.

        Also begins the prefill of waiting samples if there is room for them.
        """
        if self._plan is None:
            if self.waiting and not self._prefill:
                self._admit()
            self._plan = self._planned()
        return self.now + self._plan[1] if self._plan[0] else math.inf

    # Changes

    def give(self, jobs: list[Job], now: float) -> None:
        """Add samples at `now`; those already computed elsewhere continue without a prefill.

        `now` must not be before the begin of a step in progress.
        """
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
        """Continue with the step times of `kind`; the engine's position between two steps stays the same."""
        self.kind = kind
        self._plan = None

    def slow_down(self, slowness: float) -> None:
        """Make steps take `slowness` times as long as the kind's from now on."""
        self.slowness = slowness
        self._plan = None

    def take(self, samples: set[int]) -> list[Job]:
        """Remove these samples and return them: running ones as they were admitted, then waiting ones as they came."""
        taken = []
        for sample in sorted(samples & self.running.keys(), key=lambda s: self.running[s].came):
            item = self.running[sample]
            item.job.generated = self._generated(item)
            self._stop(item)
            taken.append(item.job)
        if len(taken) < len(samples):
            taken += [job for job in self.waiting if job.sample in samples]
            self.waiting = deque(job for job in self.waiting if job.sample not in samples)
        self.load -= len(taken)
        self._plan = None
        return taken

    def take_all(self) -> list[Job]:
        """Remove and return all samples: running ones first, then those not computed yet."""
        found = self.take(set(self.running))
        if self._prefill:
            found += self._prefill.jobs
            self._prefill = None
        found += self.waiting
        self.waiting.clear()
        self.load = 0
        return found

    def run_until(self, time: float) -> list[Job]:
        """Advance to the end of the step in progress at `time`, at most to the next change; return the ended jobs."""
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
        """Advance to the next change and return the jobs that ended there."""
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

    # Implementation

    def _generated(self, item: _Running) -> float:
        job = item.job
        generated = item.had + (self._place - item.begin) * job.tokens_per_step
        return generated if generated < job.length else float(job.length)

    def _run(self, job: Job, came: int = 0) -> None:
        """Start decoding `job`; `came`: its earlier place in the order of admission, 0 for a new place."""
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
        # Tokens that the job added to the context, including the rounding of its last step.
        added = (self._place - item.begin) * item.job.tokens_per_step
        self._context -= item.job.prompt_tokens + item.had + added
        self._growth -= item.job.tokens_per_step
        self._drafts -= item.job.drafts_per_step
        self.counts.tokens += item.job.generated - item.had

    def _admit(self) -> None:
        """Begin the prefill of the waiting samples that fit into the KV cache."""
        jobs: list[Job] = []
        free = self.kind.kv_tokens - self._context
        # Keep room for one step of all samples, because otherwise a new sample would be preempted at once.
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
        # Samples of one prompt that are admitted together share its prefill.
        lengths += list({job.prompt: job.prompt_tokens for job in jobs if not job.generated}.values())
        chunks = max(1, math.ceil(sum(lengths) / self.kind.step_tokens))
        self._prefill = _Prefill(jobs, chunks, self.kind.prefill_seconds(lengths) / chunks)

    def _planned(self) -> tuple[int, float, Pace]:
        """Return the steps to the next change, their seconds, and their pace; 0 steps if there is nothing to run."""
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
