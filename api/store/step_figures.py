"""Curves of steps: columns of `steps`, and figures that the database computes from them.

Figures follow the definitions of `telemetry/metrics.py` (a test compares them).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Float, case, cast, func

from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.telemetry.metrics import MS_PER_SECOND

_NO_CURVES = {"run_id", "step", "attempt_id"}
COLUMNS: tuple[str, ...] = tuple(column.name for column in Step.__table__.columns if column.name not in _NO_CURVES)
BUBBLES: tuple[str, ...] = tuple(name for name in COLUMNS if name.startswith("bubble_"))


def _ratio(numerator: Any, denominator: Any) -> ColumnElement[Any]:
    return cast(numerator, Float) / func.nullif(cast(denominator, Float), 0.0)


def _bubble_seconds() -> ColumnElement[Any]:
    total: Any = getattr(Step, BUBBLES[0])
    for name in BUBBLES[1:]:
        total = total + getattr(Step, name)
    return total


FIGURES: dict[str, ColumnElement[Any]] = {
    "speculation_rate": _ratio(Step.accepted, Step.engine_tokens),
    "acceptance_rate": _ratio(Step.accepted, Step.drafted),
    "history_share": _ratio(
        Step.accepted - Step.accepted_siblings - Step.accepted_own - Step.accepted_shared, Step.engine_tokens
    ),
    "siblings_share": _ratio(Step.accepted_siblings, Step.engine_tokens),
    "own_share": _ratio(Step.accepted_own, Step.engine_tokens),
    "shared_share": _ratio(Step.accepted_shared, Step.engine_tokens),
    "tokens_per_step": _ratio(Step.decode_tokens, Step.sample_steps),
    "decode_step_ms": _ratio(Step.busy_seconds * MS_PER_SECOND, Step.decode_steps),
    "tokens_per_second": _ratio(Step.response_tokens, Step.rollout_seconds),
    # None without a timeline, whose bubbles are unknown.
    "bubble_fraction": _ratio(_bubble_seconds(), case((Step.intervals > 0, Step.engines * Step.rollout_seconds))),
    "drafted_per_draft": _ratio(Step.drafted, Step.drafts),
    "drafting_share": _ratio(Step.draft_seconds, Step.busy_seconds),
    "truncated_share": _ratio(Step.truncated, Step.samples),
    "step_seconds": Step.finished_at - Step.started_at,
}

# All curves of steps by name.
STEP_CURVES: dict[str, ColumnElement[Any]] = {name: getattr(Step, name) for name in COLUMNS} | FIGURES
