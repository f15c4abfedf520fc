"""Tables of what users manage: experiments, runs, attempts, tokens, webhooks, views. `record.py` has reported data.

A run is one requested training. An attempt is one start or resume of a run, with one Ray job and one run directory.

Invariants: a run's status is that of its newest attempt. Attempts are numbered from 1, and a number is missing only if
its attempt was removed. People and URLs use `uid`s, never row numbers.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import Mapped, mapped_column, relationship

from rhyme_openrlhf.api.store.base import Base, Json, RedactedJson
from rhyme_openrlhf.api.store.status import RUN_STATUSES
from rhyme_openrlhf.settings.control import UID_DIGITS
from rhyme_openrlhf.settings.redaction import redact_command, redact_config

# Public ids, as made by `config.new_uid`.
UID_LENGTH = UID_DIGITS
NAME_LENGTH = 200
# Of a client: an IPv6 address with a zone. Of what was changed: a path of the API.
ADDRESS_LENGTH, TARGET_LENGTH = 64, 500
STATUS_LENGTH = 16


class Experiment(Base):
    """A named set of runs."""

    __tablename__ = "experiments"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), unique=True)
    description: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[float] = mapped_column(Float)


class Run(Base):
    """A run as users see it. `spec` (`api/launch/spec.py`): its specification, None if it was not started here.

    The second half of the columns is a roll-up of the attempts' reports, maintained by the ingestion, so that a table
    of runs needs no other table.
    """

    __tablename__ = "runs"
    __table_args__ = (
        CheckConstraint(f"status IN ({', '.join(map(repr, RUN_STATUSES))})", name="status"),
        Index("ix_runs_archived_created", "archived_at", "created_at"),
        Index("ix_runs_status", "status"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = mapped_column(String(UID_LENGTH), unique=True)
    experiment_id: Mapped[int | None] = mapped_column(ForeignKey("experiments.id", ondelete="SET NULL"), index=True)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"), index=True)
    # "launched" by this service, "reported" by `rhyme train --control.url`, or "imported" from a run directory.
    origin: Mapped[str] = mapped_column(String(STATUS_LENGTH))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    notes: Mapped[str] = mapped_column(Text, default="")
    status: Mapped[str] = mapped_column(String(STATUS_LENGTH))
    message: Mapped[str] = mapped_column(Text, default="")
    spec: Mapped[dict[str, Any] | None] = mapped_column(Json)
    command: Mapped[list[str]] = mapped_column(RedactedJson(redact_command), default=list)
    config: Mapped[dict[str, Any]] = mapped_column(RedactedJson(redact_config), default=dict)
    versions: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    created_by: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    # The token that announced the run and may report for it (`announce.admit`). None: launched, imported, or stored by
    # an older version. No foreign key, because tokens refer to runs; a general token is never deleted.
    reporter_id: Mapped[int | None] = mapped_column(Integer)
    idempotency_key: Mapped[str | None] = mapped_column(String(NAME_LENGTH), unique=True)
    # SHA-256 of the request that created the run: the same key with another body is a conflict.
    request_digest: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)
    # Seconds between the end of one attempt and the start of the next one.
    paused_seconds: Mapped[float] = mapped_column(Float, default=0.0, server_default="0")
    # The end of the last attempt that started, while the next one waits for its start.
    paused_at: Mapped[float | None] = mapped_column(Float)
    archived_at: Mapped[float | None] = mapped_column(Float)

    # Roll-up. `engines` to `steps_total` come from the newest attempt's RunStarted; `step` is the last trained one.
    # Rates are over all steps, `reward` over the last epoch with rewards, as `telemetry/summary.py` defines them.
    engines: Mapped[int | None] = mapped_column(Integer)
    tensor_parallel_size: Mapped[int | None] = mapped_column(Integer)
    epochs: Mapped[int | None] = mapped_column(Integer)
    steps_total: Mapped[int | None] = mapped_column(Integer)
    step: Mapped[int] = mapped_column(Integer, default=0)
    epoch: Mapped[int] = mapped_column(Integer, default=0)
    reward: Mapped[float | None] = mapped_column(Float)
    tokens_per_second: Mapped[float | None] = mapped_column(Float)
    speculation_rate: Mapped[float | None] = mapped_column(Float)
    bubble_fraction: Mapped[float | None] = mapped_column(Float)
    dropped_events: Mapped[int] = mapped_column(BigInteger, default=0)
    # Blocks (`api/store/curve_blocks.py`) hold its curves up to before this step.
    packed_steps: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    last_event_at: Mapped[float | None] = mapped_column(Float)

    attempts: Mapped[list[Attempt]] = relationship(back_populates="run", order_by="Attempt.number")
    tags: Mapped[list[RunTag]] = relationship(cascade="all, delete-orphan", order_by="RunTag.tag")


class RunTag(Base):
    """A tag of a run."""

    __tablename__ = "run_tags"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(String(100), primary_key=True, index=True)


class RunParameter(Base):
    """A setting of a run (`api/store/parameters.py`); `number` is None if its value is none."""

    __tablename__ = "run_parameters"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True, index=True)
    number: Mapped[float | None] = mapped_column(Float)
    text: Mapped[str] = mapped_column(Text)


class Attempt(Base):
    """One start or resume of a run."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    number: Mapped[int] = mapped_column(Integer)
    # The reporter's name of the attempt: created at its start, unique over all machines.
    uid: Mapped[str] = mapped_column(String(UID_LENGTH), unique=True)
    resumes: Mapped[bool] = mapped_column(default=False)
    # True if the service started it, its run directory was imported, or a token of its run announced it. An import
    # removes newer attempts without this.
    vouched: Mapped[bool] = mapped_column(default=False, server_default=false())
    submission_id: Mapped[str | None] = mapped_column(String(NAME_LENGTH), unique=True)
    # Of the request that resumed the run; a repeated request adds no second attempt.
    idempotency_key: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    # The cluster on which it was started (`Launching.cluster`), set with "starting"; no other cluster may start it.
    cluster: Mapped[str | None] = mapped_column(Text)
    run_directory: Mapped[str | None] = mapped_column(Text)
    checkpoint_path: Mapped[str | None] = mapped_column(Text)
    # The lowest step it reported: from this step on, its derived rows replace those of older attempts.
    first_step: Mapped[int | None] = mapped_column(Integer)
    status: Mapped[str] = mapped_column(String(STATUS_LENGTH), index=True)
    message: Mapped[str] = mapped_column(Text, default="")
    queued_at: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)
    # Time of the last transaction of an import that is replacing its events; None if none is.
    replacing_at: Mapped[float | None] = mapped_column(Float)
    # Time of the reporter's last message, by the server's clock.
    heartbeat_at: Mapped[float | None] = mapped_column(Float)
    stop_requested_at: Mapped[float | None] = mapped_column(Float)

    run: Mapped[Run] = relationship(back_populates="attempts")


