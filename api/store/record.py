"""The tables of what runs report: raw events, and what the ingestion derives from them for the pages that ask.

Invariants: a raw event is unique by (attempt, source, sequence); derived rows hold nothing that the raw events do not,
and belong to the newest attempt that reached their step (a resumed run replaces what it does again). Only
`api/ingest/store_batch.py` writes here.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    TextClause,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from rhyme_openrlhf.api.store.base import Base, BigId
from rhyme_openrlhf.settings.redaction import redact_config

KIND_LENGTH = 32
SOURCE_LENGTH = 64
METRIC_LENGTH = 128
STATE_LENGTH = 16
SAMPLE_LENGTH = 64
# Host names are at most 253 characters long.
NODE_LENGTH = 253


# Kinds that come for every engine or many times a step. The others are few, and an index of their own finds them.
FREQUENT_KINDS = (
    "engine_interval", "engine_sample", "engine_step", "rollout_progress", "sample_moved", "stage_started",
    "weights_loaded",
)  # fmt: skip
# As the index says it: with this in its condition, a query may use it.
_RARE = text(f"kind NOT IN ({', '.join(map(repr, FREQUENT_KINDS))})")


# No foreign key in the tables that grow with a run's length: each costs a look-up for every row, and without an index
# of its own a scan for every row that it refers to and that is deleted. Only the ingestion writes them, with the run's
# row locked, and `api/ingest/deletion.py` takes them out with their run.


def _run(primary_key: bool = False) -> Mapped[int]:
    return mapped_column(Integer, primary_key=primary_key, autoincrement=False)


def _attempt() -> Mapped[int]:
    return mapped_column(Integer)


class EventSource(Base):
    """How far one writer's events have arrived: the next sequence expected, and how many below it never came (`gaps`).

    So `next_sequence - gaps` events of it are in `events`. `dropped` is what is shown: the larger of the gaps and what
    the reporter said it gave up, which may be its latest events.
    """

    __tablename__ = "event_sources"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    source: Mapped[str] = mapped_column(String(SOURCE_LENGTH), primary_key=True)
    next_sequence: Mapped[int] = mapped_column(BigInteger, default=0)
    gaps: Mapped[int] = mapped_column(BigInteger, default=0)
    dropped: Mapped[int] = mapped_column(BigInteger, default=0)
    # Of what the reporter says that it gave up since the attempt began, how much an import has brought in.
    filled: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class RawEvent(Base):
    """One event as it came: `body` is its JSON form without the envelope."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("attempt_id", "source", "sequence"),
        Index("ix_events_rare", "run_id", "kind", "id", sqlite_where=_RARE, postgresql_where=_RARE),
        Index("ix_events_run_id", "run_id", "id"),
        # An id is never used again: live streams resume by it.
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    source: Mapped[str] = mapped_column(String(SOURCE_LENGTH))
    sequence: Mapped[int] = mapped_column(BigInteger)
    time: Mapped[float] = mapped_column(Float)
    kind: Mapped[str] = mapped_column(String(KIND_LENGTH))
    body: Mapped[str] = mapped_column(Text)

    def content(self) -> dict[str, Any]:
        """Return the body as it may be shown: an earlier version may have stored a command with its secrets."""
        return redact_config(json.loads(self.body))


def of_kinds(kinds: Collection[str]) -> list[ColumnElement[bool] | TextClause]:
    """Conditions for events of these kinds, such that the index of rare kinds is used where they all are."""
    conditions: list[ColumnElement[bool] | TextClause] = [RawEvent.kind.in_(kinds)]
    return conditions if set(kinds) & set(FREQUENT_KINDS) else [*conditions, _RARE]


