"""Measure a profile: the choice of a few informative points, and the walk over them at an engine.

The points follow PAT 4.2's sparse sampling and RLHFSpec 5.2's draft term. The walk goes over them several times, a few
steps of each point at a time. So a short disturbance of the machine is a small part of many points, not all of a few.
An interrupted walk continues where it stopped.

Invariants:

- No point needs more KV cache than there is (B x L <= tokens).
- Contexts are denser where they are short, because decoding is less linear there.
- Draft counts end on the stairs to which the engine pads, so the fitted staircase has its steps where the engine's are.
- Every measured burst is in the journal, if there is one, before the next one begins.
- A journal of another subject, other versions or another grid is not used.
- A point that cannot be measured (the KV cache is too small after all) is left out and named in the profile's notes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rhyme_openrlhf.latency.profile import PrefillPoint, Profile, StepPoint, Subject
from rhyme_openrlhf.latency.step_model import assess


@dataclass(frozen=True)
class Grid:
    """A grid of points, some of which may not fit: samples, context and draft tokens of each; prefills' sequences."""

    running: tuple[int, ...]
    contexts: tuple[int, ...]
    drafts: tuple[int, ...]
    sequences: tuple[int, ...]


# Samples in powers of two from one on: step times bend at tile sizes, which are powers of two. Contexts as PAT's:
# denser below 512. Drafts: the paper's window runs from 2 to 32.
FULL = Grid(
    running=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    contexts=(16, 64, 128, 256, 512, 1024, 4096, 16384, 65536),
    drafts=(1, 3, 7, 15, 31),
    sequences=(1, 2, 4, 8, 16, 32),
)
# As few as show how time grows with each of the three; of prefill what a sample costs that is recomputed elsewhere.
QUICK = Grid(running=(1, 4, 16, 64, 256, 1024), contexts=(32, 256, 1024), drafts=(1, 3, 7, 15), sequences=(1,))


@dataclass(frozen=True)
class StepShape:
    """A decode step to measure: samples, tokens of context each, draft tokens each."""

    running: int
    context_each: int
    drafts_each: int


@dataclass(frozen=True)
class PrefillShape:
    """A prefill to measure: sequences, tokens each."""

    sequences: int
    length: int


@dataclass(frozen=True)
class Limits:
    """An engine's limits: samples at once, tokens of a sequence, of KV cache and of a step, draft tokens of a sample.

    vLLM dies of more draft tokens than that.


    `verified_rows`: rows of a step that verifies drafts, None if no memory bounds them.
    """

    running: int
    length: int
    kv_cache_tokens: int
    step_tokens: int
    drafts_each: int
    verified_rows: int | None = None


def step_shapes(limits: Limits, steps: int, grid: Grid = FULL) -> list[StepShape]:
    """Return the decode steps to measure, those of few samples first. `steps`: decode steps measured at each point.

    A sample grows while it is measured: by up to its drafts and one a step.
    """
    shapes = []
    for running in _up_to(grid.running, limits.running):
        for drafts in (0, *_drafts_up_to(grid.drafts, limits.drafts_each)):
            # A step that is filled to the brim leaves no token for the last samples to come in.
            rows = running * (1 + drafts)
            if rows >= limits.step_tokens or (drafts and limits.verified_rows and rows > limits.verified_rows):
                continue
            for context in _up_to(grid.contexts, limits.length):
                room = context + steps * (1 + drafts) + 1
                if room <= limits.length and running * room <= limits.kv_cache_tokens:
                    shapes.append(StepShape(running, context, drafts))
    return shapes


def prefill_shapes(limits: Limits, grid: Grid = FULL) -> list[PrefillShape]:
    """Return the prefills to measure."""
    return [
        PrefillShape(sequences, length)
        for sequences in _up_to(grid.sequences, limits.running)
        for length in _up_to(grid.contexts, limits.length - 1)
        if sequences * (length + 1) <= limits.kv_cache_tokens
    ]


def _drafts_up_to(values: Sequence[int], most: int) -> list[int]:
    """Return values as `_up_to` does, but with `most` in place of a last value near it.

    A drafter that proposes `most` tokens for every sample has steps of that size all the time.
    """
    found = _up_to(values, most)
    return [*found[:-1], most] if found and most < values[-1] else found


