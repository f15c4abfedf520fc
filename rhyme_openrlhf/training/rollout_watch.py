"""The record of a rollout stage: how far it is, about once a second, and its event at the end.

Invariants:
- Recording never waits for an engine longer than one poll, but for one that is out of reach (engine_losses.py).
- What it records of an engine adds up to what the engine did since the watch began.
- It calls at most ENGINES_A_SECOND engines a second, and records as many: more engines are looked at less often. So
  the record of a day takes the same disk and the same time to read, however many engines there are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import ray

from rhyme_openrlhf.telemetry.engine_events import EngineSampler, slowest_sample
from rhyme_openrlhf.telemetry.events import EvaluationProgress, RolloutFinished, RolloutProgress
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.services import RunServices, leave_out

SOURCE = "rollout"
# How often a running rollout is looked at, and how long one look may take before it is given up.
POLL_SECONDS = 1.0
ENGINES_A_SECOND = 64
POLL_TIMEOUT_SECONDS = 10.0


class RolloutWatch:
    """A thread from `start` to `stop`, which records how far the step of the last `begin` is.

    `started` and `ended` are unix seconds, for the engines' timelines; `seconds` is the stage's length, also if clocks
    are set meanwhile. `overlapping`: in the streaming pipeline, engines are ahead of the step that is being completed.
    Samples of the next step then count for that step, as what the engines did meanwhile; lost engines are the
    controller's to find.
    """

    def __init__(self, engines: list[Any], services: RunServices, overlapping: bool = False) -> None:
        self._engines = engines
        self._services = services
        self._overlapping = overlapping
        self._step = 0
        self._samples = 0
        self._before = self._seen = EngineCounters()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rollout-watch", daemon=True)
        self.started = self.ended = 0.0
        self._since = self.seconds = 0.0

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def begin(self, step: int, samples: int) -> None:
        """Watch `step` from now on, which is generated or being completed; `samples`: how many it has."""
        with self._lock:
            self._step, self._samples, self._before = step, samples, self._seen
            self.started = self.ended = time.time()
            self._since = time.monotonic()

    def stop(self) -> None:
        """Look no more."""
        self.ended, self.seconds = time.time(), time.monotonic() - self._since
        self._stop.set()
        self._thread.join(POLL_TIMEOUT_SECONDS + POLL_SECONDS)

    def _watch(self) -> None:
        known: dict[int, Any] = {}
        sampler = EngineSampler(0, len(self._engines), time.monotonic())
        while not self._stop.wait(look_seconds(len(self._engines))):
            try:
                answers = ray.get([engine.progress.remote() for engine in self._engines], timeout=POLL_TIMEOUT_SECONDS)
            except (ray.exceptions.RayError, TimeoutError):
                # The rollout itself meets the same engine and reports what is wrong with it, or goes on without it.
                if not self._overlapping:
                    # Without any engine the rollout itself ends the run.
                    with contextlib.suppress(RuntimeError):
                        leave_out(self._engines, self._services)
                continue
            # What an engine had done before it was lost stays done.
            known |= {number: answer for number, answer in enumerate(answers) if answer is not None}
            seen = sum((EngineCounters.from_dict(answer) for answer in known.values()), EngineCounters())
            with self._lock:
                done, self._seen = seen - self._before, seen
                step, samples, seconds = self._step, self._samples, time.monotonic() - self._since
            if not step:
                continue
            sampler.step = step
            self._record(step, samples, seconds, done, answers, sampler)

    def _record(
        self, step: int, samples: int, seconds: float, done: EngineCounters, answers: list[Any], sampler: EngineSampler
    ) -> None:
        finished = min(done.finished_samples, samples) if self._overlapping else done.finished_samples
        # Of the engines that answered now: a lost one has no unfinished sample any more.
        slowest = slowest_sample(answers)
        progress = RolloutProgress(
            step, finished, samples, done.response_tokens, seconds, done.drafted, done.accepted, *slowest
        )
        self._services.record_all([progress, *sampler.samples(answers, time.monotonic())], SOURCE)


class EvaluationWatch(RolloutWatch):
    """A thread from `start` to `stop`, which records that the evaluation of the last `begin` gets further.

    Engines that are lost meanwhile are for the evaluation to find.
    """

    def __init__(self, engines: list[Any], services: RunServices) -> None:
        super().__init__(engines, services, overlapping=True)
        self._reached = (0, 0)

    def _record(
        self, step: int, samples: int, seconds: float, done: EngineCounters, answers: list[Any], sampler: EngineSampler
    ) -> None:
        reached = (done.finished_samples, done.response_tokens)
        if reached != self._reached:
            self._reached = reached
            self._services.record(EvaluationProgress(step, *reached, seconds), SOURCE)


def look_seconds(engines: int) -> float:
    """Return the seconds between two looks at this number of engines."""
    return POLL_SECONDS * max(1.0, engines / ENGINES_A_SECOND)


def rollout_finished(step: int, epoch: int, seconds: float, samples: list[Any]) -> RolloutFinished:
    """Return the event of a step's rollout stage that took so long and gave these samples (OpenRLHF's experiences)."""
    lengths = [int(sample.response_length.item()) for sample in samples]
    rewards = [sample.rewards.item() for sample in samples if sample.rewards is not None]
    truncated = sum(bool(sample.truncated.item()) for sample in samples)
    return RolloutFinished.of(step, epoch, seconds, lengths, rewards, truncated)