class Step(Base):
    """Everything about one step over all engines: the run page's curves are columns of this table.

    Seconds by part; counters summed over engines (`telemetry/metrics.py` says what each counts); bubbles by cause in
    engine seconds. Floats that are not finite (a diverged loss) are NULL here and in every derived table. Seconds that
    are summed are whole multiples of `totals.QUANTUM`, so that sums do not depend on the order in which events arrive.
    """

    __tablename__ = "steps"
    # Kept in the order of its key, so that a run's steps lie in one piece.
    __table_args__ = {"sqlite_with_rowid": False}

    run_id: Mapped[int] = _run(primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    epoch: Mapped[int | None] = mapped_column(Integer)
    started_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)
    # What the rollout stage reported (RolloutFinished).
    rollout_seconds: Mapped[float | None] = mapped_column(Float)
    samples: Mapped[int | None] = mapped_column(Integer)
    response_tokens: Mapped[int | None] = mapped_column(BigInteger)
    rollout_reward: Mapped[float | None] = mapped_column(Float)
    length_mean: Mapped[float | None] = mapped_column(Float)
    length_median: Mapped[float | None] = mapped_column(Float)
    length_p95: Mapped[float | None] = mapped_column(Float)
    length_max: Mapped[int | None] = mapped_column(Integer)
    truncated: Mapped[int | None] = mapped_column(Integer)
    # What the trainer reported (TrainStep): seconds of its parts, and the mean reward.
    experience_seconds: Mapped[float | None] = mapped_column(Float)
    train_seconds: Mapped[float | None] = mapped_column(Float)
    sync_seconds: Mapped[float | None] = mapped_column(Float)
    reward: Mapped[float | None] = mapped_column(Float)
    # Sums over engines (EngineStep).
    engines: Mapped[int] = mapped_column(Integer, default=0)
    engine_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    decode_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    decode_steps: Mapped[int] = mapped_column(BigInteger, default=0)
    sample_steps: Mapped[int] = mapped_column(BigInteger, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    drafts: Mapped[int] = mapped_column(BigInteger, default=0)
    drafted: Mapped[int] = mapped_column(BigInteger, default=0)
    accepted: Mapped[int] = mapped_column(BigInteger, default=0)
    finished_samples: Mapped[int] = mapped_column(Integer, default=0)
    busy_seconds: Mapped[float] = mapped_column(Float, default=0.0)
    draft_seconds: Mapped[float] = mapped_column(Float, default=0.0)
    # Of `accepted`; what is left of it is from history.
    accepted_siblings: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    accepted_own: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # Timeline segments, and engine seconds of bubbles inside the rollout stage by cause (EngineInterval); 0 until the
    # stage's begin and end are both known.
    intervals: Mapped[int] = mapped_column(Integer, default=0)
    bubble_tail: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_weights: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_sync: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_switch: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_trainer: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_unexplained: Mapped[float] = mapped_column(Float, default=0.0)
    moves: Mapped[int] = mapped_column(Integer, default=0)
    switches: Mapped[int] = mapped_column(Integer, default=0)


class EpochRow(Base):
    """Sums over the steps of one epoch; epoch 0 are the steps whose epoch has not been heard of yet.

    A run's figures are computed from its epochs (`totals.run_figures`), which stay few when its steps are many.
    """

    __tablename__ = "epochs"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True)
    # Steps with any event, and those that were trained on.
    steps_begun: Mapped[int] = mapped_column(Integer)
    steps: Mapped[int] = mapped_column(Integer)
    rollout_seconds: Mapped[float] = mapped_column(Float)
    samples: Mapped[int] = mapped_column(BigInteger)
    response_tokens: Mapped[int] = mapped_column(BigInteger)
    # Sum over samples of their steps' mean rewards, and how many samples those are.
    reward_sum: Mapped[float] = mapped_column(Float)
    rewarded_samples: Mapped[int] = mapped_column(BigInteger)
    engine_tokens: Mapped[int] = mapped_column(BigInteger)
    decode_tokens: Mapped[int] = mapped_column(BigInteger)
    decode_steps: Mapped[int] = mapped_column(BigInteger)
    sample_steps: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    drafts: Mapped[int] = mapped_column(BigInteger)
    drafted: Mapped[int] = mapped_column(BigInteger)
    accepted: Mapped[int] = mapped_column(BigInteger)
    finished_samples: Mapped[int] = mapped_column(BigInteger)
    busy_seconds: Mapped[float] = mapped_column(Float)
    draft_seconds: Mapped[float] = mapped_column(Float)
    accepted_siblings: Mapped[int] = mapped_column(BigInteger, server_default="0")
    accepted_own: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # Rollout seconds of the steps that have a timeline, and the bubbles in them.
    timeline_seconds: Mapped[float] = mapped_column(Float)
    bubble_tail: Mapped[float] = mapped_column(Float)
    bubble_weights: Mapped[float] = mapped_column(Float)
    bubble_sync: Mapped[float] = mapped_column(Float)
    bubble_switch: Mapped[float] = mapped_column(Float)
    bubble_trainer: Mapped[float] = mapped_column(Float)
    bubble_unexplained: Mapped[float] = mapped_column(Float)


