"""The events of a run: their schema. `event_json.py` has their JSON form.

An event says what happened; `Recorded` adds when, by whom and which of that source's events. The record of a run is the
sequence of its events, and everything shown about a run (terminal, summary, dashboard) is computed from them.

Compatibility: unknown kinds and unknown fields are a newer writer's and are skipped. A new field needs a default, so
that older records can still be read. A changed meaning needs a new SCHEMA_VERSION.

Counting: steps and epochs count from 1. Weight version 0 is what the run starts with, version v is what training step
v produced.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from rhyme_openrlhf.telemetry.metrics import EngineCounters

SCHEMA_VERSION = 1

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


@dataclass(frozen=True)
class Event:
    """Base of all kinds. A kind is a frozen dataclass whose field names differ from the envelope's.

    Each kind declares `progress`: True if a run that hangs cannot write it. Then it restarts the time limits of
    `run/stage_watch.py`. Kinds that repeat by a clock, or report what was done before, are no progress.
    """

    kind: ClassVar[str]
    progress: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        undeclared = {"kind", "progress"} - set(vars(cls))
        if undeclared:
            raise TypeError(f"event {cls.__name__} declares no {' and no '.join(sorted(undeclared))}")


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
    progress: ClassVar[bool] = True
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
    emulated: str = ""
    """The machine whose step times the run was stretched to; "": it ran on its own clock."""


@dataclass(frozen=True)
class RolloutStarted(Event):
    """The rollout stage of a step begins: `prompts` prompts, `samples` samples in all."""

    kind: ClassVar[str] = "rollout_started"
    progress: ClassVar[bool] = True
    step: int
    epoch: int
    prompts: int
    samples: int


@dataclass(frozen=True)
class RolloutProgress(Event):
    """About once a second. All counts are since the rollout stage began, over all engines, as is `seconds`.

    The slowest sample is the unfinished one with the most response tokens: of prompt `slowest_prompt` (its key), on
    engine `slowest_engine`, with `slowest_tokens` tokens. None where no sample runs, and in records of older writers.
    """

    kind: ClassVar[str] = "rollout_progress"
    progress: ClassVar[bool] = True
    step: int
    samples_done: int
    samples_total: int
    response_tokens: int
    seconds: float
    drafted: int
    accepted: int
    slowest_prompt: str = ""
    slowest_engine: int | None = None
    slowest_tokens: int = 0


@dataclass(frozen=True)
class RolloutFinished(Event):
    """All samples of a step are generated. Lengths in tokens; `truncated` samples ran into the length limit.

    `reward_mean` is None where rewards are computed later; then `TrainStep.metrics[REWARD_METRIC]` has it.
    """

    kind: ClassVar[str] = "rollout_finished"
    progress: ClassVar[bool] = True
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


@dataclass(frozen=True)
class EngineStep(Event):
    """The counters of one engine in one rollout stage; `weight_version` is None where weights are not numbered."""

    kind: ClassVar[str] = "engine_step"
    progress: ClassVar[bool] = False
    step: int
    engine: int
    counters: EngineCounters
    weight_version: int | None


@dataclass(frozen=True)
class EngineInterval(Event):
    """One engine was in one state from `start` to `end` (unix seconds); an engine's intervals do not overlap.

    "sync" is loading weights. `cause` says why an engine was idle, and is empty in the other states.
    """

    kind: ClassVar[str] = "engine_interval"
    progress: ClassVar[bool] = False
    engine: int
    state: EngineState
    start: float
    end: float
    step: int
    weight_version: int | None = None
    cause: BubbleCause = ""

    def within(self, start: float, end: float) -> EngineInterval | None:
        """Return the part of it between two moments; None if there is none."""
        start, end = max(self.start, start), min(self.end, end)
        return replace(self, start=start, end=end) if start < end else None


@dataclass(frozen=True)
class EngineSample(Event):
    """One engine during a rollout: samples running now, and what it did since its last sample.

    About once a second up to 64 engines, and less often of more (training/rollout_watch.py).
    """

    kind: ClassVar[str] = "engine_sample"
    progress: ClassVar[bool] = False
    step: int
    engine: int
    running: int
    seconds: float
    response_tokens: int
    drafted: int
    accepted: int
    kv_cache: float | None = None
    """Share of the KV cache in use, 0 to 1; None in records of older writers."""


@dataclass(frozen=True)
class SampleMoved(Event):
    """An unfinished sample went from one engine to another, in `seconds`, with `tokens` tokens of context.

    `downtime_seconds`: from its stop to its first token elsewhere; `predicted_seconds`: what was expected of that.
    None: not known, or a record of an older writer.
    """

    kind: ClassVar[str] = "sample_moved"
    progress: ClassVar[bool] = False
    step: int
    sample: str
    source_engine: int
    destination_engine: int
    cause: MoveCause
    carrier: MoveCarrier
    outcome: MoveOutcome
    seconds: float
    tokens: int
    downtime_seconds: float | None = None
    predicted_seconds: float | None = None


@dataclass(frozen=True)
class LayoutSwitched(Event):
    """A node's unfinished samples went to engines of another tensor-parallel size."""

    kind: ClassVar[str] = "layout_switched"
    progress: ClassVar[bool] = True
    step: int
    node: str
    from_tp: int
    to_tp: int
    samples: int
    seconds: float


