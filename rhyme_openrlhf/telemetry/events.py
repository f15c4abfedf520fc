"""The events of a run: their schema. Their JSON form (event_json.py) follows from the classes here.

An event says what happened; `Recorded` adds when, by whom and which of that source's events. The record of a run is the
sequence of its events, and everything shown about a run (terminal, summary, dashboard) is computed from them.

Compatibility: unknown kinds and unknown fields are a newer writer's and are skipped. A new field needs a default, so
that older records can still be read. A changed meaning needs a new SCHEMA_VERSION.

Counting: steps and epochs count from 1. Weight version 0 is what the run starts with, version v is what training step
v produced.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec

from rhyme_openrlhf.telemetry.metrics import EngineCounters

SCHEMA_VERSION = 1
# What both databases and every reader of JSON hold exactly. Counts have room for sums.
INT32_MAX, COUNT_MAX = 2**31 - 1, 2**53
Int32 = Annotated[int, msgspec.Meta(ge=-INT32_MAX, le=INT32_MAX)]
Count = Annotated[int, msgspec.Meta(ge=-COUNT_MAX, le=COUNT_MAX)]

# The two names in TrainStep that readers rely on: the part that is the rollout stage, and the samples' mean reward.
ROLLOUT_PART = "rollout"
REWARD_METRIC = "reward"
# What users call the model that is trained.
POLICY = "policy model"

EngineState = Literal["generate", "idle", "sync", "switch"]
BubbleCause = Literal["tail", "weights", "sync", "switch", "trainer", ""]
NoteLevel = Literal["info", "warning", "error"]
MoveCause = Literal["outlier_intra", "outlier_inter", "reallocation", "tp_switch", "engine_lost"]
MoveCarrier = Literal["kv_transfer", "recompute"]
MoveOutcome = Literal["moved", "recomputed", "cancelled", "failed"]
Stage = Literal["experience", "train", "sync", "check", "checkpoint", "evaluate"]
RunStatus = Literal["succeeded", "failed", "stopped"]


def _kind(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, tag_field="kind", tag=_kind):
    """Base of all kinds. A kind is the class's name in small letters; its field names differ from the envelope's.

    Each kind declares `progress`: True if a run that hangs cannot write it. Then it restarts the time limits of
    `run/stage_watch.py`. Kinds that repeat by a clock, or report what was done before, are no progress.
    """

    kind: ClassVar[str]
    progress: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        cls.kind = _kind(cls.__name__)
        if "progress" not in vars(cls):
            raise TypeError(f"event {cls.__name__} declares no progress")


@dataclass(frozen=True)
class Recorded:
    """An event with its envelope: unix seconds, who wrote it, and its number (from 0) among that source's events."""

    event: Event
    time: float
    source: str
    sequence: int


class RunStarted(Event, frozen=True):
    """First event of a run. `steps_per_epoch` is None where the data set's length is not known beforehand."""

    progress: ClassVar[bool] = True
    schema_version: Int32
    name: str
    command: list[str]
    engines: Int32
    tensor_parallel_size: Int32
    epochs: Int32
    steps_per_epoch: Int32 | None
    prompts_per_step: Int32
    samples_per_prompt: Int32
    asynchronous: bool
    emulated: str = ""
    """The machine whose step times the run was stretched to; "": it ran on its own clock."""


class RolloutStarted(Event, frozen=True):
    """The rollout stage of a step begins: `prompts` prompts, `samples` samples in all."""

    progress: ClassVar[bool] = True
    step: Int32
    epoch: Int32
    prompts: Int32
    samples: Int32


class RolloutProgress(Event, frozen=True):
    """About once a second. All counts are since the rollout stage began, over all engines, as is `seconds`.

    The slowest sample is the unfinished one with the most response tokens: of prompt `slowest_prompt` (its key), on
    engine `slowest_engine`, with `slowest_tokens` tokens. None where no sample runs, and in records of older writers.
    """

    progress: ClassVar[bool] = True
    step: Int32
    samples_done: Int32
    samples_total: Int32
    response_tokens: Count
    seconds: float
    drafted: Count
    accepted: Count
    slowest_prompt: str = ""
    slowest_engine: Int32 | None = None
    slowest_tokens: Int32 = 0


