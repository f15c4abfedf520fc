"""Constraints that two requests may meet at once: only a violation of one of these is no defect of the service.

Each request looks first, in its own transaction, and then writes. On PostgreSQL another one may write in between.
SQLite has one writer, so a violation there is a defect unless it is of a unique name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import IntegrityError

Made = TypeVar("Made")
EXPERIMENT_NAME, RUN_UID = "uq_experiments_name", "uq_runs_uid"
# Names as `base.NAMING` makes them. What two requests may create at once, and what one may delete while another one
# refers to it.
RACED = frozenset(
    {
        "uq_attempts_uid", EXPERIMENT_NAME, "uq_runs_idempotency_key", RUN_UID, "uq_saved_views_owner_name",
        "uq_tokens_digest", "fk_runs_experiment_id", "fk_runs_parent_id", "fk_tokens_run_id",
        "fk_webhook_deliveries_webhook_id",
    }
)  # fmt: skip


def violated(error: IntegrityError) -> str:
    """Return the name of the violated constraint; "" if the database does not say it."""
    if (told := getattr(error.orig, "diag", None)) is not None:
        return told.constraint_name or ""
    # SQLite names the columns of a unique constraint: "UNIQUE constraint failed: saved_views.owner, saved_views.name".
    kind, _, columns = str(error.orig).partition(" constraint failed: ")
    if kind != "UNIQUE":
        return ""
    table = columns.partition(".")[0]
    return "_".join(("uq", table, *(column.rpartition(".")[2] for column in columns.split(", "))))


def is_race(error: IntegrityError) -> bool:
    """Return whether another request was faster; otherwise the error is a defect."""
    return violated(error) in RACED


def again_if_raced(write: Callable[[], Made]) -> Made:
    """Call `write`, and once more if another transaction was faster; it then finds what that one has left."""
    try:
        return write()
    except IntegrityError as error:
        if not is_race(error):
            raise
        return write()