@dataclass(frozen=True)
class RankGroups(Event):
    """The groups of like length that a step's prompts were put into. One entry a group, the shortest first.

    `prompts` and `engines`: how many each group has; `predicted` and `real`: its mean response length in tokens.
    """

    kind: ClassVar[str] = "rank_groups"
    progress: ClassVar[bool] = False
    step: int
    prompts: list[int]
    engines: list[int]
    predicted: list[float]
    real: list[float]


@dataclass(frozen=True)
class RankStability(Event):
    """Rank correlation (Spearman) of the prompts' median response lengths in this epoch and the one before.

    Then RhymeRL's figure 9 and table 2 (history/ranks.py): what became of the `responses` responses of this epoch in
    `groups` ranking groups predicted from the epoch before. `accurate`: same group or lower. Moved up: `not_last`,
    `within_reach`, `migrated`; these four shares add up to 1. `near_boundary`: moved up one group, into its shorter
    half. All None in records of older writers.
    """

    kind: ClassVar[str] = "rank_stability"
    progress: ClassVar[bool] = False
    epoch: int
    correlation: float
    prompts: int
    groups: int | None = None
    responses: int | None = None
    accurate: float | None = None
    near_boundary: float | None = None
    not_last: float | None = None
    within_reach: float | None = None
    migrated: float | None = None


@dataclass(frozen=True)
class HistoryState(Event):
    """A history worker has indexed its share of step `step`.

    `prompts` it knows (rounds of conversations counted singly); draft indexes in memory (`resident`) and on the disk
    alone (`spilled`); `memory_bytes` of indexes and responses, `disk_bytes` of spilled indexes. Since its last event,
    engines asked for indexes that were in memory (`hits`), that had to be read or built first (`late`), and for
    prompts without history (`misses`).
    """

    kind: ClassVar[str] = "history_state"
    progress: ClassVar[bool] = False
    step: int
    worker: int
    prompts: int
    resident: int
    spilled: int
    memory_bytes: int
    disk_bytes: int
    hits: int
    late: int
    misses: int


@dataclass(frozen=True)
class EarlierRun(Event):
    """A history worker's account of an earlier run after step `step` (0: at the start), for the worker's own prompts.

    - `run`, `uid`: its name, and its id in a control plane or "". `directory`: where its responses are.
    - `prompts` of this run's `of` prompts were known from it at the start, each from at most `epochs` rollouts; all 0
      for a run that came later.
    - `drafted_from`: how often a prompt's index was built with its responses so far.
    - Of `judged` tokens that drafts from it alone would have had, `right` were right; older ones count less.
    - `left_out`: nothing is drafted from it now.
    """

    kind: ClassVar[str] = "earlier_run"
    progress: ClassVar[bool] = False
    step: int
    worker: int
    run: str
    uid: str
    directory: str
    prompts: int
    of: int
    epochs: int
    drafted_from: int
    judged: int
    right: int
    left_out: bool


@dataclass(frozen=True)
class DraftBudget(Event):
    """An engine's choice of drafts in a step's rollout stage, by how many samples were running.

    One entry for each number of running samples: decode steps with that many, and the mean draft length chosen (tokens
    a sample). Then the mean time of such a decode step in milliseconds, as predicted and as it was. Then the mean
    number of accepted draft tokens of all samples, as expected and as it was (empty in records of older writers).
    """

    kind: ClassVar[str] = "draft_budget"
    progress: ClassVar[bool] = False
    step: int
    engine: int
    running: list[int]
    decode_steps: list[int]
    draft_length: list[float]
    predicted_ms: list[float]
    real_ms: list[float]
    expected_accepted: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class DraftGain(Event):
    """The gain of drafts on an engine, as the run measured it by leaving them out now and then.

    Tokens per second with drafts / of an engine without speculation: the mean of the last `intervals` comparisons, and
    its 95 % interval. `drafting`: whether drafts are on. `within`: the ratio to the same engine without drafts, which
    is the same where the profile has no engine without speculation; 0 in records of older writers, whose ratio it is.
    Without comparisons (`intervals` 0), these are 0 too. `estimate`: the ratio by the step times that plan drafts; 0
    where it is not known, and in records of older writers.
    """

    kind: ClassVar[str] = "draft_gain"
    progress: ClassVar[bool] = False
    step: int
    engine: int
    ratio: float
    low: float
    high: float
    intervals: int
    drafting: bool
    within: float = 0.0
    estimate: float = 0.0


@dataclass(frozen=True)
class OffPolicyness(Event):
    """The age of the weights that a step's samples were begun with: `samples[i]` samples have `values[i]`.

    Off-policyness is the training step minus the weight version minus 1: 0 is on-policy.
    """

    kind: ClassVar[str] = "off_policyness"
    progress: ClassVar[bool] = False
    step: int
    values: list[int]
    samples: list[int]
    tokens: list[int] | None = None
    """Response tokens by the weights that generated them (with partial rollout: that their request was begun with);
    None in records of older writers."""