def _up_to(values: Sequence[int], most: int) -> list[int]:
    """Return the `values` up to `most`, and `most` itself if it lies well beyond the last of them."""
    found = [value for value in values if value <= most]
    if found and found[-1] * 1.5 < most < values[-1]:
        found.append(most)
    return found


# The first point of all compiles and allocates what all others use.
WARM_UP = StepShape(1, 16, 1)
WARM_UP_STEPS = 8


@dataclass(frozen=True)
class Walk:
    """The extent of a walk: `rounds` times over the grid, `steps` decode steps a point each time, at most `limit_s`.

    `carrying`: KV transfer and weight load too.
    """

    grid: Grid
    rounds: int
    steps: int
    limit_s: float | None = None
    carrying: bool = False


# Eighteen steps a point: enough for a median and quartiles, few enough for hundreds of points in minutes.
THOROUGH = Walk(FULL, rounds=3, steps=6, carrying=True)
# For a run that has no profile and waits for its start: half a minute.
QUICKLY = Walk(QUICK, rounds=2, steps=4, limit_s=30.0)
# For who asks for a quick one: the same few points, all of them.
SPARSE = Walk(QUICK, rounds=2, steps=6, carrying=True)
# Of an engine without speculation, whose contexts are computed: its decode steps alone, which say how much slower an
# engine that speculates makes a step without drafts.
UNSPECULATED = Walk(dataclasses.replace(QUICK, sequences=()), rounds=3, steps=6)
# The same for a run that waits for its start, and pays the engine's start besides.
UNSPECULATED_QUICKLY = dataclasses.replace(UNSPECULATED, rounds=2, steps=4, limit_s=15.0)


# Factors on the steps of the measured engine, of which only the last part counts, and of the other engines beside it.
# Calls reach engines some steps apart. Without the factors, a part of the burst would run while the others do not.
OWN_STEPS, BESIDE_STEPS = 2, 4


class Engine(Protocol):
    """The engine that is measured (`engine/actor_parts/measuring.py`, behind Ray)."""

    def subject(self) -> Subject: ...

    def limits(self) -> Limits: ...

    def padded_rows(self) -> tuple[int, ...]: ...

    def kv_bytes_per_token(self) -> int: ...

    def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]: ...

    def prefill(self, shape: PrefillShape) -> float: ...

    def kv_bandwidth(self) -> tuple[float, str]: ...

    def weight_load(self) -> tuple[float, str]: ...


class MeasureError(RuntimeError):
    """The engine gives no profile; the message says why."""


@dataclass(frozen=True)
class Plan:
    """A measurement's points, subject and walk. `kv_bytes_per_token` as in `Profile`."""

    subject: Subject
    limits: Limits
    versions: dict[str, str]
    padded_rows: tuple[int, ...]
    kv_bytes_per_token: int
    walk: Walk = THOROUGH
    beside: int = 0

    @classmethod
    def of(cls, engine: Engine, versions: dict[str, str], walk: Walk = THOROUGH, beside: int = 0) -> Plan:
        """Return the plan of an engine with `beside` other engines that do the same beside it."""
        return cls(
            subject=engine.subject(),
            limits=engine.limits(),
            versions=versions,
            padded_rows=engine.padded_rows(),
            kv_bytes_per_token=engine.kv_bytes_per_token(),
            walk=walk,
            beside=beside,
        )

    def steps(self) -> list[StepShape]:
        """Return the decode steps."""
        steps = self.walk.steps * (BESIDE_STEPS if self.beside else 1)
        return step_shapes(self.limits, steps + 2, self.walk.grid)

    def prefills(self) -> list[PrefillShape]:
        """Return the prefills."""
        return prefill_shapes(self.limits, self.walk.grid)

    def bursts(self) -> int:
        """Return how often `measure` announces its next burst, the warm-up included."""
        return 1 + self.walk.rounds * (len(self.steps()) + len(self.prefills())) + 2 * self.walk.carrying


