"""Looks at the engines of a pipelined run about once a second and records how far the step being completed is.

Invariant: recording never waits for an engine longer than one poll, and what it records of an engine adds up to what
the engine did since the watch began.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from rhyme_openrlhf.engine.calls import EngineHandle
from rhyme_openrlhf.telemetry.engine_events import EngineSampler
from rhyme_openrlhf.telemetry.events import RolloutProgress
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.training.samples_generator import POLL_SECONDS, POLL_TIMEOUT_SECONDS, SOURCE


class PipelineWatch:
    """A thread from `start` to `stop`. Samples of the next step count for the one that is being completed: what the
    engines did meanwhile."""

    def __init__(self, engines: list[EngineHandle], services: RunServices) -> None:
        self._engines = engines
        self._services = services
        self._step = 0
        self._samples_total = 0
        self._began = 0.0
        self._before = self._seen = EngineCounters()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pipeline-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def begin(self, step: int, samples_total: int) -> None:
        """From now on `step` is being completed, which has so many samples."""
        with self._lock:
            self._step, self._samples_total, self._began = step, samples_total, time.time()
            self._before = self._seen

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join(POLL_TIMEOUT_SECONDS + POLL_SECONDS)

    def _watch(self) -> None:
        known: dict[int, Any] = {}
        sampler = EngineSampler(0, len(self._engines), time.monotonic())
        while not self._stop.wait(POLL_SECONDS):
            try:
                answers = ray.get([engine.progress.remote() for engine in self._engines], timeout=POLL_TIMEOUT_SECONDS)
            except (ray.exceptions.RayError, TimeoutError):
                # The rollout itself meets the same engine and reports what is wrong with it.
                continue
            # What an engine had done before it was lost stays done.
            known |= {number: answer for number, answer in enumerate(answers) if answer is not None}
            seen = sum((EngineCounters.from_dict(answer) for answer in known.values()), EngineCounters())
            with self._lock:
                done, self._seen = seen - self._before, seen
                step, total, seconds = self._step, self._samples_total, time.time() - self._began
            if step:
                sampler.step = step
                progress = RolloutProgress(
                    step,
                    min(done.finished_samples, total),
                    total,
                    done.response_tokens,
                    seconds,
                    done.drafted,
                    done.accepted,
                )
                samples = sampler.samples(answers, time.monotonic())
                self._services.record_all([progress, *samples], SOURCE)