class Artifact(Base):
    """A file or directory that an attempt has written: a checkpoint, a summary, a log."""

    __tablename__ = "artifacts"
    __table_args__ = (UniqueConstraint("attempt_id", "kind", "step", "path"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(STATUS_LENGTH))
    step: Mapped[int] = mapped_column(Integer, default=0)
    path: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)


class Token(Base):
    """An access token. Only its SHA-256 is stored; people recognise it by `prefix`."""

    __tablename__ = "tokens"
    __table_args__ = (CheckConstraint("role IN ('viewer', 'operator', 'reporter')", name="role"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    role: Mapped[str] = mapped_column(String(STATUS_LENGTH))
    prefix: Mapped[str] = mapped_column(String(STATUS_LENGTH))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    # A reporter's token for one run may report for no other.
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[float] = mapped_column(Float)
    # None: works until it is revoked.
    expires_at: Mapped[float | None] = mapped_column(Float)
    last_used_at: Mapped[float | None] = mapped_column(Float)
    revoked_at: Mapped[float | None] = mapped_column(Float)
    # The token that made this one. None: made by a sign-in, or by a version that kept no maker. No foreign key, because
    # a token for one run is deleted with its run.
    maker_id: Mapped[int | None] = mapped_column(Integer, index=True)


class SignInCode(Base):
    """The code of a sign-in link, which works once. Only its SHA-256 is stored."""

    __tablename__ = "sign_in_codes"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float] = mapped_column(Float)


class BrowserSession(Base):
    """A browser session opened with a token. Only the SHA-256 of the cookie's value is stored."""

    __tablename__ = "browser_sessions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    token_id: Mapped[int] = mapped_column(ForeignKey("tokens.id", ondelete="CASCADE"), index=True)
    csrf: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float] = mapped_column(Float)