def measure(
    plan: Plan, engine: Engine, journal: Path | None = None, on_point: Callable[[str], None] = lambda words: None
) -> Profile:
    """Return the profile of `plan`; `on_point` gets each burst in words before it is measured. Raise MeasureError."""
    began = time.monotonic()
    done = _Journal(journal, plan)
    # Short contexts first: where there is no time for all, every number of samples has been seen.
    shapes: list[StepShape | PrefillShape] = [*sorted(plan.steps(), key=lambda s: s.context_each), *plan.prefills()]
    if any(done.rounds(shape) < plan.walk.rounds for shape in shapes):
        on_point("warming up")
        engine.decode_steps(WARM_UP, WARM_UP_STEPS)
    for round_ in range(plan.walk.rounds):
        for shape in shapes:
            if plan.walk.limit_s is not None and time.monotonic() - began > plan.walk.limit_s:
                break
            on_point(_words(shape))
            if done.rounds(shape) <= round_:
                done.add(shape, _burst(engine, shape, plan.walk.steps))
    # As many as one whole burst has: else only stragglers had all samples at once.
    points = {shape: _step_point(shape, done.rows(shape), plan.walk.steps) for shape in plan.steps()}
    steps = undelayed([point for point in points.values() if point is not None])
    if all(point.drafts for point in steps):
        raise MeasureError(
            "no decode step ran with all its samples at once: is the KV cache large enough (--cpu.kv_cache_mb, "
            "--vllm.gpu_memory_utilization), and nothing else on this engine?"
        )
    carrying = _carrying(engine, on_point) if plan.walk.carrying else _Carrying()
    left_out = [_words(shape) for shape, point in points.items() if point is None and done.rounds(shape)]
    return Profile(
        subject=plan.subject,
        origin="measured",
        steps=tuple(steps),
        prefills=tuple(_prefill_point(shape, done.rows(shape)) for shape in plan.prefills() if done.rows(shape)),
        padded_rows=plan.padded_rows,
        kv_cache_tokens=plan.limits.kv_cache_tokens,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        kv_bytes_per_second=carrying.kv_bytes_per_second,
        weight_load_seconds=carrying.weight_load_seconds,
        beside=plan.beside,
        versions=plan.versions,
        notes=(
            f"{plan.walk.rounds} x {plan.walk.steps} steps a point",
            *carrying.notes,
            *(f"left out, because it did not run with all samples at once: {words}" for words in left_out),
            *(
                f"left out, because a larger decode step took less than half of its {point.seconds * 1e3:.0f} ms: "
                f"{_words(shape)}"
                for shape, point in points.items()
                if point is not None and point not in steps
            ),
        ),
    )


def with_unspeculated(
    profile: Profile, engine: Engine, journal: Path | None = None, on_point: Callable[[str], None] = lambda words: None
) -> Profile:
    """Return `profile` with the decode steps of `engine`, which does not speculate. Raises MeasureError."""
    plan = Plan.of(engine, profile.versions, UNSPECULATED, profile.beside)
    if plan.subject != profile.subject or plan.limits.drafts_each:
        raise MeasureError(f"an engine of {plan.subject} is not the one of the profile without speculation")
    found = measure(plan, engine, journal, lambda words: on_point(f"without speculation: {words}"))
    return dataclasses.replace(profile, unspeculated=found.steps)


# Times of identical steps spread by 1 to 5 % (`Quality.noise`) on a machine that does little else. What makes all
# steps equally slow cannot be seen.
MOST_NOISE = 0.1


def disturbed(profile: Profile) -> str:
    """Return a clause that says that something else ran while `profile` was measured; "" if nothing seems to have."""
    noise = assess(profile).noise
    if noise <= MOST_NOISE:
        return ""
    return f"times of identical steps spread by {noise:.0%}, more than {MOST_NOISE:.0%}, as where something else runs"


# A decode step cannot take this many times as long as a larger one. Other work delayed two of 45 points of a quick
# profile, to ten times their time. The noise of all points did not show it, and all later runs planned by them.
MOST_OF_LARGER = 2.0


