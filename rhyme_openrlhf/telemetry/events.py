"""The events of a run: their schema and their JSON form.

An event says what happened; `Recorded` adds when, by whom and as that source's how-manieth. The record of a run is the
sequence of its events, and everything shown about a run (terminal, summary, dashboard) is computed from them.

JSON form: {"kind", "time" (unix seconds), "source" ("driver", "trainer", "engine-0", ...), "sequence" (counted from 0
per source), and the event's fields}. Always strict JSON: a float that is not finite, such as a diverged loss, is
written as the string "nan", "inf" or "-inf".

Compatibility: unknown kinds and unknown fields are a newer writer's and are skipped. A new field needs a default, so
that older records can still be read. A changed meaning needs a new SCHEMA_VERSION.

Counting: steps and epochs count from 1. Weight version 0 is what the run starts with, version v is what training step
v produced.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from rhyme_openrlhf.telemetry.metrics import CountersError, EngineCounters

SCHEMA_VERSION = 1

# The two names in TrainStep that readers rely on: the part that is the rollout stage, and the samples' mean reward.
ROLLOUT_PART = "rollout"
REWARD_METRIC = "reward"

EngineState = Literal["generate", "idle", "sync", "switch"]
BubbleCause = Literal["tail", "weights", "sync", "switch", "trainer", ""]
NoteLevel = Literal["info", "warning", "error"]
Stage = Literal["experience", "train", "sync", "check", "checkpoint", "evaluate"]
RunStatus = Literal["succeeded", "failed", "stopped"]

# Strict JSON has no numbers for these.
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class EventError(ValueError):
    """An event does not have the form of its kind; the message names both, and `kind` and `field` hold them."""

    def __init__(self, kind: str, field: str, problem: str) -> None:
        super().__init__(f"event {kind!r}, field {field!r}: {problem}")
        self.kind = kind
        self.field = field


@dataclass(frozen=True)
class Event:
    """Base of all kinds. A kind is a frozen dataclass whose field names differ from the envelope's."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Recorded:
    """An event with its envelope: unix seconds, who wrote it, and its number (from 0) among that source's events."""

    event: Event
    time: float
    source: str
    sequence: int


@dataclass(frozen=True)
class RunStarted(Event):
    """First event of a run. `steps_per_epoch` is None where the data set's length is not known beforehand."""

    kind: ClassVar[str] = "run_started"
    schema_version: int
    name: str
    command: list[str]
    engines: int
    tensor_parallel_size: int
    epochs: int
    steps_per_epoch: int | None
    prompts_per_step: int
    samples_per_prompt: int
    asynchronous: bool


@dataclass(frozen=True)
class RolloutStarted(Event):
    """The rollout stage of a step begins: `prompts` prompts, `samples` samples in all."""

    kind: ClassVar[str] = "rollout_started"
    step: int
    epoch: int
    prompts: int
    samples: int


@dataclass(frozen=True)
class RolloutProgress(Event):
    """About once a second. All counts are since the rollout stage began, over all engines, as is `seconds`."""

    kind: ClassVar[str] = "rollout_progress"
    step: int
    samples_done: int
    samples_total: int
    response_tokens: int
    seconds: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class RolloutFinished(Event):
    """All samples of a step are generated. Lengths in tokens; `truncated` samples ran into the length limit.

    `reward_mean` is None where rewards are computed later; then `TrainStep.metrics[REWARD_METRIC]` has it.
    """

    kind: ClassVar[str] = "rollout_finished"
    step: int
    epoch: int
    seconds: float
    samples: int
    response_tokens: int
    reward_mean: float | None
    length_mean: float
    length_median: float
    length_p95: float
    length_max: int
    truncated: int


@dataclass(frozen=True)
class EngineStep(Event):
    """What one engine did in one rollout stage; `weight_version` is None where weights are not numbered."""

    kind: ClassVar[str] = "engine_step"
    step: int
    engine: int
    counters: EngineCounters
    weight_version: int | None


