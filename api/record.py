"""The tables of what runs report: raw events, and what the ingestion derives from them for the pages that ask.

Invariants: a raw event is unique by (attempt, source, sequence); derived rows hold nothing that the raw events do not,
and belong to the newest attempt that reached their step (a resumed run replaces what it does again). Only
`api/ingest.py` writes here.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from rhyme_openrlhf.api.base import Base, BigId

KIND_LENGTH = 32
SOURCE_LENGTH = 64
METRIC_LENGTH = 128
STATE_LENGTH = 16


def _run() -> Mapped[int]:
    return mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))


def _attempt() -> Mapped[int]:
    return mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"))


class EventSource(Base):
    """How far one writer's events have arrived: the next sequence expected, and how many its outbox dropped."""

    __tablename__ = "event_sources"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    source: Mapped[str] = mapped_column(String(SOURCE_LENGTH), primary_key=True)
    next_sequence: Mapped[int] = mapped_column(BigInteger, default=0)
    dropped: Mapped[int] = mapped_column(BigInteger, default=0)


class RawEvent(Base):
    """One event as it came: `body` is its JSON form without the envelope."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("attempt_id", "source", "sequence"),
        Index("ix_events_run_kind_id", "run_id", "kind", "id"),
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    source: Mapped[str] = mapped_column(String(SOURCE_LENGTH))
    sequence: Mapped[int] = mapped_column(BigInteger)
    time: Mapped[float] = mapped_column(Float)
    kind: Mapped[str] = mapped_column(String(KIND_LENGTH))
    body: Mapped[str] = mapped_column(Text)


class Step(Base):
    """Everything about one step over all engines: the run page's curves are columns of this table.

    Seconds by part; counters summed over engines (`telemetry/metrics.py` says what each counts); bubbles by cause in
    engine seconds.
    """

    __tablename__ = "steps"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
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
    # Engine seconds of idle intervals by cause (EngineInterval).
    bubble_tail: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_weights: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_sync: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_switch: Mapped[float] = mapped_column(Float, default=0.0)
    bubble_trainer: Mapped[float] = mapped_column(Float, default=0.0)
    moves: Mapped[int] = mapped_column(Integer, default=0)
    switches: Mapped[int] = mapped_column(Integer, default=0)


class EngineStepRow(Base):
    """What one engine did in one step's rollout stage (EngineStep), and its bubbles in it."""

    __tablename__ = "engine_steps"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
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
    __table_args__ = (
        Index("ix_engine_intervals_run_step_engine", "run_id", "step", "engine"),
        Index("ix_engine_intervals_run_start", "run_id", "start"),
    )

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
    tokens_per_second: Mapped[float] = mapped_column(Float)
    drafted: Mapped[int] = mapped_column(BigInteger)
    accepted: Mapped[int] = mapped_column(BigInteger)


class Metric(Base):
    """One training or evaluation scalar of one step (TrainStep; Evaluation's names begin with "eval/")."""

    __tablename__ = "metrics"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(METRIC_LENGTH), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    # None: not finite (a diverged loss); SQL has no number for it that both databases keep.
    value: Mapped[float | None] = mapped_column(Float)


class Move(Base):
    """A sample handed from one engine to another (SampleMoved)."""

    __tablename__ = "moves"
    __table_args__ = (Index("ix_moves_run_step", "run_id", "step"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    time: Mapped[float] = mapped_column(Float)
    step: Mapped[int] = mapped_column(Integer)
    sample: Mapped[str] = mapped_column(String(64))
    source_engine: Mapped[int] = mapped_column(Integer)
    destination_engine: Mapped[int] = mapped_column(Integer)
    cause: Mapped[str] = mapped_column(String(KIND_LENGTH))
    carrier: Mapped[str] = mapped_column(String(KIND_LENGTH))
    outcome: Mapped[str] = mapped_column(String(KIND_LENGTH))
    seconds: Mapped[float] = mapped_column(Float)
    tokens: Mapped[int] = mapped_column(BigInteger)


class Switch(Base):
    """A node went from one tensor-parallel layout to another (LayoutSwitched)."""

    __tablename__ = "switches"
    __table_args__ = (Index("ix_switches_run_step", "run_id", "step"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = _run()
    attempt_id: Mapped[int] = _attempt()
    time: Mapped[float] = mapped_column(Float)
    step: Mapped[int] = mapped_column(Integer)
    node: Mapped[str] = mapped_column(String(64))
    from_tp: Mapped[int] = mapped_column(Integer)
    to_tp: Mapped[int] = mapped_column(Integer)
    samples: Mapped[int] = mapped_column(Integer)
    seconds: Mapped[float] = mapped_column(Float)


class RankStabilityRow(Base):
    """How alike two epochs rank the same prompts by length (RankStability)."""

    __tablename__ = "rank_stability"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt_id: Mapped[int] = _attempt()
    correlation: Mapped[float] = mapped_column(Float)
    prompts: Mapped[int] = mapped_column(Integer)
