"""Values by which runs are filtered, sorted and shown: fields of a run, `metric.NAME` and `config.GROUP.OPTION`.

- A field is a column of the table of runs, `experiment`, or `tag`.
- `metric.NAME` is the value of the last trained step: a figure of steps, or a metric that OpenRLHF reported.
- `config.GROUP.OPTION` is a setting, compared as a number or as a text.

A comparison with a missing value is false. Statements are built from expressions; no text of a query becomes SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Float, and_, cast, false, func, not_, or_, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.run_query import Comparison, Every, Node, Not, QueryError
from rhyme_openrlhf.api.store.models import Experiment, Run, RunParameter, RunTag
from rhyme_openrlhf.api.store.record import Metric, Step
from rhyme_openrlhf.api.store.step_figures import STEP_CURVES

METRIC, CONFIG = "metric.", "config."
NUMBERS = (
    "step", "epoch", "steps_total", "epochs", "engines", "tensor_parallel_size", "reward", "tokens_per_second",
    "speculation_rate", "bubble_fraction", "dropped_events",
)  # fmt: skip
TIMES = ("created_at", "started_at", "finished_at", "last_event_at")
TEXTS = ("uid", "name", "status", "origin", "notes", "message", "created_by")
EXPERIMENT, TAG = "experiment", "tag"
FIELDS = (*NUMBERS, *TIMES, *TEXTS, EXPERIMENT, TAG)
NAME_PATTERN = re.compile(r"(metric|config)\.[^\x00]{1,190}")
_LIKE_ESCAPE = "\\"


def condition(node: Node) -> ColumnElement[bool]:
    """Return the condition for `where`, with `Experiment` joined. Raises QueryError."""
    if isinstance(node, Comparison):
        # Missing values make a comparison unknown, which is false here, so that "not" of it is true.
        found: ColumnElement[bool] = func.coalesce(_compared(node), false())
        return found
    if isinstance(node, Not):
        return not_(condition(node.part))
    parts = [condition(part) for part in node.parts]
    return and_(*parts) if isinstance(node, Every) else or_(*parts)


@dataclass(frozen=True)
class Sorting:
    """An expression to sort by; `kind` is the type of its values."""

    expression: ColumnElement[Any]
    kind: type


def sorting(session: Session, name: str) -> Sorting:
    """Return the expression of `metric.NAME` or `config.GROUP.OPTION`. Raises QueryError."""
    if name.startswith(METRIC):
        return Sorting(metric_value(name.removeprefix(METRIC)), float)
    if not name.startswith(CONFIG):
        raise QueryError(f"runs cannot be sorted by {name!r}: use a field, metric.NAME or config.GROUP.OPTION")
    option = name.removeprefix(CONFIG)
    of = RunParameter
    numbers = select(of.run_id).where(of.name == option, of.number.is_not(None)).limit(1)
    column = of.number if session.scalar(numbers) is not None else of.text
    return Sorting(_parameter(option, column), float if column is of.number else str)


def values_of(session: Session, ids: Sequence[int], names: Sequence[str]) -> dict[int, dict[str, float | str | None]]:
    """Return the values of these runs (row numbers) by name."""
    found: dict[int, dict[str, float | str | None]] = {one: dict.fromkeys(names) for one in ids}
    for name in names:
        if name.startswith(METRIC):
            rows = session.execute(select(Run.id, metric_value(name.removeprefix(METRIC))).where(Run.id.in_(ids)))
            for run_id, value in rows:
                found[run_id][name] = value
        else:
            of = RunParameter
            option = name.removeprefix(CONFIG)
            query = select(of.run_id, of.number, of.text).where(of.run_id.in_(ids), of.name == option)
            for run_id, number, text in session.execute(query):
                found[run_id][name] = text if number is None else number
    return found


def metric_value(name: str) -> ColumnElement[Any]:
    """Return the value of a figure or metric at the last step that has it."""
    if name in STEP_CURVES:
        figure = cast(STEP_CURVES[name], Float)
        of_step = select(figure).where(Step.run_id == Run.id, Step.step <= Run.step, figure.is_not(None))
        return of_step.order_by(Step.step.desc()).limit(1).correlate(Run).scalar_subquery()
    query = select(Metric.value).where(Metric.run_id == Run.id, Metric.name == name, Metric.value.is_not(None))
    return query.order_by(Metric.step.desc()).limit(1).correlate(Run).scalar_subquery()


def escape_like(text: str) -> str:
    """Escape `text` so that LIKE takes it literally."""
    for special in (_LIKE_ESCAPE, "%", "_"):
        text = text.replace(special, _LIKE_ESCAPE + special)
    return text


def contains(column: Any, text: str) -> ColumnElement[bool]:
    """Return the condition that a column contains a text, ignoring case."""
    found: ColumnElement[bool] = column.ilike(f"%{escape_like(text)}%", escape=_LIKE_ESCAPE)
    return found


def _parameter(option: str, column: Any) -> ColumnElement[Any]:
    query = select(column).where(RunParameter.run_id == Run.id, RunParameter.name == option)
    return query.correlate(Run).scalar_subquery()


def _compared(one: Comparison) -> ColumnElement[bool]:
    name = one.name
    if name.startswith(METRIC) and name != METRIC:
        return _as_number(one, metric_value(name.removeprefix(METRIC)))
    if name.startswith(CONFIG) and name != CONFIG:
        option = name.removeprefix(CONFIG)
        if one.number is not None and one.operator != "~":
            return _as_number(one, _parameter(option, RunParameter.number))
        return _as_text(one, _parameter(option, RunParameter.text))
    if name in NUMBERS:
        return _as_number(one, getattr(Run, name))
    if name in TIMES:
        return _as_number(one, getattr(Run, name), _moment(one))
    if name in TEXTS:
        return _as_text(one, getattr(Run, name))
    if name == EXPERIMENT:
        return _as_text(one, Experiment.name)
    if name == TAG:
        # "tag != x" means that the run has no such tag.
        positive = Comparison(name, "=", one.value, True) if one.operator == "!=" else one
        has = select(RunTag.tag).where(RunTag.run_id == Run.id, _as_text(positive, RunTag.tag)).correlate(Run).exists()
        return ~has if one.operator == "!=" else has
    raise QueryError(f"there is no {name[:40]!r}: use {', '.join(FIELDS)}, metric.NAME or config.GROUP.OPTION")


_ORDERINGS: dict[str, Callable[[Any, Any], Any]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _as_number(one: Comparison, column: Any, value: float | None = None) -> ColumnElement[bool]:
    number = one.number if value is None else value
    if number is None or one.operator == "~":
        raise QueryError(f"{one.name[:40]} is a number: compare it by =, !=, <, <=, > or >= with a number")
    found: ColumnElement[bool] = _ORDERINGS[one.operator](cast(column, Float), number)
    return found


def _as_text(one: Comparison, column: Any) -> ColumnElement[bool]:
    if "\0" in one.value or any("\ud800" <= letter <= "\udfff" for letter in one.value):
        raise QueryError("a value may have neither NUL nor lone surrogates")
    if one.operator == "~":
        return contains(column, one.value)
    if one.operator not in ("=", "!="):
        raise QueryError(f"{one.name[:40]} is compared with a text here: use =, != or ~")
    found: ColumnElement[bool] = _ORDERINGS[one.operator](column, one.value)
    return found


def _moment(one: Comparison) -> float:
    """Return unix seconds for a number, or for a date or time in UTC such as 2026-11-21 or 2026-11-21T18:30."""
    if one.number is not None:
        return one.number
    try:
        found = datetime.fromisoformat(one.value)
    except ValueError:
        raise QueryError(f"{one.name} is a time: write it as 2026-11-21, 2026-11-21T18:30 or in unix seconds") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
