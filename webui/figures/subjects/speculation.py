"""Figures of speculation: rates over steps, draft lengths and their cost, and the gain of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean

from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.telemetry import metrics
from rhyme_openrlhf.telemetry.draft_sources import PARTS
from rhyme_openrlhf.telemetry.events import DraftBudget, DraftGain
from rhyme_openrlhf.telemetry.metrics import engines_gain
from rhyme_openrlhf.webui.figures.drawing.chart import Content, Level, curve_lines, summary
from rhyme_openrlhf.webui.figures.drawing.series import Area, Band, Line
from rhyme_openrlhf.webui.figures.run_figure import RunChart, RunCurves, RunFigure, Window, curves_of
from rhyme_openrlhf.webui.site import text

NOT_YET = "No rollout of this run is finished yet."
NO_DRAFTS = (
    "This run has drafted nothing yet. Drafts come from earlier responses and from the response so far "
    "(--histospec.own_output), unless --no-histospec.enable switches them off."
)
NO_BUDGET = (
    "Not recorded by this run: its draft lengths follow each sample's window (--histospec.window_start, "
    "--histospec.window_max), not the predicted cost of a decode step (--latency.profile)."
)
NO_GAIN = (
    "Not known yet: a run measures the gain by leaving drafts out of a small share of its decode steps "
    "(--drafting.probe_share), and needs a few hundred such steps. Reproducible runs do not measure it."
)
# Sources in stacking order; together they are the speculation rate.
SOURCES = tuple(f"{source.name}_share" for source in PARTS)
# A part of the first source, drawn as a line.
EARLIER = "earlier_share"
RUNNING = "Running samples"
# Events of 64 engines over 30 steps, parsed in about 20 ms.
MOST_BUDGETS = 2000


def _rates(found: Mapping[str, Curve]) -> Content:
    words = [(curve, summary(curve, share=True)) for curve in found.values()]
    facts = [f"{text.label(curve.name)}: {one[0].lower()}{one[1:]}" for curve, one in words if one]
    return Content(curve_lines(found.values()), " ".join(facts))


def _sources(found: Mapping[str, Curve]) -> Content | None:
    """Return the speculation rate, stacked by the source of the accepted drafts, and the part of earlier runs."""
    shown, earlier = [found[name] for name in SOURCES], found[EARLIER]
    if not any(chain.from_iterable(curve.values for curve in shown)):
        return None
    last = [next((value for value in reversed(curve.values) if value is not None), 0.0) for curve in shown]
    parts = [
        f"{text.label(curve.name).lower()} {text.percent(value)}" for curve, value in zip(shown, last, strict=True)
    ]
    facts = f"Last: {', '.join(parts)}."
    share = "%{y:.1%}"
    areas = [Area(text.label(curve.name), curve.x, curve.values, value=share) for curve in shown]
    if not any(earlier.values):
        return Content(areas, facts)
    words = summary(earlier, share=True)
    line = Line(text.label(EARLIER), earlier.x, earlier.values, value=share, marked=0, shape="hvh")
    facts = f"Of earlier responses, those of earlier runs alone: {words[0].lower()}{words[1:]} {facts}"
    return Content([*areas, line], facts)


def _budgets(session: Session, run: Run, window: Window) -> list[DraftBudget]:
    return latest(session, run, "draft_budget", DraftBudget, MOST_BUDGETS, by=("step", "engine")).bodies


def _gains(session: Session, run: Run, window: Window) -> list[DraftGain]:
    return latest(session, run, "draft_gain", DraftGain, MOST_BUDGETS, by=("step", "engine")).bodies


def _means(budgets: Sequence[DraftBudget], name: str, by_step: bool = False) -> dict[int, float]:
    """Return the mean of the field by number of running samples, or by step, weighted by decode steps."""
    totals: dict[int, float] = defaultdict(float)
    weights: dict[int, int] = defaultdict(int)
    for one in budgets:
        for running, count, value in zip(one.running, one.decode_steps, getattr(one, name), strict=False):
            totals[one.step if by_step else running] += value * count
            weights[one.step if by_step else running] += count
    return {at: totals[at] / weights[at] for at in sorted(weights) if weights[at]}


def _line(name: str, means: Mapping[int, float], unit: str = "") -> Line:
    return Line(name, list(means), list(means.values()), value=f"%{{y:.2f}} {unit}".rstrip())


def _length_by_step(budgets: Sequence[DraftBudget]) -> Content:
    return Content([_line("Chosen draft length", _means(budgets, "draft_length", by_step=True))])


def _length_by_running(budgets: Sequence[DraftBudget]) -> Content | None:
    means = _means(budgets, "draft_length")
    if not means:
        return None
    low, high = min(means), max(means)
    facts = f"{text.number(means[low])} tokens with {low} running, {text.number(means[high])} with {high}."
    return Content([_line("Chosen draft length", means, "tokens")], facts)


def _accepted(budgets: Sequence[DraftBudget]) -> Content | None:
    real, expected = _means(budgets, "accepted"), _means(budgets, "expected_accepted")
    if not real:
        return None
    return Content([_line("Accepted", real, "tokens"), _line("Expected", expected, "tokens")])


def _step_time(budgets: Sequence[DraftBudget]) -> Content | None:
    real, predicted = _means(budgets, "real_ms"), _means(budgets, "predicted_ms")
    if not real:
        return None
    off = [abs(predicted[n] / value - 1) for n, value in real.items() if value and n in predicted]
    facts = f"Predictions are off by {text.percent(fmean(off))} on average." if off else ""
    return Content([_line("Measured", real, "ms"), _line("Predicted", predicted, "ms")], facts)


def _gain(found: Sequence[DraftGain]) -> Content | None:
    """Return the engines' estimates, and the mean of their gains with 95 % intervals where those are results."""
    by_step: dict[int, list[DraftGain]] = defaultdict(list)
    for one in found:
        by_step[one.step].append(one)
    means = {step: mean for step in sorted(by_step) if (mean := engines_gain(by_step[step])) is not None}
    if not means:
        return None
    now = list(means.values())[-1]
    lines = []
    if known := {step: mean.estimate for step, mean in means.items() if mean.estimate}:
        lines.append(Line("Estimated", list(known), list(known.values()), value="%{y:.2f} times"))
    if results := {step: mean for step, mean in means.items() if mean.is_result}:
        low, middle, high = ([getattr(one, name) for one in results.values()] for name in ("low", "ratio", "high"))
        band = Band(list(results), low, high, ("95 %, from", "95 %, to"))
        lines.append(Line("Measured", list(results), middle, value="%{y:.2f} times", band=band))
    if not lines:
        return None
    return Content(lines, f"Now: {now.text}." if now.text else "", note=now.advice)


