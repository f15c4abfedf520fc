"""Queries of the learning figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curves import Curve, curve_names, curves
from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.read.step_buckets import bucket_width
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import METRIC_LENGTH, EngineStepRow
from rhyme_openrlhf.telemetry.events import OffPolicyness
from rhyme_openrlhf.webui.figures.drawing import learning as drawing
from rhyme_openrlhf.webui.figures.drawing.learning import GROUPS, AgeBucket, Ages, MetricGroup
from rhyme_openrlhf.webui.figures.queries.timeline import MOST_BARS
from rhyme_openrlhf.webui.figures.run_figure import MOST_POINTS, RunFigure, Window, curves_of

# Most steps whose histograms are read; a histogram has about 100 bytes.
MOST_HISTOGRAMS = 5000
# Most rows of single engines and steps; their sum takes about 20 ms.
MOST_ENGINE_STEPS = 20_000
# Most steps that a query lists one by one: a few per bar.
MOST_LISTED_STEPS = 500


CurveName = Annotated[str, Field(min_length=1, max_length=METRIC_LENGTH, pattern=NO_NUL)]


class OneMetric(Window):
    """The options of the figure "metric". `name`: a metric of the run."""

    name: CurveName


class Panel(Window):
    """The options of the figure "panel". `curve`: names of curves."""

    curve: Annotated[list[CurveName], Field(min_length=1, max_length=drawing.MOST_CURVES)]


def metric_names(session: Session, run: Run) -> list[str]:
    """Return the names of the run's metrics."""
    return curve_names(session, run)["metrics"]


def _metric(session: Session, run: Run, window: OneMetric) -> dict[str, Curve]:
    return curves_of(window.name)(session, run, window)


def _panel(session: Session, run: Run, panel: Panel) -> dict[str, Curve]:
    return curves_of(*panel.curve)(session, run, panel)


def _metrics_of(group: MetricGroup) -> Callable[[Session, Run, Window], dict[str, Curve]]:
    def ask(session: Session, run: Run, window: Window) -> dict[str, Curve]:
        names, _ = drawing.grouped(metric_names(session, run))
        return curves_of(*names[group.name])(session, run, window)

    return ask


def _reward(session: Session, run: Run, window: Window) -> dict[str, Curve]:
    found = curves_of("reward", "rollout_reward")(session, run, window)
    # Read all points, because the band is drawn wherever the mean has a point.
    spreads = curves(session, run.uid, drawing.SPREADS, window.from_step, window.to_step, MOST_POINTS, window.axis)
    return {**found, **{curve.name: curve for curve in spreads}}


def _sample_ages(session: Session, run: Run, window: Window) -> Ages:
    """Return the off-policyness of samples, as counted by the trainer."""
    reported = _reported(session, run)
    return _counted("samples", reported, [one.samples for one in reported])


def _token_ages(session: Session, run: Run, window: Window) -> Ages:
    """Return the off-policyness of response tokens, as counted by the trainer.

    Older records have no such count; the engines' weight versions replace it.
    """
    reported = [one for one in _reported(session, run) if one.tokens is not None]
    if reported:
        return _counted("response tokens", reported, [one.tokens or [] for one in reported])
    return _engine_ages(session, run)


def _reported(session: Session, run: Run) -> list[OffPolicyness]:
    return latest(session, run, "off_policyness", OffPolicyness, MOST_HISTOGRAMS, by=("step",)).bodies


def _counted(of: Literal["samples", "response tokens"], reported: list[OffPolicyness], counts: list[list[int]]) -> Ages:
    """Build `Ages` where `counts[i][j]` samples of `reported[i]` have age `reported[i].values[j]`."""
    if not reported:
        return Ages(of, [])
    amounts = (
        (one.step, age, n)
        for one, of_step in zip(reported, counts, strict=True)
        for age, n in zip(one.values, of_step, strict=False)
    )
    steps = [one.step for one in reported]
    return Ages(of, _bucketed(amounts, min(steps), max(steps)))


def _engine_ages(session: Session, run: Run) -> Ages:
    """Return the off-policyness of response tokens from the engines' weight versions.

    In a large run, only one of every few steps is read (`Ages.every`).
    """
    table = EngineStepRow
    of_run = table.run_id == run.id
    first, last = session.execute(select(func.min(table.step), func.max(table.step)).where(of_run)).one()
    if first is None:
        return Ages("response tokens", [])
    shown = [of_run, table.weight_version.is_not(None)]
    most = max(1, MOST_ENGINE_STEPS // (run.engines or 1))
    every = 1
    if last - first + 1 > most:
        every = bucket_width(first, last, min(most, MOST_LISTED_STEPS))
        # A list of steps uses the index; a condition on the remainder would read all rows.
        shown.append(table.step.in_(range(first, last + 1, every)))
    rows = session.execute(
        select(table.step, table.step - table.weight_version - 1, func.sum(table.response_tokens))
        .where(*shown)
        .group_by(table.step, table.weight_version)
        .order_by(table.step)
    ).all()
    if not rows:
        return Ages("response tokens", [])
    amounts = ((step, age, int(tokens)) for step, age, tokens in rows)
    return Ages("response tokens", _bucketed(amounts, first, last, every), every)


def _bucketed(amounts: Iterable[tuple[int, int, int]], first: int, last: int, least: int = 1) -> list[AgeBucket]:
    """Add up (step, off-policyness, count) in buckets of at least `least` steps."""
    width = max(least, bucket_width(first, last, MOST_BARS))
    by_bucket: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for step, age, count in amounts:
        by_bucket[(step - first) // width][age] += count
    return [
        AgeBucket(first + at * width, min(last, first + (at + 1) * width - 1), dict(of))
        for at, of in sorted(by_bucket.items())
    ]


FIGURES: tuple[RunFigure, ...] = (
    RunFigure("reward", "Reward", _reward, drawing.reward),
    RunFigure("throughput", "Throughput", curves_of("tokens_per_second"), drawing.throughput),
    RunFigure(
        "step_parts", "Time of a step",
        curves_of("step_seconds", "rollout_seconds", "train_seconds", "experience_seconds", "sync_seconds"),
        drawing.step_parts,
    ),
    RunFigure(
        "lengths", "Response length", curves_of("length_mean", "length_median", "length_p95", "length_max"),
        drawing.lengths,
    ),
    RunFigure("truncated", "Truncated responses", curves_of("truncated_share"), drawing.truncated),
    *(RunFigure(group.name, group.title, _metrics_of(group), drawing.metric_group(group)) for group in GROUPS),
    RunFigure("off_policyness", "Off-policyness by samples", _sample_ages, drawing.off_policyness),
    RunFigure("off_policyness_tokens", "Off-policyness by response tokens", _token_ages, drawing.off_policyness),
    RunFigure("metric", "Metric", _metric, drawing.metric, OneMetric),
    RunFigure("panel", "Panel", _panel, drawing.panel, Panel),
)  # fmt: skip
