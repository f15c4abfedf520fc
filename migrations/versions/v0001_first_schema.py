"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Upgrade the schema to version 0001."""
    op.create_table(
        "experiments",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_experiments"),
        sa.UniqueConstraint("name", name="uq_experiments_name"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=16), nullable=False),
        sa.Column("experiment_id", sa.Integer(), nullable=True),
        sa.Column("parent_id", sa.Integer(), nullable=True),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("spec", JSON, nullable=True),
        sa.Column("command", JSON, nullable=False),
        sa.Column("config", JSON, nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("created_by", sa.String(length=200), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("request_digest", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("archived_at", sa.Float(), nullable=True),
        sa.Column("engines", sa.Integer(), nullable=True),
        sa.Column("tensor_parallel_size", sa.Integer(), nullable=True),
        sa.Column("epochs", sa.Integer(), nullable=True),
        sa.Column("steps_total", sa.Integer(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("tokens_per_second", sa.Float(), nullable=True),
        sa.Column("speculation_rate", sa.Float(), nullable=True),
        sa.Column("bubble_fraction", sa.Float(), nullable=True),
        sa.Column("dropped_events", sa.BigInteger(), nullable=False),
        sa.Column("last_event_at", sa.Float(), nullable=True),
        sa.CheckConstraint(
            "status IN ('queued', 'starting', 'running', 'stopping', 'stopped', 'succeeded', 'failed', 'crashed', "
            "'lost')",
            name=op.f("ck_runs_status"),
        ),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name="fk_runs_experiment_id", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(["parent_id"], ["runs.id"], name="fk_runs_parent_id", ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("idempotency_key", name="uq_runs_idempotency_key"),
        sa.UniqueConstraint("uid", name="uq_runs_uid"),
    )
    op.create_index("ix_runs_archived_created", "runs", ["archived_at", "created_at"])
    op.create_index("ix_runs_experiment_id", "runs", ["experiment_id"])
    op.create_index("ix_runs_parent_id", "runs", ["parent_id"])
    op.create_index("ix_runs_status", "runs", ["status"])
    op.create_table(
        "attempts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=16), nullable=False),
        sa.Column("resumes", sa.Boolean(), nullable=False),
        sa.Column("submission_id", sa.String(length=200), nullable=True),
        sa.Column("run_directory", sa.Text(), nullable=True),
        sa.Column("checkpoint_path", sa.Text(), nullable=True),
        sa.Column("first_step", sa.Integer(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("queued_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("stop_requested_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attempts_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.UniqueConstraint("run_id", "number", name="uq_attempts_run_id_number"),
        sa.UniqueConstraint("submission_id", name="uq_attempts_submission_id"),
        sa.UniqueConstraint("uid", name="uq_attempts_uid"),
    )
    op.create_index("ix_attempts_status", "attempts", ["status"])
    op.create_table(
        "engine_intervals",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("engine", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("cause", sa.String(length=16), nullable=False),
        sa.Column("start", sa.Float(), nullable=False),
        sa.Column("end", sa.Float(), nullable=False),
        sa.Column("weight_version", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_engine_intervals_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_engine_intervals"),
    )
    op.create_index("ix_engine_intervals_run_start", "engine_intervals", ["run_id", "start"])
    op.create_index("ix_engine_intervals_run_step_engine", "engine_intervals", ["run_id", "step", "engine"])
    op.create_table(
        "engine_samples",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("engine", sa.Integer(), nullable=False),
        sa.Column("running", sa.Integer(), nullable=False),
        sa.Column("tokens_per_second", sa.Float(), nullable=True),
        sa.Column("drafted", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_engine_samples_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_engine_samples"),
    )
    op.create_index("ix_engine_samples_run_step_engine", "engine_samples", ["run_id", "step", "engine"])
    op.create_table(
        "engine_steps",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("engine", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("weight_version", sa.Integer(), nullable=True),
        sa.Column("response_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_steps", sa.BigInteger(), nullable=False),
        sa.Column("sample_steps", sa.BigInteger(), nullable=False),
        sa.Column("drafted", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("busy_seconds", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_engine_steps_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", "engine", name="pk_engine_steps"),
    )
    op.create_table(
        "epochs",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("steps_begun", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("rollout_seconds", sa.Float(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("response_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reward_sum", sa.Float(), nullable=False),
        sa.Column("rewarded_samples", sa.BigInteger(), nullable=False),
        sa.Column("engine_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_steps", sa.BigInteger(), nullable=False),
        sa.Column("sample_steps", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("drafts", sa.BigInteger(), nullable=False),
        sa.Column("drafted", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("finished_samples", sa.BigInteger(), nullable=False),
        sa.Column("busy_seconds", sa.Float(), nullable=False),
        sa.Column("draft_seconds", sa.Float(), nullable=False),
        sa.Column("timeline_seconds", sa.Float(), nullable=False),
        sa.Column("bubble_tail", sa.Float(), nullable=False),
        sa.Column("bubble_weights", sa.Float(), nullable=False),
        sa.Column("bubble_sync", sa.Float(), nullable=False),
        sa.Column("bubble_switch", sa.Float(), nullable=False),
        sa.Column("bubble_trainer", sa.Float(), nullable=False),
        sa.Column("bubble_unexplained", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_epochs_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "epoch", name="pk_epochs"),
    )
    op.create_table(
        "metrics",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_metrics_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "name", "step", name="pk_metrics"),
    )
    op.create_table(
        "moves",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("sample", sa.String(length=64), nullable=False),
        sa.Column("source_engine", sa.Integer(), nullable=False),
        sa.Column("destination_engine", sa.Integer(), nullable=False),
        sa.Column("cause", sa.String(length=32), nullable=False),
        sa.Column("carrier", sa.String(length=32), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_moves_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_moves"),
    )
    op.create_index("ix_moves_run_step", "moves", ["run_id", "step"])
    op.create_table(
        "rank_stability",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("correlation", sa.Float(), nullable=True),
        sa.Column("prompts", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_rank_stability_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "epoch", name="pk_rank_stability"),
    )
    op.create_table(
        "run_tags",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("tag", sa.String(length=100), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_tags_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "tag", name="pk_run_tags"),
    )
    op.create_index("ix_run_tags_tag", "run_tags", ["tag"])
    op.create_table(
        "steps",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("rollout_seconds", sa.Float(), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=True),
        sa.Column("response_tokens", sa.BigInteger(), nullable=True),
        sa.Column("rollout_reward", sa.Float(), nullable=True),
        sa.Column("length_mean", sa.Float(), nullable=True),
        sa.Column("length_median", sa.Float(), nullable=True),
        sa.Column("length_p95", sa.Float(), nullable=True),
        sa.Column("length_max", sa.Integer(), nullable=True),
        sa.Column("truncated", sa.Integer(), nullable=True),
        sa.Column("experience_seconds", sa.Float(), nullable=True),
        sa.Column("train_seconds", sa.Float(), nullable=True),
        sa.Column("sync_seconds", sa.Float(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("engines", sa.Integer(), nullable=False),
        sa.Column("engine_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_steps", sa.BigInteger(), nullable=False),
        sa.Column("sample_steps", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("drafts", sa.BigInteger(), nullable=False),
        sa.Column("drafted", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("finished_samples", sa.Integer(), nullable=False),
        sa.Column("busy_seconds", sa.Float(), nullable=False),
        sa.Column("draft_seconds", sa.Float(), nullable=False),
        sa.Column("intervals", sa.Integer(), nullable=False),
        sa.Column("bubble_tail", sa.Float(), nullable=False),
        sa.Column("bubble_weights", sa.Float(), nullable=False),
        sa.Column("bubble_sync", sa.Float(), nullable=False),
        sa.Column("bubble_switch", sa.Float(), nullable=False),
        sa.Column("bubble_trainer", sa.Float(), nullable=False),
        sa.Column("bubble_unexplained", sa.Float(), nullable=False),
        sa.Column("moves", sa.Integer(), nullable=False),
        sa.Column("switches", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_steps_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_steps"),
    )
    op.create_table(
        "switches",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(length=253), nullable=False),
        sa.Column("from_tp", sa.Integer(), nullable=False),
        sa.Column("to_tp", sa.Integer(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_switches_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_switches"),
    )
    op.create_index("ix_switches_run_step", "switches", ["run_id", "step"])
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_used_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.CheckConstraint("role IN ('viewer', 'operator', 'reporter')", name=op.f("ck_tokens_role")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_tokens_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("digest", name="uq_tokens_digest"),
    )
    op.create_table(
        "artifacts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_artifacts_attempt_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_artifacts_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_artifacts"),
        sa.UniqueConstraint("attempt_id", "kind", "step", "path", name="uq_artifacts_attempt_id_kind_step_path"),
    )
    op.create_index("ix_artifacts_run_id", "artifacts", ["run_id"])
    op.create_table(
        "browser_sessions",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("token_id", sa.Integer(), nullable=False),
        sa.Column("csrf", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name="fk_browser_sessions_token_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("digest", name="pk_browser_sessions"),
    )
    op.create_index("ix_browser_sessions_token_id", "browser_sessions", ["token_id"])
    op.create_table(
        "event_sources",
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("next_sequence", sa.BigInteger(), nullable=False),
        sa.Column("gaps", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name="fk_event_sources_attempt_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "source", name="pk_event_sources"),
    )
    op.create_table(
        "events",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_events_attempt_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.UniqueConstraint("attempt_id", "source", "sequence", name="uq_events_attempt_id_source_sequence"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_run_kind_id", "events", ["run_id", "kind", "id"])
    op.create_index("ix_events_run_id", "events", ["run_id", "id"])
