"""Tables of reported data: raw events, and rows that the ingestion derives from them for the pages.

Invariants:

- A raw event is unique by (attempt, source, sequence).
- Derived rows contain nothing that is not in the raw events. They belong to the newest attempt that reached their step,
  because a resumed run replaces the steps that it repeats.
- Only `api/ingest/store_batch.py` writes here.
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
# Host names have at most 253 characters.
NODE_LENGTH = 253


# Kinds of events that occur once per engine or many times per step. All other kinds are rare, and have an index.
FREQUENT_KINDS = (
    "engine_interval", "engine_sample", "engine_step", "rollout_progress", "sample_moved", "stage_started",
    "weights_loaded",
)  # fmt: skip
# The condition of the index; a query with this condition can use it.
_RARE = text(f"kind NOT IN ({', '.join(map(repr, FREQUENT_KINDS))})")


# Tables that grow with a run's length have no foreign key, because each would cost a look-up per row. Without an index,
# it would also cost a scan per deleted row that it refers to. Only the ingestion writes these tables, with the run's
# row locked, and `api/ingest/deletion.py` deletes their rows with the run.


def _run(primary_key: bool = False) -> Mapped[int]:
    return mapped_column(Integer, primary_key=primary_key, autoincrement=False)


def _attempt() -> Mapped[int]:
    return mapped_column(Integer)


class EventSource(Base):
    """The state of one source's events: the next expected sequence number, and how many below it are missing (`gaps`).

    `events` therefore has `next_sequence - gaps` of its events. `dropped` is the number for people: the larger one of
    the gaps and of the reporter's count of dropped events, which may be its latest ones.
    """

    __tablename__ = "event_sources"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    source: Mapped[str] = mapped_column(String(SOURCE_LENGTH), primary_key=True)
    next_sequence: Mapped[int] = mapped_column(BigInteger, default=0)
    gaps: Mapped[int] = mapped_column(BigInteger, default=0)
    dropped: Mapped[int] = mapped_column(BigInteger, default=0)
    # Number of events dropped by the reporter that an import has filled in.
    filled: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class RawEvent(Base):
    """An event as it arrived: `body` is its JSON form without the envelope."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("attempt_id", "source", "sequence"),
        Index("ix_events_rare", "run_id", "kind", "id", sqlite_where=_RARE, postgresql_where=_RARE),
        Index("ix_events_run_id", "run_id", "id"),
        # An id is never reused, because live streams resume by it.
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
        """Return the body for readers; an earlier version may have stored a command with its secrets."""
        return redact_config(json.loads(self.body))


def of_kinds(kinds: Collection[str]) -> list[ColumnElement[bool] | TextClause]:
    """Return conditions for events of these kinds, which use the index of rare kinds if all are rare."""
    conditions: list[ColumnElement[bool] | TextClause] = [RawEvent.kind.in_(kinds)]
    return conditions if set(kinds) & set(FREQUENT_KINDS) else [*conditions, _RARE]


class Step(Base):
    """All values of one step over all engines; the curves of the run page are columns of this table.

    Columns: seconds by part, counters summed over engines (`telemetry/metrics.py` defines them), and bubbles by cause
    in engine seconds. Non-finite floats (a diverged loss) are NULL here and in every derived table. Summed seconds are
    multiples of `totals.QUANTUM`, so that sums do not depend on the order of events.
    """

    __tablename__ = "steps"
    # Stored in key order, so that a run's steps are adjacent.
    __table_args__ = {"sqlite_with_rowid": False}

    run_id: Mapped[int] = _run(primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    epoch: Mapped[int | None] = mapped_column(Integer)
    started_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)
    # Reported by the rollout stage (RolloutFinished).
    rollout_seconds: Mapped[float | None] = mapped_column(Float)
    samples: Mapped[int | None] = mapped_column(Integer)
    response_tokens: Mapped[int | None] = mapped_column(BigInteger)
    rollout_reward: Mapped[float | None] = mapped_column(Float)
    length_mean: Mapped[float | None] = mapped_column(Float)
    length_median: Mapped[float | None] = mapped_column(Float)
    length_p95: Mapped[float | None] = mapped_column(Float)
    length_max: Mapped[int | None] = mapped_column(Integer)
    truncated: Mapped[int | None] = mapped_column(Integer)
    # Reported by the trainer (TrainStep): seconds of its parts, and the mean reward.
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
    # Parts of `accepted`; the rest came from history.
    accepted_siblings: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    accepted_own: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    accepted_shared: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    accepted_earlier: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # Number of timeline segments, and bubbles inside the rollout stage by cause in engine seconds (EngineInterval); 0
    # until begin and end of the stage are known.
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
    """Sums over the steps of one epoch; epoch 0 holds steps whose epoch is unknown.

    A run's figures are computed from its epochs (`totals.run_figures`), which are few even if it has many steps.
    """

    __tablename__ = "epochs"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True)
    # Steps with any event, and trained steps.
    steps_begun: Mapped[int] = mapped_column(Integer)
    steps: Mapped[int] = mapped_column(Integer)
    rollout_seconds: Mapped[float] = mapped_column(Float)
    samples: Mapped[int] = mapped_column(BigInteger)
    response_tokens: Mapped[int] = mapped_column(BigInteger)
    # Sum over samples of their steps' mean rewards, and the number of these samples.
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
    accepted_shared: Mapped[int] = mapped_column(BigInteger, server_default="0")
    accepted_earlier: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # Rollout seconds of steps with a timeline, and their bubbles.
    timeline_seconds: Mapped[float] = mapped_column(Float)
    bubble_tail: Mapped[float] = mapped_column(Float)
    bubble_weights: Mapped[float] = mapped_column(Float)
    bubble_sync: Mapped[float] = mapped_column(Float)
    bubble_switch: Mapped[float] = mapped_column(Float)
    bubble_trainer: Mapped[float] = mapped_column(Float)
    bubble_unexplained: Mapped[float] = mapped_column(Float)