class RolloutFinished(Event, frozen=True):
    """All samples of a step are generated. Lengths in tokens; `truncated` samples ran into the length limit.

    `reward_mean` is None where rewards are computed later; then `TrainStep.metrics[REWARD_METRIC]` has it.
    """

    progress: ClassVar[bool] = True
    step: Int32
    epoch: Int32
    seconds: float
    samples: Int32
    response_tokens: Count
    reward_mean: float | None
    length_mean: float
    length_median: float
    length_p95: float
    length_max: Int32
    truncated: Int32

    @classmethod
    def of(
        cls, step: int, epoch: int, seconds: float, lengths: list[int], rewards: list[float], truncated: int
    ) -> RolloutFinished:
        """Return the event, from the response lengths of the samples (at least one) and the rewards that are known."""
        return cls(
            step=step,
            epoch=epoch,
            seconds=seconds,
            samples=len(lengths),
            response_tokens=sum(lengths),
            reward_mean=statistics.fmean(rewards) if rewards else None,
            length_mean=statistics.fmean(lengths),
            length_median=float(statistics.median(lengths)),
            # The smallest length that at least 95 % of the samples do not exceed.
            length_p95=float(sorted(lengths)[-(-len(lengths) * 95 // 100) - 1]),
            length_max=max(lengths),
            truncated=truncated,
        )


class EngineStep(Event, frozen=True):
    """The counters of one engine in one rollout stage; `weight_version` is None where weights are not numbered."""

    progress: ClassVar[bool] = False
    step: Int32
    engine: Int32
    counters: EngineCounters
    weight_version: Int32 | None


class EngineInterval(Event, frozen=True):
    """One engine was in one state from `start` to `end` (unix seconds); an engine's intervals do not overlap.

    "sync" is loading weights. `cause` says why an engine was idle, and is empty in the other states.
    """

    progress: ClassVar[bool] = False
    engine: Int32
    state: EngineState
    start: float
    end: float
    step: Int32
    weight_version: Int32 | None = None
    cause: BubbleCause = ""

    def within(self, start: float, end: float) -> EngineInterval | None:
        """Return the part of it between two moments; None if there is none."""
        start, end = max(self.start, start), min(self.end, end)
        return msgspec.structs.replace(self, start=start, end=end) if start < end else None


class EngineSample(Event, frozen=True):
    """One engine during a rollout: samples running now, and what it did since its last sample.

    About once a second up to 64 engines, and less often of more (training/rollout_watch.py).
    """

    progress: ClassVar[bool] = False
    step: Int32
    engine: Int32
    running: Int32
    seconds: float
    response_tokens: Count
    drafted: Count
    accepted: Count
    kv_cache: float | None = None
    """Share of the KV cache in use, 0 to 1; None in records of older writers."""


class SampleMoved(Event, frozen=True):
    """An unfinished sample went from one engine to another, in `seconds`, with `tokens` tokens of context.

    `downtime_seconds`: from its stop to its first token elsewhere; `predicted_seconds`: what was expected of that.
    None: not known, or a record of an older writer.
    """

    progress: ClassVar[bool] = False
    step: Int32
    sample: str
    source_engine: Int32
    destination_engine: Int32
    cause: MoveCause
    carrier: MoveCarrier
    outcome: MoveOutcome
    seconds: float
    tokens: Count
    downtime_seconds: float | None = None
    predicted_seconds: float | None = None


class LayoutSwitched(Event, frozen=True):
    """A node's unfinished samples went to engines of another tensor-parallel size."""

    progress: ClassVar[bool] = True
    step: Int32
    node: str
    from_tp: Int32
    to_tp: Int32
    samples: Int32
    seconds: float


class RankGroups(Event, frozen=True):
    """The groups of like length that a step's prompts were put into. One entry a group, the shortest first.

    `prompts` and `engines`: how many each group has; `predicted` and `real`: its mean response length in tokens.
    """

    progress: ClassVar[bool] = False
    step: Int32
    prompts: list[int]
    engines: list[int]
    predicted: list[float]
    real: list[float]


class RankStability(Event, frozen=True):
    """Rank correlation (Spearman) of the prompts' median response lengths in this epoch and the one before.

    Then RhymeRL's figure 9 and table 2 (history/ranks.py): what became of the `responses` responses of this epoch in
    `groups` ranking groups predicted from the epoch before. `accurate`: same group or lower. Moved up: `not_last`,
    `within_reach`, `migrated`; these four shares add up to 1. `near_boundary`: moved up one group, into its shorter
    half. All None in records of older writers.
    """

    progress: ClassVar[bool] = False
    epoch: Int32
    correlation: float
    prompts: Int32
    groups: Int32 | None = None
    responses: Int32 | None = None
    accurate: float | None = None
    near_boundary: float | None = None
    not_last: float | None = None
    within_reach: float | None = None
    migrated: float | None = None


class HistoryState(Event, frozen=True):
    """A history worker has indexed its share of step `step`.

    `prompts` it knows (rounds of conversations counted singly); draft indexes in memory (`resident`) and on the disk
    alone (`spilled`); `memory_bytes` of indexes and responses, `disk_bytes` of spilled indexes. Since its last event,
    engines asked for indexes that were in memory (`hits`), that had to be read or built first (`late`), and for
    prompts without history (`misses`).
    """

    progress: ClassVar[bool] = False
    step: Int32
    worker: Int32
    prompts: Int32
    resident: Int32
    spilled: Int32
    memory_bytes: Count
    disk_bytes: Count
    hits: Int32
    late: Int32
    misses: Int32


class EarlierRun(Event, frozen=True):
    """A history worker's account of an earlier run after step `step` (0: at the start), for the worker's own prompts.

    - `run`, `uid`: its name, and its id in a control plane or "". `directory`: where its responses are.
    - `prompts` of this run's `of` prompts were known from it at the start, each from at most `epochs` rollouts; all 0
      for a run that came later.
    - `drafted_from`: how often a prompt's index was built with its responses so far.
    - Of `judged` tokens that drafts from it alone would have had, `right` were right; older ones count less.
    - `left_out`: nothing is drafted from it now.
    """

    progress: ClassVar[bool] = False
    step: Int32
    worker: Int32
    run: str
    uid: str
    directory: str
    prompts: Int32
    of: Int32
    epochs: Int32
    drafted_from: Int32
    judged: Int32
    right: Int32
    left_out: bool


class DraftBudget(Event, frozen=True):
    """An engine's choice of drafts in a step's rollout stage, by how many samples were running.

    One entry for each number of running samples: decode steps with that many, and the mean draft length chosen (tokens
    a sample). Then the mean time of such a decode step in milliseconds, as predicted and as it was. Then the mean
    number of accepted draft tokens of all samples, as expected and as it was (empty in records of older writers).
    """

    progress: ClassVar[bool] = False
    step: Int32
    engine: Int32
    running: list[int]
    decode_steps: list[int]
    draft_length: list[float]
    predicted_ms: list[float]
    real_ms: list[float]
    expected_accepted: list[float] = []
    accepted: list[float] = []


class DraftGain(Event, frozen=True):
    """The gain of drafts on an engine, as the run measured it by leaving them out now and then.

    Tokens per second with drafts / of an engine without speculation: the mean of the last `intervals` comparisons, and
    its 95 % interval. `drafting`: whether drafts are on. `within`: the ratio to the same engine without drafts, which
    is the same where the profile has no engine without speculation; 0 in records of older writers, whose ratio it is.
    Without comparisons (`intervals` 0), these are 0 too. `estimate`: the ratio by the step times that plan drafts; 0
    where it is not known, and in records of older writers.
    """

    progress: ClassVar[bool] = False
    step: Int32
    engine: Int32
    ratio: float
    low: float
    high: float
    intervals: Int32
    drafting: bool
    within: float = 0.0
    estimate: float = 0.0


class OffPolicyness(Event, frozen=True):
    """The age of the weights that a step's samples were begun with: `samples[i]` samples have `values[i]`.

    Off-policyness is the training step minus the weight version minus 1: 0 is on-policy.
    """

    progress: ClassVar[bool] = False
    step: Int32
    values: list[int]
    samples: list[int]
    tokens: list[int] | None = None
    """Response tokens by the weights that generated them (with partial rollout: that their request was begun with);
    None in records of older writers."""


class SystemSample(Event, frozen=True):
    """One node, every few seconds. Shares are 0 to 1; sizes in bytes; None: not known on this machine.

    `cpu`: of all its cores; `load`: over a minute; `disk_free`: where the run directory is; `shared_memory`: used of
    /dev/shm; `object_store`: used of Ray's. The lists have an entry a GPU. `process_cpu` (cores) and `process_memory`
    (resident bytes): the run's processes on this node by name, each with the processes below it.
    """

    progress: ClassVar[bool] = False
    node: str
    cpu: float
    load: float
    memory_used: Count
    memory_total: Count
    disk_free: Count | None
    shared_memory: Count | None
    object_store: Count | None
    gpu: list[float]
    gpu_memory_used: list[int]
    gpu_memory_total: list[int]
    process_cpu: dict[str, float]
    process_memory: dict[str, int]


class WeightsPublished(Event, frozen=True):
    """The trainer published a weight version, in `seconds`, as `buckets` pieces of `bytes` bytes in all."""

    progress: ClassVar[bool] = True
    version: Int32
    seconds: float
    bytes: Count
    buckets: Int32


class WeightsLoaded(Event, frozen=True):
    """An engine has loaded a weight version, in `seconds`."""

    progress: ClassVar[bool] = True
    version: Int32
    engine: Int32
    seconds: float


class WeightsChecked(Event, frozen=True):
    """Log-probabilities of a sequence after a weight sync: how far an engine is from the trained model.

    `moved`: how far the engine's own moved by this sync, `policy_moved` the trained model's by this training step
    (largest difference each, of the tokens that all checks share; None in records of older writers). A sync that did
    nothing has `moved` 0 while the policy moved, and a `max_difference` at least as large as the policy's movement.
    """

    progress: ClassVar[bool] = True
    version: Int32
    engine: Int32
    max_difference: float
    moved: float | None = None
    policy_moved: float | None = None


class TrainStep(Event, frozen=True):
    """A step is finished. `seconds_by_part`: its parts, which do not overlap (ROLLOUT_PART, "train", ...).

    `metrics` are the trainer's scalars (policy_loss, reward, kl, actor_grad_norm, ...).
    """

    progress: ClassVar[bool] = True
    step: Int32
    epoch: Int32
    seconds_by_part: dict[str, float]
    metrics: dict[str, float]


class StageStarted(Event, frozen=True):
    """The trainer begins a stage of training step `step`; the rollout stage has RolloutStarted."""

    progress: ClassVar[bool] = True
    step: Int32
    stage: Stage


class ProcessReady(Event, frozen=True):
    """A process that the first rollout waits for has started: an engine ("engine 1"), or the policy (POLICY)."""

    progress: ClassVar[bool] = True
    name: str


class Measuring(Event, frozen=True):
    """A run without a profile measures the decode steps of an engine: `done` of at most `total` points.

    The last event has `done` = `total`, also where the time for measuring ended before all points were measured.
    """

    progress: ClassVar[bool] = True
    done: Int32
    total: Int32


class ProcessDied(Event, frozen=True):
    """A process of the run ended that should not have; `healed` says that a new one took its place.

    `name` is what users call it ("engine 1"); `log_tail` are its last log lines, as far as they could be had.
    """

    progress: ClassVar[bool] = False
    name: str
    pid: Int32
    node: str
    cause: str
    healed: bool
    log_tail: list[str]


class Evaluation(Event, frozen=True):
    """Results of an evaluation after `step` training steps."""

    progress: ClassVar[bool] = True
    step: Int32
    metrics: dict[str, float]


class EvaluationProgress(Event, frozen=True):
    """About once a second during the evaluation after `step` training steps, if engines did more since the last one.

    What all engines did since the evaluation began; in the streaming pipeline they may still complete a rollout.
    """

    progress: ClassVar[bool] = True
    step: Int32
    samples_done: Int32
    response_tokens: Count
    seconds: float


class CheckpointSaved(Event, frozen=True):
    """A checkpoint of the state after `step` training steps lies at `path`."""

    progress: ClassVar[bool] = True
    step: Int32
    path: str


class Note(Event, frozen=True):
    """Something a person should read: a start-up phase, a fallback, a warning."""

    progress: ClassVar[bool] = False
    level: NoteLevel
    text: str


class RunFinished(Event, frozen=True):
    """Last event of a run that was not killed. `seconds` since it started."""

    progress: ClassVar[bool] = True
    status: RunStatus
    message: str
    seconds: float


EVENT_CLASSES: tuple[type[Event], ...] = tuple(Event.__subclasses__())

# msgspec (0.22) describes a class to itself when it first meets it. Two threads that do so at once end the process.
for _met in EVENT_CLASSES:
    msgspec.json.Decoder(_met)
