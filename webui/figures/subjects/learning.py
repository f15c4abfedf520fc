"""Learning figures: reward, response lengths, and off-policyness (age of the weights)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curves import Curve, curves
from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.read.step_buckets import bucket_width
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import EngineStepRow
from rhyme_openrlhf.telemetry.events import OffPolicyness
from rhyme_openrlhf.webui.figures.drawing.chart import Content, curve_lines, has_values, summary
from rhyme_openrlhf.webui.figures.drawing.series import Band, Bars, Span
from rhyme_openrlhf.webui.figures.run_figure import MOST_POINTS, RunChart, RunCurves, RunFigure, Window, curves_of
from rhyme_openrlhf.webui.figures.subjects.timeline import MOST_BARS
from rhyme_openrlhf.webui.site import text

# Most steps whose histograms are read; a histogram has about 100 bytes.
MOST_HISTOGRAMS = 5000
# Most rows of single engines and steps; their sum takes about 20 ms.
MOST_ENGINE_STEPS = 20_000
# Most steps that a query lists one by one: a few per bar.
MOST_LISTED_STEPS = 500
NO_REWARD = "No step of this run has reported a reward yet."
NO_ROLLOUT = "No rollout of this run is finished yet."
# Messages by what is counted (`Ages.of`).
NO_VERSIONS = {
    "samples": "Not recorded by this run: only --weights.transport buffer numbers the engines' weights, and older "
    "versions do not count samples.",
    "response tokens": "Not recorded by this run: only --weights.transport buffer numbers the engines' weights.",
}
# Standard deviations of rewards: over a step's samples (the trainer's name) and within a prompt's samples.
SPREADS: tuple[str, ...] = ("rollout/reward_std", "group_reward_std")
LENGTH_NAMES = {
    "length_mean": "Mean", "length_median": "Median", "length_p95": "95th percentile", "length_max": "Longest",
}  # fmt: skip
SPREAD_WORDS = {
    "rollout/reward_std": "the standard deviation over the step's samples",
    "group_reward_std": "the mean standard deviation within a prompt's samples",
}


@dataclass(frozen=True)
class AgeBucket:
    """Numbers of samples (or tokens) of these steps by off-policyness."""

    steps: Span
    amounts: Mapping[int, int]


@dataclass(frozen=True)
class Ages:
    """Off-policyness of a run. `of`: the unit that is counted; `every`: one of this many steps was read."""

    of: Literal["samples", "response tokens"]
    buckets: Sequence[AgeBucket]
    every: int = 1


def _reward(session: Session, run: Run, window: Window) -> dict[str, Curve]:
    found = curves_of("reward", "rollout_reward")(session, run, window)
    # Read all points, because the band is drawn wherever the mean has a point.
    spreads = curves(session, run.uid, SPREADS, window.from_step, window.to_step, MOST_POINTS, window.axis)
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
        AgeBucket(Span(first + at * width, min(last, first + (at + 1) * width - 1)), dict(of))
        for at, of in sorted(by_bucket.items())
    ]


def _reward_content(found: Mapping[str, Curve]) -> Content:
    """Return the mean reward with its spread; the trainer's reward is preferred to the rollout's."""
    curve = found["reward"] if has_values(found["reward"]) else found["rollout_reward"]
    (line,) = curve_lines([curve])
    spread = next((one for name in SPREADS if (one := found.get(name)) and has_values(one)), None)
    if spread is None:
        return Content([line], summary(curve))
    widths = dict(zip(spread.x, spread.values, strict=True))
    known = [
        (x, value, width)
        for x, value in zip(curve.x, curve.values, strict=True)
        if value is not None and (width := widths.get(x)) is not None
    ]
    low, high = [value - width for _, value, width in known], [value + width for _, value, width in known]
    band = Band([x for x, *_ in known], low, high, ("Mean - deviation", "Mean + deviation"))
    return Content([replace(line, band=band)], f"{summary(curve)} Shaded: {SPREAD_WORDS[spread.name]}.")


def _lengths(found: Mapping[str, Curve]) -> Content:
    lines = curve_lines(found.values(), LENGTH_NAMES.__getitem__)
    return Content(lines, f"Mean: {summary(found['length_mean'])}")


def _ages(rows: Ages) -> Content | None:
    """Return the off-policyness of each step's samples, or of their tokens, as stacked shares."""
    ages = sorted({age for one in rows.buckets for age in one.amounts})
    shown = [(one, sum(one.amounts.values())) for one in rows.buckets if sum(one.amounts.values())]
    if not shown:
        return None
    total = sum(whole for _, whole in shown)
    bars, facts = [], []
    for age in ages:
        values = [one.amounts.get(age, 0) / whole for one, whole in shown]
        words = [
            f"{text.span(*one.steps)}: {text.percent(value)} of {rows.of} at {age}"
            for (one, _), value in zip(shown, values, strict=True)
        ]
        bars.append(Bars("0 (on policy)" if age == 0 else str(age), [one.steps for one, _ in shown], values, words))
        facts.append(f"{text.percent(sum(one.amounts.get(age, 0) for one, _ in shown) / total)} at {age}")
    looked_at = "" if rows.every == 1 else f" in one of every {rows.every} steps"
    return Content(bars, f"Of all {rows.of}{looked_at}: {', '.join(facts)}.")


def _age_figure(name: str, title: str, ask: Callable[..., Ages]) -> RunChart:
    return RunChart(
        name, title, ask, content=_ages, y=lambda rows: f"Share of {rows.of}", share=True, top=1.0, legend=True,
        empty=lambda rows: NO_VERSIONS[rows.of],
        description="Off-policyness: training steps between the weights a sample was generated with and its use.",
    )  # fmt: skip


FIGURES: tuple[RunFigure, ...] = (
    RunCurves(
        "reward", "Reward", _reward,
        content=_reward_content, y="Mean reward", empty=NO_REWARD,
        description="Mean reward of each step's samples.",
    ),
    RunCurves(
        "throughput", "Throughput", curves_of("tokens_per_second"),
        y="Tokens/s", zero=True, empty=NO_ROLLOUT,
        description="Response tokens of all engines per second of rollout.",
    ),
    RunCurves(
        "step_parts", "Time of a step",
        curves_of("step_seconds", "rollout_seconds", "train_seconds", "experience_seconds", "sync_seconds"),
        y="Seconds", zero=True, empty=NO_ROLLOUT,
        description="Seconds of a whole step, and of its parts; parts of different steps may overlap in time.",
    ),
    RunCurves(
        "lengths", "Response length", curves_of(*LENGTH_NAMES),
        content=_lengths, y="Tokens", zero=True, empty=NO_ROLLOUT,
        description="Response lengths of each step in tokens.",
    ),
    RunCurves(
        "truncated", "Truncated responses", curves_of("truncated_share"),
        y="Share of responses", share=True, empty=NO_ROLLOUT,
        description="Share of responses that were cut off at the length limit.",
    ),
    _age_figure("off_policyness", "Off-policyness by samples", _sample_ages),
    _age_figure("off_policyness_tokens", "Off-policyness by response tokens", _token_ages),
)  # fmt: skip