@dataclass(frozen=True)
class EngineInterval(Event):
    """From `start` to `end` (unix seconds) one engine was in one state; an engine's intervals do not overlap.

    "sync" is loading weights. `cause` says why an engine was idle, and is empty in the other states.
    """

    kind: ClassVar[str] = "engine_interval"
    engine: int
    state: EngineState
    start: float
    end: float
    step: int
    weight_version: int | None = None
    cause: BubbleCause = ""


@dataclass(frozen=True)
class WeightsPublished(Event):
    """The trainer published a weight version, in `seconds`, as `buckets` pieces of `bytes` bytes in all."""

    kind: ClassVar[str] = "weights_published"
    version: int
    seconds: float
    bytes: int
    buckets: int


@dataclass(frozen=True)
class WeightsLoaded(Event):
    """An engine has loaded a weight version, in `seconds`."""

    kind: ClassVar[str] = "weights_loaded"
    version: int
    engine: int
    seconds: float


@dataclass(frozen=True)
class WeightsChecked(Event):
    """Log-probabilities of a fixed sequence after a weight sync: how far an engine is from the trained model.

    `moved`: how far the engine's own moved by this sync, `policy_moved` the trained model's by this training step
    (largest difference each, None in records of older writers). A sync that did nothing has `moved` 0 while the
    policy moved, and a `max_difference` as large as the policy's movement.
    """

    kind: ClassVar[str] = "weights_checked"
    version: int
    engine: int
    max_difference: float
    moved: float | None = None
    policy_moved: float | None = None


@dataclass(frozen=True)
class TrainStep(Event):
    """A step is finished. `seconds_by_part`: its parts, which do not overlap (ROLLOUT_PART, "train", ...).

    `metrics` are the trainer's scalars (policy_loss, reward, kl, actor_grad_norm, ...).
    """

    kind: ClassVar[str] = "train_step"
    step: int
    epoch: int
    seconds_by_part: dict[str, float]
    metrics: dict[str, float]


@dataclass(frozen=True)
class StageStarted(Event):
    """The trainer begins a stage of training step `step`; the rollout stage has RolloutStarted."""

    kind: ClassVar[str] = "stage_started"
    step: int
    stage: Stage


@dataclass(frozen=True)
class ProcessDied(Event):
    """A process of the run ended that should not have; `healed` says that a new one took its place.

    `name` is what users call it ("engine 1"); `log_tail` are its last log lines, as far as they could be had.
    """

    kind: ClassVar[str] = "process_died"
    name: str
    pid: int
    node: str
    cause: str
    healed: bool
    log_tail: list[str]


@dataclass(frozen=True)
class Evaluation(Event):
    """Results of an evaluation after `step` training steps."""

    kind: ClassVar[str] = "evaluation"
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint of the state after `step` training steps lies at `path`."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    path: str


@dataclass(frozen=True)
class Note(Event):
    """Something a person should read: a start-up phase, a fallback, a warning."""

    kind: ClassVar[str] = "note"
    level: NoteLevel
    text: str


@dataclass(frozen=True)
class RunFinished(Event):
    """Last event of a run that was not killed. `seconds` since it started."""

    kind: ClassVar[str] = "run_finished"
    status: RunStatus
    message: str
    seconds: float


EVENT_CLASSES: tuple[type[Event], ...] = (
    RunStarted,
    RolloutStarted,
    RolloutProgress,
    RolloutFinished,
    EngineStep,
    EngineInterval,
    WeightsPublished,
    WeightsLoaded,
    WeightsChecked,
    TrainStep,
    StageStarted,
    ProcessDied,
    Evaluation,
    CheckpointSaved,
    Note,
    RunFinished,
)

_CLASS_OF_KIND = {cls.kind: cls for cls in EVENT_CLASSES}
_FIELDS = {cls.kind: {field.name: field for field in dataclasses.fields(cls)} for cls in EVENT_CLASSES}
_TYPES: dict[str, dict[str, Any]] = {cls.kind: get_type_hints(cls) for cls in EVENT_CLASSES}
_ENVELOPE_TYPES: dict[str, Any] = {"time": float, "source": str, "sequence": int}


