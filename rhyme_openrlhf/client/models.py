"""The JSON of the control plane's responses, as types. `/docs` of the service describes every field.

A newer server may send more fields. Times are unix seconds.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Run(TypedDict):
    """A run as a row of the table of runs."""

    uid: str
    name: str
    experiment: str | None
    parent: str | None
    origin: str
    status: str
    message: str
    tags: list[str]
    created_at: float
    started_at: float | None
    finished_at: float | None
    paused_seconds: float
    paused_at: float | None
    archived_at: float | None
    engines: int | None
    tensor_parallel_size: int | None
    epochs: int | None
    steps_total: int | None
    step: int
    epoch: int
    reward: float | None
    tokens_per_second: float | None
    speculation_rate: float | None
    bubble_fraction: float | None
    dropped_events: int
    last_event_at: float | None
    values: dict[str, float | str | None]


class Attempt(TypedDict):
    """One start or resume of a run."""

    uid: str
    number: int
    resumes: bool
    status: str
    message: str
    submission_id: str | None
    run_directory: str | None
    checkpoint_path: str | None
    queued_at: float
    started_at: float | None
    finished_at: float | None
    heartbeat_at: float | None
    stop_requested_at: float | None


class Phase(TypedDict):
    """A phase of a run, since `since`: `done` of `total` and the seconds it usually takes; `text` says it all."""

    name: str
    text: str
    step: int | None
    done: int | None
    total: int | None
    slowest: str
    since: float
    usual_seconds: float | None


class EarlierRun(TypedDict):
    """An earlier run that has `prompts` `of` a run's prompts, and how often the run's drafts came from it.

    `right_share`: the share of the tokens of drafts from it alone that would have been right.
    """

    name: str
    uid: str | None
    directory: str
    prompts: int
    of: int
    epochs: int
    drafted_from: int
    right_share: float | None
    left_out: bool


class Reason(TypedDict):
    """Something that a person should look at, and the `page` of the run that shows it."""

    level: str
    text: str
    page: str


class Verdict(TypedDict):
    """The health of a run: `level` is healthy, look (a person should look at it) or broken; `text` is one line."""

    level: str
    text: str
    reasons: list[Reason]


class RunDetail(Run):
    """A run with its complete configuration and attempts. `etag`: the state that an edit is based on."""

    verdict: Verdict
    phases: list[Phase]
    earlier_runs: list[EarlierRun]
    notes: str
    spec: dict[str, Any] | None
    command: list[str]
    config: dict[str, Any]
    versions: dict[str, Any]
    created_by: str
    attempts: list[Attempt]
    etag: str


class QueuedRun(TypedDict):
    """A run at `position` in the queue and what it waits for, or at 0 one that has its GPUs, since `since`."""

    uid: str
    name: str
    status: str
    gpus: int
    since: float
    position: int
    why: str


class Queue(TypedDict):
    """The queue. `gpus`: of the cluster, None while it does not respond; `message`: why no run starts now, or ""."""

    gpus: int | None
    max_runs: int
    message: str
    active: list[QueuedRun]
    waiting: list[QueuedRun]


class Experiment(TypedDict):
    """A named set of runs, and their number."""

    id: int
    name: str
    description: str
    created_at: float
    runs: int


class SavedView(TypedDict):
    """A view of the list of runs under a name; `shared`: for everyone."""

    id: int
    name: str
    shared: bool
    created_at: float
    status: list[str]
    origin: list[str]
    tag: str
    experiment: str
    text: str
    filter: str
    archived: str
    sort: str
    direction: str
    columns: list[str]
    values: list[str]


class Spread(TypedDict):
    """Mean and standard deviation of a value over `runs` runs; the deviation of fewer than two is None."""

    runs: int
    mean: float | None
    deviation: float | None


class MeanCurve(TypedDict):
    """The mean over `runs` runs at step `x`, and the mean minus and plus the standard deviation."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[int]


class GroupFigure(TypedDict):
    """A curve of a group: its runs' last and best values, and their mean curve if it was asked for."""

    name: str
    final: Spread
    best: Spread
    curve: MeanCurve | None


class GroupedRun(TypedDict):
    """A run of a group."""

    uid: str
    name: str
    status: str
    seed: Any


