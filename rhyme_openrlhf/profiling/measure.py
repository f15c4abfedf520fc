"""Walks the grid and writes the profile; goes on where an earlier, interrupted walk stopped.

Invariants: every point that was measured is in the journal beside the profile before the next one begins; a journal of
another subject, other versions or another grid is not used; a point that does not come about (a KV cache too small for
it after all) is left out and named in the profile's notes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

from rhyme_openrlhf.latency.grid import Limits, PrefillShape, StepShape, prefill_shapes, step_shapes
from rhyme_openrlhf.latency.profile import PrefillPoint, Profile, StepPoint, Subject

# Steps measured at each point: enough for a median and quartiles, few enough for hundreds of points in minutes.
STEPS = 16
PREFILLS = 3
# The first point of all compiles and allocates what all others use.
WARM_UP = StepShape(1, 16, 1)


class Engine(Protocol):
    """What is measured (`profiling/engine_actor.py`, behind Ray)."""

    def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]: ...

    def prefill(self, shape: PrefillShape) -> float: ...


class MeasureError(RuntimeError):
    """The engine gives no profile; the message says why."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and with what. `kv_bytes_per_token` as in `Profile`."""

    subject: Subject
    limits: Limits
    versions: dict[str, str]
    padded_rows: tuple[int, ...]
    kv_bytes_per_token: int

    def steps(self) -> list[StepShape]:
        """The decode steps."""
        return step_shapes(self.limits, STEPS + 2)

    def prefills(self) -> list[PrefillShape]:
        """The prefills."""
        return prefill_shapes(self.limits)


def measure(plan: Plan, engine: Engine, journal: Path, on_point: Callable[[str], None]) -> Profile:
    """The profile of `plan`; `on_point` is told each point in words, before it is measured. Raises MeasureError."""
    done = _Journal(journal, plan)
    shapes: list[StepShape | PrefillShape] = [*plan.steps(), *plan.prefills()]
    if any(shape not in done for shape in shapes):
        on_point("warming up")
        engine.decode_steps(WARM_UP, STEPS)
    for shape in shapes:
        on_point(_words(shape))
        if shape not in done:
            done.add(shape, _step(engine, shape) if isinstance(shape, StepShape) else _prefill(engine, shape))
    steps = [StepPoint(*numbers) for shape in plan.steps() if (numbers := done.numbers(shape))]
    if all(point.drafts for point in steps):
        raise MeasureError(
            "no decode step ran with all its samples at once: is the KV cache large enough (--cpu.kv_cache_mb, "
            "--vllm.gpu_memory_utilization), and nothing else on this engine?"
        )
    left_out = [_words(shape) for shape in plan.steps() if not done.numbers(shape)]
    return Profile(
        subject=plan.subject,
        origin="measured",
        steps=tuple(steps),
        prefills=tuple(PrefillPoint(*done.numbers(shape)) for shape in plan.prefills()),
        padded_rows=plan.padded_rows,
        kv_cache_tokens=plan.limits.kv_cache_tokens,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        versions=plan.versions,
        notes=(
            "contexts were filled, not computed; KV transfer and weight load were not measured",
            *(f"left out, because it did not run with all samples at once: {words}" for words in left_out),
        ),
    )


def _words(shape: StepShape | PrefillShape) -> str:
    if isinstance(shape, PrefillShape):
        return f"prefill of {shape.sequences} x {shape.length} tokens"
    return f"{shape.running} samples x {shape.context_each} tokens, {shape.drafts_each} drafts each"


def _step(engine: Engine, shape: StepShape) -> StepPoint | None:
    steps = engine.decode_steps(shape, STEPS)
    if len(steps) < STEPS // 2:
        return None
    seconds, spread = _median([step[3] for step in steps])
    context = round(statistics.median(step[1] for step in steps))
    return StepPoint(shape.running, context, shape.running * shape.drafts_each, seconds, spread, len(steps))


def _prefill(engine: Engine, shape: PrefillShape) -> PrefillPoint:
    seconds, spread = _median([engine.prefill(shape) for _ in range(PREFILLS)])
    return PrefillPoint(shape.sequences, shape.length, seconds, spread, PREFILLS)


def _median(values: Iterable[float]) -> tuple[float, float]:
    """Median, and half the distance of the quartiles."""
    ordered = sorted(values)
    low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return middle, (high - low) / 2


class _Journal:
    """Points that were measured: a first line that says of what, then a line each."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path = path
        self._points: dict[str, list[Any]] = {}
        head = json.dumps({"subject": asdict(plan.subject), "versions": plan.versions, "limits": asdict(plan.limits)})
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if not lines or lines[0] != head:
            path.write_text(head + "\n", encoding="utf-8")
            return
        for line in lines[1:]:
            try:
                name, numbers = json.loads(line)
            except ValueError:
                # The line during which the last walk was killed.
                break
            self._points[name] = numbers
        kept = [head, *(json.dumps(item) for item in self._points.items())]
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")

    def __contains__(self, shape: StepShape | PrefillShape) -> bool:
        return _words(shape) in self._points

    def numbers(self, shape: StepShape | PrefillShape) -> list[Any]:
        """What was measured of it, which must be there; nothing where it did not come about."""
        return self._points[_words(shape)]

    def add(self, shape: StepShape | PrefillShape, point: StepPoint | PrefillPoint | None) -> None:
        """Note it, on disk too."""
        numbers = list(astuple(point)) if point is not None else []
        self._points[_words(shape)] = numbers
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([_words(shape), numbers]) + "\n")