def undelayed(points: Sequence[StepPoint]) -> list[StepPoint]:
    """Return the points that nothing else on the machine delayed.

    A delayed point took more than MOST_OF_LARGER times what a point took that has at least as much of everything.
    """

    def least(point: StepPoint) -> float:
        return min(
            other.seconds
            for other in points
            if other.running >= point.running and other.context >= point.context and other.drafts >= point.drafts
        )

    return [point for point in points if point.seconds <= MOST_OF_LARGER * least(point)]


@dataclass(frozen=True)
class _Carrying:
    """Times of carrying, as `Profile` has them; `notes` say what was not measured, and why."""

    kv_bytes_per_second: float = 0.0
    weight_load_seconds: float = 0.0
    notes: tuple[str, ...] = ("KV transfer and weight load were not measured",)


def _carrying(engine: Engine, on_point: Callable[[str], None]) -> _Carrying:
    on_point("KV transfer")
    bandwidth, no_bandwidth = engine.kv_bandwidth()
    on_point("weight load")
    load, no_load = engine.weight_load()
    missing = (("KV transfer", no_bandwidth), ("weight load", no_load))
    notes = tuple(f"{what} was not measured: {reason}" for what, reason in missing if reason)
    return _Carrying(bandwidth, load, notes)


def _words(shape: StepShape | PrefillShape) -> str:
    if isinstance(shape, PrefillShape):
        return f"prefill of {shape.sequences} x {shape.length} tokens"
    return f"{shape.running} samples x {shape.context_each} tokens, {shape.drafts_each} drafts each"


def _burst(engine: Engine, shape: StepShape | PrefillShape, steps: int) -> list[tuple[float, float]]:
    """Tokens of context and seconds, of each step or prefill of the burst."""
    if isinstance(shape, PrefillShape):
        return [(shape.sequences * shape.length, engine.prefill(shape))]
    return [(step[1], step[3]) for step in engine.decode_steps(shape, steps)]


def _step_point(shape: StepShape, rows: Sequence[tuple[float, float]], least: int) -> StepPoint | None:
    """None where fewer than `least` steps came about."""
    if len(rows) < least:
        return None
    seconds, spread = _median(row[1] for row in rows)
    context = round(statistics.median(row[0] for row in rows))
    return StepPoint(shape.running, context, shape.running * shape.drafts_each, seconds, spread, len(rows))


def _prefill_point(shape: PrefillShape, rows: Sequence[tuple[float, float]]) -> PrefillPoint:
    seconds, spread = _median(row[1] for row in rows) if len(rows) > 1 else (rows[0][1], 0.0)
    return PrefillPoint(shape.sequences, shape.length, seconds, spread, len(rows))


def _median(values: Iterable[float]) -> tuple[float, float]:
    """Median, and half the distance of the quartiles."""
    ordered = sorted(values)
    low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return middle, (high - low) / 2


class _Journal:
    """Bursts that were measured: a first line that says of what, then a line each. `path` None: in memory alone."""

    def __init__(self, path: Path | None, plan: Plan) -> None:
        self._path = path
        self._bursts: dict[str, list[list[tuple[float, float]]]] = {}
        if path is None:
            return
        head = json.dumps(
            {"subject": asdict(plan.subject), "versions": plan.versions, "limits": asdict(plan.limits)}
            | {"walk": asdict(plan.walk), "beside": plan.beside}
        )
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [head]
        for line in lines[1:] if lines and lines[0] == head else ():
            try:
                name, rows = json.loads(line)
            except ValueError:
                # The line during which the last walk was killed.
                break
            self._bursts.setdefault(name, []).append([tuple(row) for row in rows])
            kept.append(line)
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")

    def rounds(self, shape: StepShape | PrefillShape) -> int:
        """Bursts of it so far."""
        return len(self._bursts.get(_words(shape), []))

    def rows(self, shape: StepShape | PrefillShape) -> list[tuple[float, float]]:
        """Return all measured times of a point."""
        return [row for burst in self._bursts.get(_words(shape), []) for row in burst]

    def add(self, shape: StepShape | PrefillShape, burst: list[tuple[float, float]]) -> None:
        """Note it, on disk too."""
        self._bursts.setdefault(_words(shape), []).append(burst)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([_words(shape), burst]) + "\n")