class Group(TypedDict):
    """Runs that are equal but for their seed; `options`: the settings in which groups differ."""

    options: dict[str, Any]
    runs: list[GroupedRun]
    figures: list[GroupFigure]


class Groups(TypedDict):
    """The groups of an experiment; `truncated`: older runs were left out."""

    experiment: int
    groups: list[Group]
    truncated: bool


class SweptRun(TypedDict):
    """A run of a sweep, and the values of its options that differ."""

    uid: str
    name: str
    options: dict[str, Any]


class Sweep(TypedDict):
    """The runs of a sweep; `experiment`: the id of the experiment that they share."""

    experiment: int
    name: str
    runs: list[SweptRun]


class Token(TypedDict):
    """An access token without its secret. `expires_at`: None where it works until it is revoked."""

    id: int
    name: str
    role: str
    prefix: str
    run: str | None
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    revoked_at: float | None


class IssuedToken(Token):
    """A new token with its secret."""

    token: str


class AuditEntry(TypedDict):
    """An entry of the audit log. `browser`: done in a browser's session."""

    id: int
    time: float
    token_id: int
    name: str
    browser: bool
    address: str
    action: str
    target: str


class Webhook(TypedDict):
    """A webhook without its secret."""

    id: int
    name: str
    url: str
    form: str
    events: list[str]
    stalled_minutes: float
    reward_fall: float
    idle_percent: float
    active: bool
    created_at: float


class IssuedWebhook(Webhook):
    """A new webhook with the secret that signs its messages."""

    secret: str


class Delivery(TypedDict):
    """A message of a webhook. `state`: waiting, delivered or failed."""

    id: int
    webhook: int
    event: str
    run: str | None
    text: str
    state: str
    tries: int
    created_at: float
    next_at: float | None
    delivered_at: float | None
    status: int | None
    error: str


class Event(TypedDict):
    """A recorded event; `body` has the fields of its kind."""

    id: int
    attempt: int
    source: str
    sequence: int
    time: float
    kind: str
    body: dict[str, Any]


class Curve(TypedDict):
    """A down-sampled curve; `count`: points before down-sampling."""

    name: str
    x: list[float]
    values: list[float | None]
    count: int


class Series(TypedDict):
    """Curves of one run."""

    run: str
    axis: str
    curves: list[Curve]


class LogFile(TypedDict):
    """A log file of an attempt."""

    name: str
    process: str
    size: int
    modified_at: float


class RunFile(TypedDict):
    """A file of a run; `kind`: record, logs, samples, history or checkpoints."""

    name: str
    kind: str
    size: int
    modified_at: float


class RunFiles(TypedDict):
    """The files of an attempt, and where they are on the service's machine."""

    directory: str
    checkpoints: str
    files: list[RunFile]


class SampledSteps(TypedDict):
    """Steps with recorded samples; `missing`: the reason if there are none."""

    steps: list[int]
    missing: str


class SampleGroup(TypedDict):
    """The samples of one prompt in a step; docs/run-files.md has the fields of a sample."""

    group: str
    prompt: str | None
    label: str | None
    reward_mean: float | None
    reward_spread: float | None
    has_signal: bool
    samples: list[dict[str, Any]]


class LogChunk(TypedDict):
    """A part of a log: bytes `start` to `end` (exclusive) of `size`."""

    text: str
    start: int
    end: int
    size: int


class Compared(TypedDict):
    """One run of a comparison; ratios are relative to the first run."""

    run: Run
    figures: dict[str, float | None]
    ratios: dict[str, float | None]
    curves: list[Curve]


class Comparison(TypedDict):
    """Several runs side by side; figures are medians from `from_step` to `to_step`."""

    axis: str
    from_step: int
    to_step: int
    runs: list[Compared]


class Difference(TypedDict):
    """A setting that differs between two runs."""

    name: str
    a: Any
    b: Any
    in_a: bool
    in_b: bool


class ConfigDiff(TypedDict):
    """Differences between the configurations of two runs."""

    a: str
    b: str
    differences: list[Difference]


class ImportReceipt(TypedDict):
    """The result of an import."""

    run: str
    attempt: str
    accepted: int
    duplicates: int
    replaced: bool
    removed: list[str]


class Who(TypedDict):
    """The user of a token."""

    name: str
    role: str
    csrf: str | None
