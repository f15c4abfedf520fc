"""Speculation figures: rates over steps, and measurements of single engines and draft lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.telemetry.events import DraftBudget, DraftGain
from rhyme_openrlhf.telemetry.metrics import engines_gain
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import OnAxis, blank, grows, lines, summary, x_axis
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
SOURCES = ("history_share", "siblings_share", "own_share", "shared_share")
# A part of the first source, drawn as a line.
EARLIER = "earlier_share"


def rates(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw speculation rate and acceptance rate."""
    shown = [found["speculation_rate"], found["acceptance_rate"]]
    description = "Share of response tokens that were accepted drafts, and share of drafted tokens that were accepted."
    for curve in shown:
        if words := summary(curve, share=True):
            description += f" {text.label(curve.name)}: {words[0].lower()}{words[1:]}"
    return lines(shown, options, "Share of tokens", description, NOT_YET, share=True)


def sources(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the speculation rate, stacked by the source of the accepted drafts, and the part of earlier runs."""
    description = "Share of response tokens that were accepted drafts, by the drafts' source."
    shown = [found[name] for name in SOURCES]
    if not any(value for curve in shown for value in curve.values):
        return blank(description, NO_DRAFTS)
    last = [next((value for value in reversed(curve.values) if value is not None), 0.0) for curve in shown]
    parts = [
        f"{text.label(curve.name).lower()} {text.percent(value)}" for curve, value in zip(shown, last, strict=True)
    ]
    from_earlier = found[EARLIER]
    drawn = any(from_earlier.values)
    if drawn and (words := summary(from_earlier, share=True)):
        description += f" Of earlier responses, those of earlier runs alone: {words[0].lower()}{words[1:]}"
    figure = blank(f"{description} Last: {', '.join(parts)}.")
    for index, curve in enumerate(shown):
        color = palette.series_color(index)
        figure.add_trace(
            go.Scatter(
                # The three shares of one step exist together or not at all; the stack shows a gap at steps without
                # shares.
                x=curve.x, y=curve.values, name=text.label(curve.name), mode="lines", stackgroup="sources",
                stackgaps="infer zero", fillcolor=color, line={"color": color, "width": 0.5, "shape": "hvh"},
                hovertemplate="%{y:.1%}",
            )
        )  # fmt: skip
    if drawn:
        index = len(shown)
        figure.add_trace(
            go.Scatter(
                x=from_earlier.x, y=from_earlier.values, name=text.label(EARLIER), mode="lines",
                line={
                    "color": palette.series_color(index), "dash": palette.series_dash(index), "width": 2,
                    "shape": "hvh",
                },
                hovertemplate="%{y:.1%}",
            )
        )  # fmt: skip
    grows(figure, max(curve.x[-1] for curve in shown if curve.x))
    figure.update_layout(
        xaxis=x_axis(options.axis, max(curve.x[-1] for curve in shown if curve.x)),
        yaxis={"title": {"text": "Share of tokens"}, "tickformat": ".0%", "rangemode": "tozero"},
        showlegend=True,
        hovermode="x unified",
    )
    return figure


def tokens_per_step(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the tokens that a sample gains from one decode step."""
    description = "Tokens that one running sample gets from one decode step; 1 without speculation."
    figure = lines([found["tokens_per_step"]], options, "Tokens per sample and step", description, NOT_YET)
    if figure.data:
        line = {"color": palette.GREY, "width": 1, "dash": "dot"}
        words = {"text": "without speculation", "font": {"size": 10}, "showarrow": False}
        figure.add_hline(y=1.0, line=line, annotation={**words, "xanchor": "right", "yanchor": "bottom"})
    return figure


def draft_length(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the mean tokens of a draft, limited by the sample's window and by the length of the history's match."""
    description = (
        "Mean tokens of a draft: the sample's window (at most --histospec.window_max), or less where the history "
        "matches less."
    )
    figure = lines([found["drafted_per_draft"]], options, "Tokens per draft", description, NO_DRAFTS)
    return figure.update_layout(yaxis={"rangemode": "tozero"})


def cost(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the share of the engines' busy time spent on looking up drafts."""
    description = "Share of the engines' busy time that looking up drafts takes."
    return lines([found["drafting_share"]], options, "Share of busy time", description, NOT_YET, share=True)


def step_time(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the busy milliseconds of a decode step."""
    description = "Busy milliseconds of an engine per decode step, prefills and drafting included."
    figure = lines([found["decode_step_ms"]], options, "Milliseconds", description, NOT_YET)
    return figure.update_layout(yaxis={"rangemode": "tozero"})


def chosen_length(budgets: Sequence[DraftBudget], options: object) -> go.Figure:
    """Draw the chosen draft length against running samples, over all reported decode steps."""
    description = "Mean draft length that engines chose, by the number of running samples."
    means = _means(budgets, "draft_length")
    if not means:
        return blank(description, NO_BUDGET)
    figure = blank(f"{description} {_ends(means, 'tokens')}")
    figure.add_trace(_by_running(means, "Chosen draft length", 0, "%{y:.2f} tokens with %{x} running"))
    return _over_running(figure, "Tokens per draft")


def budget(budgets: Sequence[DraftBudget], options: object) -> go.Figure:
    """Draw the chosen draft length over steps."""
    description = "Mean draft length that engines chose, over steps, weighted by decode steps."
    by_step: dict[int, list[DraftBudget]] = defaultdict(list)
    for one in budgets:
        by_step[one.step].append(one)
    points = []
    for step, of_step in sorted(by_step.items()):
        weights = sum(sum(one.decode_steps) for one in of_step)
        if weights:
            total = sum(
                length * count
                for one in of_step
                for length, count in zip(one.draft_length, one.decode_steps, strict=False)
            )
            points.append((step, total / weights))
    if not points:
        return blank(description, NO_BUDGET)
    figure = blank(description)
    figure.add_trace(
        go.Scatter(
            x=[step for step, _ in points], y=[value for _, value in points], name="Chosen draft length",
            mode="lines", line={"color": palette.BLUE, "width": 2}, hovertemplate="step %{x}: %{y:.2f}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout(
        xaxis={"title": {"text": "Step"}}, yaxis={"title": {"text": "Tokens per draft"}, "rangemode": "tozero"}
    )
    return figure


def predicted_time(budgets: Sequence[DraftBudget], options: object) -> go.Figure:
    """Draw the predicted and the measured time of a decode step against running samples."""
    description = "Time of a decode step by the number of running samples, predicted and measured."
    predicted, real = _means(budgets, "predicted_ms"), _means(budgets, "real_ms")
    if not real:
        return blank(description, NO_BUDGET)
    off = [abs(predicted[n] / value - 1) for n, value in real.items() if value and n in predicted]
    if off:
        description += f" Predictions are off by {text.percent(sum(off) / len(off))} on average."
    return _two_over_running(description, {"Predicted": predicted, "Measured": real}, "%{y:.2f} ms", "Milliseconds")


def accepted(budgets: Sequence[DraftBudget], options: object) -> go.Figure:
    """Draw expected and real accepted draft tokens of a decode step against running samples."""
    description = "Accepted draft tokens of a decode step by the number of running samples, expected and measured."
    expected, real = _means(budgets, "expected_accepted"), _means(budgets, "accepted")
    if not real:
        return blank(description, NO_BUDGET)
    return _two_over_running(description, {"Expected": expected, "Accepted": real}, "%{y:.1f} tokens", "Tokens")


def gain(found: Sequence[DraftGain], options: object) -> go.Figure:
    """Draw the gain of drafts over steps: the mean over engines, and the mean of their 95 % intervals."""
    description = "Tokens per second of an engine with drafts, as a multiple of those without; mean over the engines."
    by_step: dict[int, list[DraftGain]] = defaultdict(list)
    for one in found:
        by_step[one.step].append(one)
    if not by_step:
        return blank(description, NO_GAIN)
    steps = sorted(by_step)
    means = [mean for step in steps if (mean := engines_gain(by_step[step])) is not None]
    low, middle, high = ([getattr(mean, name) for mean in means] for name in ("low", "ratio", "high"))
    figure = blank(f"{description} Now {middle[-1]:.2f} (95 %: {low[-1]:.2f} to {high[-1]:.2f}).")
    if not means[-1].shows_difference:
        figure.layout.meta["description"] += " That shows no difference yet, because 1 is within it."
    if advice := means[-1].advice:
        figure.layout.meta["description"] += f" {advice}"
        # Above the curves, where the note hides none of them.
        figure.add_annotation(
            text=advice.replace(": ", ":<br>"), xref="paper", yref="paper", x=0, y=1, xanchor="left", yanchor="bottom",
            align="left", showarrow=False,
        )  # fmt: skip
        figure.update_layout(margin={"t": 48})
    edge = {"width": 0, "color": palette.BLUE}
    figure.add_trace(go.Scatter(x=steps, y=high, mode="lines", line=edge, showlegend=False, hoverinfo="skip"))
    figure.add_trace(
        go.Scatter(
            x=steps, y=low, name="95 %", mode="lines", line=edge, fill="tonexty", fillcolor="rgba(59, 130, 214, 0.2)",
            hoverinfo="skip",
        )
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=steps, y=middle, name="Gain", mode="lines+markers", line={"color": palette.BLUE, "width": 2},
            hovertemplate="step %{x}: %{y:.2f} times<extra></extra>",
        )
    )  # fmt: skip
    figure.add_hline(y=1.0, line={"color": palette.GREY, "width": 1, "dash": "dot"})
    figure.update_layout(
        xaxis={"title": {"text": "Step"}}, yaxis={"title": {"text": "Times the tokens per second"}}, showlegend=False
    )
    return figure


def _two_over_running(description: str, means: Mapping[str, dict[int, float]], hover: str, unit: str) -> go.Figure:
    """Draw predicted and real values, named in this order by `means`, against running samples."""
    figure = blank(description)
    for index, (name, values) in zip((1, 0), means.items(), strict=True):
        figure.add_trace(_by_running(values, name, index, hover))
    figure.update_layout(showlegend=True, hovermode="x unified")
    return _over_running(figure, unit)


def _means(budgets: Sequence[DraftBudget], name: str) -> dict[int, float]:
    """Return the mean of the field by number of running samples, weighted by decode steps."""
    totals: dict[int, float] = defaultdict(float)
    weights: dict[int, int] = defaultdict(int)
    for one in budgets:
        for running, count, value in zip(one.running, one.decode_steps, getattr(one, name), strict=False):
            totals[running] += value * count
            weights[running] += count
    return {running: totals[running] / weights[running] for running in sorted(weights) if weights[running]}


def _ends(means: Mapping[int, float], unit: str) -> str:
    low, high = min(means), max(means)
    return f"{text.number(means[low])} {unit} with {low} running, {text.number(means[high])} with {high}."


def _by_running(means: Mapping[int, float], name: str, index: int, hover: str) -> go.Scatter:
    color = palette.series_color(index)
    return go.Scatter(
        x=list(means),
        y=list(means.values()),
        name=name,
        mode="lines+markers",
        line={"color": color, "dash": palette.series_dash(index), "width": 2},
        marker={"color": color, "symbol": palette.SYMBOLS[index], "size": 7},
        hovertemplate=hover + "<extra></extra>" if name not in ("Predicted", "Measured") else hover,
    )


def _over_running(figure: go.Figure, y_title: str) -> go.Figure:
    figure.update_layout(
        xaxis={"title": {"text": "Running samples"}}, yaxis={"title": {"text": y_title}, "rangemode": "tozero"}
    )
    return figure