class EngineStepRow(Base):
    """What one engine did in one step's rollout stage (EngineStep)."""

    __tablename__ = "engine_steps"
    # Kept in the order of its key.
    __table_args__ = {"sqlite_with_rowid": False}

    run_id: Mapped[int] = _run(primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    engine: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    weight_version: Mapped[int | None] = mapped_column(Integer)
    response_tokens: Mapped[int] = mapped_column(BigInteger)
    decode_tokens: Mapped[int] = mapped_column(BigInteger)
    decode_steps: Mapped[int] = mapped_column(BigInteger)
    sample_steps: Mapped[int] = mapped_column(BigInteger)
    drafted: Mapped[int] = mapped_column(BigInteger)
    accepted: Mapped[int] = mapped_column(BigInteger)
    busy_seconds: Mapped[float] = mapped_column(Float)


class Interval(Base):
    """One lane segment of the bubble timeline (EngineInterval)."""

    __tablename__ = "engine_intervals"
    __table_args__ = (Index("ix_engine_intervals_run_step_engine", "run_id", "step", "engine"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    step: Mapped[int] = mapped_column(Integer)
    engine: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(STATE_LENGTH))
    cause: Mapped[str] = mapped_column(String(STATE_LENGTH), default="")
    start: Mapped[float] = mapped_column(Float)
    end: Mapped[float] = mapped_column(Float)
    weight_version: Mapped[int | None] = mapped_column(Integer)


class EngineSampleRow(Base):
    """One engine, about once a second while it generates (EngineSample)."""

    __tablename__ = "engine_samples"
    __table_args__ = (Index("ix_engine_samples_run_step_engine", "run_id", "step", "engine"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    time: Mapped[float] = mapped_column(Float)
    step: Mapped[int] = mapped_column(Integer)
    engine: Mapped[int] = mapped_column(Integer)
    running: Mapped[int] = mapped_column(Integer)
    # None: its sample was over no time.
    tokens_per_second: Mapped[float | None] = mapped_column(Float)
    drafted: Mapped[int] = mapped_column(BigInteger)
    accepted: Mapped[int] = mapped_column(BigInteger)
    # Share in use, 0 to 1. None: an older writer's.
    kv_cache: Mapped[float | None] = mapped_column(Float)


class SystemRow(Base):
    """One machine of a run, every few seconds (SystemSample). It belongs to no step; all attempts' stay."""

    __tablename__ = "system_samples"
    __table_args__ = (Index("ix_system_samples_run_time", "run_id", "time"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    time: Mapped[float] = mapped_column(Float)
    node: Mapped[str] = mapped_column(String(NODE_LENGTH))
    cpu: Mapped[float | None] = mapped_column(Float)
    load: Mapped[float | None] = mapped_column(Float)
    memory_used: Mapped[int] = mapped_column(BigInteger)
    memory_total: Mapped[int] = mapped_column(BigInteger)
    disk_free: Mapped[int | None] = mapped_column(BigInteger)
    shared_memory: Mapped[int | None] = mapped_column(BigInteger)
    object_store: Mapped[int | None] = mapped_column(BigInteger)
    # JSON text: [[utilisation or null, bytes used, bytes in all], ...], an entry a GPU.
    gpus: Mapped[str] = mapped_column(Text)
    # JSON text: {name: [cores, bytes]} of the run's processes there.
    processes: Mapped[str] = mapped_column(Text)


class Metric(Base):
    """One training or evaluation scalar of one step (TrainStep; Evaluation's names begin with "eval/")."""

    __tablename__ = "metrics"
    # Kept in the order of its key, so that a curve lies in one piece.
    __table_args__ = {"sqlite_with_rowid": False}

    run_id: Mapped[int] = _run(primary_key=True)
    name: Mapped[str] = mapped_column(String(METRIC_LENGTH), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    # None: not finite (a diverged loss); SQL has no number for it that both databases keep.
    value: Mapped[float | None] = mapped_column(Float)


class CurveBlock(Base):
    """Some steps of one curve of a step or metric, value beside value (`api/store/curve_blocks.py`)."""

    __tablename__ = "curve_blocks"
    # Kept in the order of its key.
    __table_args__ = {"sqlite_with_rowid": False}

    run_id: Mapped[int] = _run(primary_key=True)
    name: Mapped[str] = mapped_column(String(METRIC_LENGTH), primary_key=True)
    # `block` has the steps from block * BLOCK_STEPS on.
    block: Mapped[int] = mapped_column(Integer, primary_key=True)
    # A byte a step that is there, ascending, and a float64 (little endian) each; NaN where it has no value.
    offsets: Mapped[bytes] = mapped_column(LargeBinary)
    values: Mapped[bytes] = mapped_column(LargeBinary)


class CurveStretch(Base):
    """What some blocks of a curve that follow each other hold (`api/store/curve_stretches.py`)."""

    __tablename__ = "curve_stretches"
    # On PostgreSQL a row stays on one page instead of being cut into pieces of 2,000 bytes elsewhere.
    __table_args__ = {"sqlite_with_rowid": False, "postgresql_with": {"toast_tuple_target": 8160}}

    run_id: Mapped[int] = _run(primary_key=True)
    name: Mapped[str] = mapped_column(String(METRIC_LENGTH), primary_key=True)
    # `stretch` has the blocks from stretch * STRETCH_BLOCKS on.
    stretch: Mapped[int] = mapped_column(Integer, primary_key=True)
    # As in a block, with two bytes (little endian) for each step.
    offsets: Mapped[bytes] = mapped_column(LargeBinary)
    values: Mapped[bytes] = mapped_column(LargeBinary)


class Move(Base):
    """A sample handed from one engine to another (SampleMoved)."""

    __tablename__ = "moves"
    __table_args__ = (Index("ix_moves_run_step", "run_id", "step"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    time: Mapped[float] = mapped_column(Float)
    step: Mapped[int] = mapped_column(Integer)
    sample: Mapped[str] = mapped_column(String(SAMPLE_LENGTH))
    source_engine: Mapped[int] = mapped_column(Integer)
    destination_engine: Mapped[int] = mapped_column(Integer)
    cause: Mapped[str] = mapped_column(String(KIND_LENGTH))
    carrier: Mapped[str] = mapped_column(String(KIND_LENGTH))
    outcome: Mapped[str] = mapped_column(String(KIND_LENGTH))
    seconds: Mapped[float | None] = mapped_column(Float)
    tokens: Mapped[int] = mapped_column(BigInteger)
    # None: not known, or an older writer's.
    downtime_seconds: Mapped[float | None] = mapped_column(Float)
    predicted_seconds: Mapped[float | None] = mapped_column(Float)


class Switch(Base):
    """A node went from one tensor-parallel layout to another (LayoutSwitched)."""

    __tablename__ = "switches"
    __table_args__ = (Index("ix_switches_run_step", "run_id", "step"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    time: Mapped[float] = mapped_column(Float)
    step: Mapped[int] = mapped_column(Integer)
    node: Mapped[str] = mapped_column(String(NODE_LENGTH))
    from_tp: Mapped[int] = mapped_column(Integer)
    to_tp: Mapped[int] = mapped_column(Integer)
    samples: Mapped[int] = mapped_column(Integer)
    seconds: Mapped[float | None] = mapped_column(Float)


class RankStabilityRow(Base):
    """How alike two epochs rank the same prompts by length (RankStability)."""

    __tablename__ = "rank_stability"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    # None: it has none, for instance because all lengths are equal.
    correlation: Mapped[float | None] = mapped_column(Float)
    prompts: Mapped[int] = mapped_column(Integer)