FIGURES: tuple[RunFigure, ...] = (
    RunCurves(
        "speculation", "Speculation and acceptance", curves_of("speculation_rate", "acceptance_rate"),
        content=_rates, y="Share of tokens", share=True, empty=NOT_YET,
        description="Share of response tokens that were accepted drafts, and share of drafted tokens that were "
        "accepted.",
    ),
    RunCurves(
        "tokens_per_step", "Tokens per sample and decode step", curves_of("tokens_per_step"),
        y="Tokens per sample and step", empty=NOT_YET, level=Level(1.0, "without speculation"),
        description=f"{metrics.tokens_per_step.sentence}.",
    ),
    RunCurves(
        "draft_sources", "Sources of accepted drafts", curves_of(*SOURCES, EARLIER),
        content=_sources, y="Share of tokens", share=True, empty=NO_DRAFTS,
        description="Share of response tokens that were accepted drafts, by the drafts' source.",
    ),
    RunCurves(
        "draft_length", "Tokens per draft", curves_of("drafted_per_draft"),
        y="Tokens per draft", zero=True, empty=NO_DRAFTS,
        description="Mean tokens of a draft: the sample's window (at most --histospec.window_max), or less where "
        "the history matches less.",
    ),
    RunCurves(
        "draft_cost", "Share of busy time spent drafting", curves_of("drafting_share"),
        y="Share of busy time", share=True, empty=NOT_YET,
        description=f"{metrics.FIGURES['drafting_share'].sentence}.",
    ),
    RunCurves(
        "decode_step", "Time of a decode step", curves_of("decode_step_ms"),
        y="Milliseconds", zero=True, empty=NOT_YET,
        description=f"{metrics.decode_step_ms.sentence}.",
    ),
    RunChart(
        "draft_budget", "Draft budget over steps", _budgets,
        content=_length_by_step, y="Tokens per draft", empty=NO_BUDGET,
        description="Mean draft length that engines chose, over steps, weighted by decode steps.",
    ),
    RunChart(
        "chosen_length", "Draft length against running samples", _budgets,
        content=_length_by_running, x=RUNNING, counted="other", y="Tokens per draft", empty=NO_BUDGET,
        description="Mean draft length that engines chose, by the number of running samples.",
    ),
    RunChart(
        "draft_gain", "Gain of drafts, measured in this run", _gains,
        content=_gain, y="Times the tokens per second", zero=False, level=Level(1.0), empty=NO_GAIN,
        description="Tokens per second of an engine with drafts, as a multiple of those without; mean over the "
        "engines.",
    ),
    RunChart(
        "accepted_tokens", "Expected and accepted draft tokens", _budgets,
        content=_accepted, x=RUNNING, counted="other", y="Tokens", empty=NO_BUDGET,
        description="Accepted draft tokens of a decode step by the number of running samples, expected and "
        "measured.",
    ),
    RunChart(
        "predicted_step", "Predicted and real step time", _budgets,
        content=_step_time, x=RUNNING, counted="other", y="Milliseconds", empty=NO_BUDGET,
        description="Time of a decode step by the number of running samples, predicted and measured.",
    ),
)  # fmt: skip