class EngineStepRow(Base):
    """Counters of one engine in one step's rollout stage (EngineStep)."""

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
    """A lane segment of the bubble timeline (EngineInterval)."""

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
    """A sample of one engine, about once a second while it generates (EngineSample)."""

    __tablename__ = "engine_samples"
    __table_args__ = (Index("ix_engine_samples_run_step_engine", "run_id", "step", "engine"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    time: Mapped[float] = mapped_column(Float)
    step: Mapped[int] = mapped_column(Integer)
    engine: Mapped[int] = mapped_column(Integer)
    running: Mapped[int] = mapped_column(Integer)
    # None: the sample covers no time.
    tokens_per_second: Mapped[float | None] = mapped_column(Float)
    drafted: Mapped[int] = mapped_column(BigInteger)
    accepted: Mapped[int] = mapped_column(BigInteger)
    # Share in use, 0 to 1. None: from an older writer.
    kv_cache: Mapped[float | None] = mapped_column(Float)


class SystemRow(Base):
    """A sample of one machine, every few seconds (SystemSample). It belongs to no step; samples of all attempts
    stay.
    """

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
    # JSON text with one entry per GPU: [[utilisation or null, bytes used, total bytes], ...].
    gpus: Mapped[str] = mapped_column(Text)
    # JSON text: {name: [cores, bytes]} of the run's processes on the machine.
    processes: Mapped[str] = mapped_column(Text)


class Metric(Base):
    """A training or evaluation scalar of one step (TrainStep; names of Evaluation begin with "eval/")."""

    __tablename__ = "metrics"
    # Stored in key order, so that a curve's rows are adjacent.
    __table_args__ = {"sqlite_with_rowid": False}

    run_id: Mapped[int] = _run(primary_key=True)
    name: Mapped[str] = mapped_column(String(METRIC_LENGTH), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    # None: not finite (a diverged loss), for which SQL has no portable number.
    value: Mapped[float | None] = mapped_column(Float)


class CurveBlock(Base):
    """Values of one curve in a range of steps, stored as an array (`api/store/curve_blocks.py`)."""

    __tablename__ = "curve_blocks"
    # SQLite stores rows in key order. PostgreSQL keeps a row on one page instead of cutting it into pieces elsewhere.
    __table_args__ = {"sqlite_with_rowid": False, "postgresql_with": {"toast_tuple_target": 8160}}

    run_id: Mapped[int] = _run(primary_key=True)
    name: Mapped[str] = mapped_column(String(METRIC_LENGTH), primary_key=True)
    # The block begins at step block * BLOCK_STEPS.
    block: Mapped[int] = mapped_column(Integer, primary_key=True)
    # Per existing step, ascending: two bytes (offset) and one float64 (both little endian, NaN without a value).
    offsets: Mapped[bytes] = mapped_column(LargeBinary)
    values: Mapped[bytes] = mapped_column(LargeBinary)


class Move(Base):
    """A sample moved from one engine to another (SampleMoved)."""

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
    # None: unknown, or from an older writer.
    downtime_seconds: Mapped[float | None] = mapped_column(Float)
    predicted_seconds: Mapped[float | None] = mapped_column(Float)


class Switch(Base):
    """A node's change of its tensor-parallel layout (LayoutSwitched)."""

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
    """Similarity of two epochs' rankings of the same prompts by length (RankStability)."""

    __tablename__ = "rank_stability"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    # None: undefined, for instance because all lengths are equal.
    correlation: Mapped[float | None] = mapped_column(Float)
    prompts: Mapped[int] = mapped_column(Integer)
