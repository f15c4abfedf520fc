"""The services of a run for each of its actors: settings, the recorder, and what the driver decided before the start.

`RunServices` travels to every actor inside OpenRLHF's strategy object, which upstream hands to all of them. Layouts are
planned by `scheduling/layouts.py`, checkpoints chosen by `training/resume.py`; here is what their users ask of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray

from rhyme_openrlhf.engine_losses import ALIVE_SECONDS, EngineLosses, LostEngine
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.events import Event, Note
from rhyme_openrlhf.telemetry.samples import ROUNDS, length_records

# Who has missed an engine.
ROLLOUT = "rollout"
# Asked once a step. The recorder only looks for a file, but on its node, which may be busy; no answer means "go on".
STOP_ANSWER_SECONDS = 10


class Layouts(Protocol):
    """The layouts of a run, as their users need them (scheduling/layouts.py::LayoutPlan)."""

    @property
    def engines(self) -> int: ...

    @property
    def devices(self) -> int: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def kv_sizes(self) -> tuple[int, ...]: ...

    @property
    def device_shares(self) -> tuple[float, ...]: ...

    @property
    def both_awake(self) -> bool: ...

    def aligned(self, numbers: Sequence[int]) -> list[int]: ...

    def numbers(self, layout: int) -> range: ...


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes on from. `ours`: our part of it, None for a checkpoint of plain OpenRLHF.

    `drafted_from`: the earlier runs' files that a reproducible run drafted from, with the bytes that it read of each.
    """

    tag: str
    step: int
    ours: Path | None
    history: tuple[Path, ...]
    drafted_from: dict[str, dict[str, int]] | None = None


@dataclass(frozen=True)
class Checkpoints:
    """A run's checkpoints: the one that it resumes from, the settings that its own are bound to, and `more` in them."""

    resume: ResumePoint | None
    settings: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunServices:
    """The services of a run for each of its actors. Handles are Ray actors.

    `steps_per_epoch` is None where it can vary, and `layouts` where there is one. `losses`: the lost engines, as the
    process that has these services knows them.
    """

    settings: RhymeSettings
    recorder: Any
    history_workers: tuple[Any, ...]
    steps_per_epoch: int | None
    checkpoint_path: str
    on_gpus: bool
    checkpoints: Checkpoints
    layouts: Layouts | None = None
    losses: EngineLosses = field(default_factory=EngineLosses)

    def record(self, event: Event, source: str) -> None:
        """Send an event to the record, without waiting."""
        self.recorder.write.remote(event, source, time.time())

    def record_all(self, events: list[Event], source: str) -> None:
        """Send events of one moment to the record, without waiting: one message, however many engines there are."""
        self.recorder.write_all.remote(events, source, time.time())

    def record_lengths(self, step: int, samples: list[Any]) -> None:
        """Send how long a step's samples (OpenRLHF's experiences) were to the run directory, without waiting."""
        rounds = ((sample.prompts[0], getattr(sample, ROUNDS, [])) for sample in samples)
        self.recorder.write_lengths.remote(step, length_records(step, self.epoch_of(step), rounds))

    def stop_requested(self) -> bool:
        """Return whether the run is asked to end; False where nobody answers."""
        try:
            return bool(ray.get(self.recorder.stop_requested.remote(), timeout=STOP_ANSWER_SECONDS))
        except ray.exceptions.RayError:
            return False

    def epoch_of(self, step: int) -> int:
        """Return the epoch (from 1) of training step `step` (from 1); 1 where steps per epoch can vary."""
        return 1 if self.steps_per_epoch is None else (step - 1) // self.steps_per_epoch + 1


def leave_out(engines: list[Any], services: RunServices, wait_s: float = ALIVE_SECONDS) -> None:
    """Go on without engines that are gone, in a run that can, and say so. Raises RuntimeError if none is left.

    `wait_s`: as in `EngineLosses.look`.
    """
    if engines and services.settings.outlives_engines:
        for lost in services.losses.look(engines, wait_s):
            services.record(Note("warning", lost.sentence), ROLLOUT)


def is_lost(engines: list[Any], number: int, services: RunServices) -> bool:
    """Return whether an engine whose call failed is gone, once Ray knows; it is then left out, in a run that can."""
    leave_out(engines, services)
    return isinstance(engines[number], LostEngine)