class AuditEntry(Base):
    """An entry of the audit log (`api/access/audit.py`). The name stays when the token is gone."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float] = mapped_column(Float)
    token_id: Mapped[int] = mapped_column(Integer)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    # In a browser's session that the token opened.
    browser: Mapped[bool]
    address: Mapped[str] = mapped_column(String(ADDRESS_LENGTH))
    action: Mapped[str] = mapped_column(String(NAME_LENGTH))
    target: Mapped[str] = mapped_column(String(TARGET_LENGTH))


class Webhook(Base):
    """A rule: which events of runs are sent where (`api/store/webhooks.py`).

    The secret signs messages, so it is stored as it is. `service_url`: the address by which its maker reached the
    service; links in messages begin with it.
    """

    __tablename__ = "webhooks"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    url: Mapped[str] = mapped_column(Text)
    form: Mapped[str] = mapped_column(String(STATUS_LENGTH))
    events: Mapped[list[str]] = mapped_column(Json)
    stalled_minutes: Mapped[float] = mapped_column(Float)
    reward_fall: Mapped[float] = mapped_column(Float)
    idle_percent: Mapped[float] = mapped_column(Float)
    secret: Mapped[str] = mapped_column(String(64))
    service_url: Mapped[str] = mapped_column(Text)
    # The token that made or last changed it. None: made by a version that kept no maker. No foreign key, as of tokens.
    maker_id: Mapped[int | None] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)


class WebhookDelivery(Base):
    """A message of a webhook: waiting while it has `next_at`, then delivered or given up.

    `key`: what happened, so that it is sent only once. `status`: the receiver's last HTTP status.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (UniqueConstraint("webhook_id", "key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    webhook_id: Mapped[int] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    key: Mapped[str] = mapped_column(String(64))
    event: Mapped[str] = mapped_column(String(STATUS_LENGTH))
    content: Mapped[dict[str, Any]] = mapped_column(Json)
    created_at: Mapped[float] = mapped_column(Float)
    tries: Mapped[int] = mapped_column(Integer, default=0)
    next_at: Mapped[float | None] = mapped_column(Float, index=True)
    delivered_at: Mapped[float | None] = mapped_column(Float)
    status: Mapped[int | None] = mapped_column(Integer)
    error: Mapped[str] = mapped_column(Text, default="")


class SavedView(Base):
    """A view of the list of runs under a name (`api/read/saved_views.py`). `owner`: a token, or 0 for everyone."""

    __tablename__ = "saved_views"
    __table_args__ = (UniqueConstraint("owner", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[int] = mapped_column(Integer)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    content: Mapped[dict[str, Any]] = mapped_column(Json)
    created_at: Mapped[float] = mapped_column(Float)


class DispatchLease(Base):
    """The row of the dispatch lease (`api/launch/lease.py`). `since` is for people and decides nothing."""

    __tablename__ = "dispatch_lease"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    term: Mapped[int] = mapped_column(BigInteger)
    beats: Mapped[int] = mapped_column(BigInteger)
    # Empty if the last holder has released the lease.
    service: Mapped[str] = mapped_column(String(UID_LENGTH))
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    launches: Mapped[bool]
    since: Mapped[float] = mapped_column(Float)
