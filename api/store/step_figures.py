"""Curves of steps: columns of `steps`, and figures that the database computes from them as `telemetry/metrics.py` says.

Blocks of curves hold the values of all of them. A figure that is not in `_PACKED` is computed from curves of columns
(`api/read/curves.py`), so a new one needs no migration.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Float, case, cast, func

from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.telemetry import metrics

_NO_CURVES = {"run_id", "step", "attempt_id"}
COLUMNS: tuple[str, ...] = tuple(column.name for column in Step.__table__.columns if column.name not in _NO_CURVES)
BUBBLES: tuple[str, ...] = tuple(name for name in COLUMNS if name.startswith("bubble_"))
_PACKED = {
    "speculation_rate", "acceptance_rate", "history_share", "siblings_share", "own_share", "shared_share",
    "tokens_per_step", "decode_step_ms", "tokens_per_second", "bubble_fraction", "drafted_per_draft",
    "drafting_share", "truncated_share", "step_seconds",
}  # fmt: skip


def _ratio(numerator: Any, denominator: Any) -> ColumnElement[Any]:
    return cast(numerator, Float) / func.nullif(cast(denominator, Float), 0.0)


def _bubble_seconds() -> ColumnElement[Any]:
    total: Any = getattr(Step, BUBBLES[0])
    for name in BUBBLES[1:]:
        total = total + getattr(Step, name)
    return total


# None without a timeline, whose bubbles are unknown.
_NO_RATIOS: dict[str, ColumnElement[Any]] = {
    "bubble_fraction": _ratio(_bubble_seconds(), case((Step.intervals > 0, Step.engines * Step.rollout_seconds))),
    "step_seconds": Step.finished_at - Step.started_at,
}
FIGURES: dict[str, ColumnElement[Any]] = {
    name: _NO_RATIOS[name] if name in _NO_RATIOS else _ratio(*figure.parts(lambda column: getattr(Step, column)))
    for name, figure in metrics.FIGURES.items()
    if name in _PACKED
}

# All curves of steps by name.
STEP_CURVES: dict[str, ColumnElement[Any]] = {name: getattr(Step, name) for name in COLUMNS} | FIGURES