@dataclass(frozen=True)
class SystemSample(Event):
    """One node, every few seconds. Shares are 0 to 1; sizes in bytes; None: not known on this machine.

    `cpu`: of all its cores; `load`: over a minute; `disk_free`: where the run directory is; `shared_memory`: used of
    /dev/shm; `object_store`: used of Ray's. The lists have an entry a GPU. `process_cpu` (cores) and `process_memory`
    (resident bytes): the run's processes on this node by name, each with the processes below it.
    """

    kind: ClassVar[str] = "system_sample"
    progress: ClassVar[bool] = False
    node: str
    cpu: float
    load: float
    memory_used: int
    memory_total: int
    disk_free: int | None
    shared_memory: int | None
    object_store: int | None
    gpu: list[float]
    gpu_memory_used: list[int]
    gpu_memory_total: list[int]
    process_cpu: dict[str, float]
    process_memory: dict[str, int]


@dataclass(frozen=True)
class WeightsPublished(Event):
    """The trainer published a weight version, in `seconds`, as `buckets` pieces of `bytes` bytes in all."""

    kind: ClassVar[str] = "weights_published"
    progress: ClassVar[bool] = True
    version: int
    seconds: float
    bytes: int
    buckets: int


@dataclass(frozen=True)
class WeightsLoaded(Event):
    """An engine has loaded a weight version, in `seconds`."""

    kind: ClassVar[str] = "weights_loaded"
    progress: ClassVar[bool] = True
    version: int
    engine: int
    seconds: float


@dataclass(frozen=True)
class WeightsChecked(Event):
    """Log-probabilities of a sequence after a weight sync: how far an engine is from the trained model.

    `moved`: how far the engine's own moved by this sync, `policy_moved` the trained model's by this training step
    (largest difference each, of the tokens that all checks share; None in records of older writers). A sync that did
    nothing has `moved` 0 while the policy moved, and a `max_difference` at least as large as the policy's movement.
    """

    kind: ClassVar[str] = "weights_checked"
    progress: ClassVar[bool] = True
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
    progress: ClassVar[bool] = True
    step: int
    epoch: int
    seconds_by_part: dict[str, float]
    metrics: dict[str, float]


@dataclass(frozen=True)
class StageStarted(Event):
    """The trainer begins a stage of training step `step`; the rollout stage has RolloutStarted."""

    kind: ClassVar[str] = "stage_started"
    progress: ClassVar[bool] = True
    step: int
    stage: Stage


@dataclass(frozen=True)
class ProcessReady(Event):
    """A process that the first rollout waits for has started: an engine ("engine 1"), or the policy (POLICY)."""

    kind: ClassVar[str] = "process_ready"
    progress: ClassVar[bool] = True
    name: str


@dataclass(frozen=True)
class Measuring(Event):
    """A run without a profile measures the decode steps of an engine: `done` of at most `total` points.

    The last event has `done` = `total`, also where the time for measuring ended before all points were measured.
    """

    kind: ClassVar[str] = "measuring"
    progress: ClassVar[bool] = True
    done: int
    total: int


@dataclass(frozen=True)
class ProcessDied(Event):
    """A process of the run ended that should not have; `healed` says that a new one took its place.

    `name` is what users call it ("engine 1"); `log_tail` are its last log lines, as far as they could be had.
    """

    kind: ClassVar[str] = "process_died"
    progress: ClassVar[bool] = False
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
    progress: ClassVar[bool] = True
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class EvaluationProgress(Event):
    """About once a second during the evaluation after `step` training steps, if engines did more since the last one.

    What all engines did since the evaluation began; in the streaming pipeline they may still complete a rollout.
    """

    kind: ClassVar[str] = "evaluation_progress"
    progress: ClassVar[bool] = True
    step: int
    samples_done: int
    response_tokens: int
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint of the state after `step` training steps lies at `path`."""

    kind: ClassVar[str] = "checkpoint_saved"
    progress: ClassVar[bool] = True
    step: int
    path: str


@dataclass(frozen=True)
class Note(Event):
    """Something a person should read: a start-up phase, a fallback, a warning."""

    kind: ClassVar[str] = "note"
    progress: ClassVar[bool] = False
    level: NoteLevel
    text: str


@dataclass(frozen=True)
class RunFinished(Event):
    """Last event of a run that was not killed. `seconds` since it started."""

    kind: ClassVar[str] = "run_finished"
    progress: ClassVar[bool] = True
    status: RunStatus
    message: str
    seconds: float


EVENT_CLASSES: tuple[type[Event], ...] = (
    RunStarted, RolloutStarted, RolloutProgress, RolloutFinished, EngineStep, EngineInterval, EngineSample,
    SampleMoved, LayoutSwitched, RankStability, HistoryState, EarlierRun, RankGroups, DraftBudget, DraftGain,
    OffPolicyness, SystemSample,
    WeightsPublished, WeightsLoaded, WeightsChecked, TrainStep, StageStarted, ProcessReady, Measuring, ProcessDied,
    Evaluation, EvaluationProgress, CheckpointSaved, Note, RunFinished,
)  # fmt: skip