def to_json(event: Event, time: float, source: str, sequence: int) -> dict[str, Any]:
    """The event's JSON form, of plain Python values (NumPy's numbers become plain ones).

    Raises EventError when a value does not have its field's type, so that a bad event fails where it is made.
    """
    row: dict[str, Any] = {"kind": event.kind}
    for name, value in {"time": time, "source": source, "sequence": sequence}.items():
        row[name] = _checked_envelope(event.kind, name, value)
    for name in _FIELDS[event.kind]:
        row[name] = _plain(_checked(event.kind, name, getattr(event, name), _TYPES[event.kind][name]))
    return row


def parse(row: Mapping[str, Any]) -> Recorded | None:
    """The event of a JSON form, or None when its kind is unknown.

    Raises EventError, naming kind and field, when a field is missing or has the wrong type.
    """
    kind = row.get("kind")
    if not isinstance(kind, str):
        raise EventError("?", "kind", "is missing or not a string")
    cls = _CLASS_OF_KIND.get(kind)
    if cls is None:
        return None
    envelope: dict[str, Any] = {}
    for name in _ENVELOPE_TYPES:
        if name not in row:
            raise EventError(kind, name, "is missing")
        envelope[name] = _checked_envelope(kind, name, row[name])
    values: dict[str, Any] = {}
    for name, field in _FIELDS[kind].items():
        if name in row:
            values[name] = _checked(kind, name, row[name], _TYPES[kind][name])
        elif field.default is dataclasses.MISSING:
            raise EventError(kind, name, "is missing")
    return Recorded(event=cls(**values), **envelope)


def _checked_envelope(kind: str, name: str, value: Any) -> Any:
    checked = _checked(kind, name, value, _ENVELOPE_TYPES[name])
    # Unlike a loss, a moment is never "nan": whoever shows the run computes with it.
    if name == "time" and not math.isfinite(checked):
        raise EventError(kind, name, f"must be finite, got {value!r}")
    return checked


def _checked(kind: str, field: str, value: Any, hint: Any) -> Any:
    """`value` as a plain value of type `hint`; raises EventError when it is none."""
    origin = get_origin(hint)
    if origin is types.UnionType:  # only `X | None` is used
        return None if value is None else _checked(kind, field, value, get_args(hint)[0])
    if origin is Literal:
        if value not in get_args(hint):
            raise EventError(kind, field, f"must be one of {', '.join(map(repr, get_args(hint)))}, got {value!r}")
        return value
    if origin is list and isinstance(value, list):
        return [_checked(kind, f"{field}[{i}]", item, get_args(hint)[0]) for i, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _checked(kind, f"{field}.{key}", item, get_args(hint)[1]) for key, item in value.items()}
    if hint is EngineCounters:
        return _checked_counters(kind, field, value)
    if hint in (int, float):
        return _checked_number(kind, field, value, hint)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise EventError(kind, field, f"must be {hint if origin else hint.__name__}, got {value!r}")


def _checked_number(kind: str, field: str, value: Any, hint: type) -> int | float:
    # The abstract types also take NumPy's numbers. bool is an int to Python, but a truth value is no number here.
    if not isinstance(value, bool):
        if hint is int and isinstance(value, numbers.Integral):
            return int(value)
        if hint is float and isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        if hint is float and isinstance(value, numbers.Real):
            try:
                return float(value)
            except OverflowError as error:
                raise EventError(kind, field, "is too large for a float") from error
    raise EventError(kind, field, f"must be {hint.__name__}, got {value!r}")


def _checked_counters(kind: str, field: str, value: Any) -> EngineCounters:
    if isinstance(value, EngineCounters):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise EventError(kind, field, f"must be an object of counters, got {value!r}")
    try:
        return EngineCounters.from_dict(value)
    except CountersError as error:
        raise EventError(kind, f"{field}.{error.field}", str(error)) from error


def _plain(value: Any) -> Any:
    """A checked value as strict JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, EngineCounters):
        return value.to_dict()
    return value
