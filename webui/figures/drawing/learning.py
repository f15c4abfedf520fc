"""Learning figures: reward, response lengths, the trainer's metrics, and off-policyness (age of the weights)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.api.store.step_figures import COLUMNS, FIGURES
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import (
    OnAxis,
    blank,
    frame_values,
    has_values,
    lines,
    pattern,
    summary,
    y_axis,
)
from rhyme_openrlhf.webui.site import text

NO_REWARD = "No step of this run has reported a reward yet."
NO_CURVE = "The run has not reported any of these curves."
NO_ROLLOUT = "No rollout of this run is finished yet."
# Messages by what is counted (`Ages.of`).
NO_VERSIONS = {
    "samples": "Not recorded by this run: only --weights.transport buffer numbers the engines' weights, and older "
    "versions do not count samples.",
    "response tokens": "Not recorded by this run: only --weights.transport buffer numbers the engines' weights.",
}
# Standard deviations of rewards: over a step's samples (the trainer's name) and within a prompt's samples.
SPREADS: tuple[str, ...] = ("rollout/reward_std", "group_reward_std")
SPREAD_WORDS = {
    "rollout/reward_std": "the standard deviation over the step's samples",
    "group_reward_std": "the mean standard deviation within a prompt's samples",
}
# Most curves of one chart: one per colour.
MOST_CURVES = len(palette.CATEGORICAL)


@dataclass(frozen=True)
class MetricGroup:
    """Metrics that share a chart, selected by name.

    `empty`: the sentence shown without values, which says what makes a trainer report them.
    """

    name: str
    title: str
    description: str
    matches: Callable[[str], bool]
    empty: str


def _words(*wanted: str) -> Callable[[str], bool]:
    return lambda name: bool(set(re.split(r"[/_.]", name.lower())) & set(wanted))


# A metric belongs to the first group whose `matches` accepts it.
GROUPS: tuple[MetricGroup, ...] = (
    MetricGroup(
        "evaluation", "Evaluation", "Results on the evaluation set.", lambda name: name.startswith("eval/")
        # Tokens and counts are no results, and would flatten the results on a shared axis.
        and not _words("length", "samples", "truncated")(name),
        "No evaluation of this run has been reported. OpenRLHF evaluates with --eval.dataset and --eval.steps.",
    ),
    MetricGroup(
        "entropy", "Entropy", "Entropy of the policy, as the trainer reports it.",
        lambda name: "entropy" in name.lower(),
        "Not reported by this run. OpenRLHF reports entropy with --actor.entropy_coef (0 is enough).",
    ),
    MetricGroup(
        "kl", "KL divergence", "Distances between policies: to the reference model (kl), to the policy before the "
        "step (ppo_kl), between engines and trainer (vllm_kl).", _words("kl"),
        "No step of this run has reported a KL divergence yet.",
    ),
    MetricGroup(
        "gradient", "Gradient norm", "Norm of the gradient before clipping.", lambda name: "grad_norm" in name.lower(),
        "No step of this run has reported a gradient norm yet.",
    ),
    MetricGroup(
        "loss", "Loss", "Losses as the trainer reports them.", _words("loss"),
        "No step of this run has reported a loss yet.",
    ),
    MetricGroup(
        "learning_rate", "Learning rate", "Learning rate of each optimiser.", _words("lr"),
        "No step of this run has reported a learning rate yet.",
    ),
)  # fmt: skip
# Metrics that other figures of the page draw. A metric named like a column of `steps` is that column.
DRAWN = frozenset({*SPREADS, *COLUMNS, *FIGURES})


@dataclass(frozen=True)
class AgeBucket:
    """Numbers of samples (or tokens) of steps `first` to `last` by off-policyness."""

    first: int
    last: int
    amounts: Mapping[int, int]


@dataclass(frozen=True)
class Ages:
    """Off-policyness of a run. `of`: the unit that is counted; `every`: one of this many steps was read."""

    of: Literal["samples", "response tokens"]
    buckets: Sequence[AgeBucket]
    every: int = 1


def grouped(names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the metrics of each group, at most MOST_CURVES per group, and the metrics that no chart draws yet."""
    groups: dict[str, list[str]] = {group.name: [] for group in GROUPS}
    rest = []
    for name in sorted(names):
        if name in DRAWN:
            continue
        group = next((one.name for one in GROUPS if one.matches(name)), None)
        if group is None or len(groups[group]) >= MOST_CURVES:
            rest.append(name)
        else:
            groups[group].append(name)
    return groups, rest


def reward(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the mean reward of each step with its spread; the trainer's reward is preferred to the rollout's."""
    curve = found["reward"] if has_values(found["reward"]) else found["rollout_reward"]
    spread = next((one for name in SPREADS if (one := found.get(name)) and has_values(one)), None)
    figure = lines([curve], options, "Mean reward", "Mean reward of each step's samples.", NO_REWARD)
    if spread is not None and figure.data:
        _add_spread(figure, curve, spread)
        figure.layout.meta["description"] += f" Shaded: {SPREAD_WORDS[spread.name]}."
    return figure


def _add_spread(figure: go.Figure, curve: Curve, spread: Curve) -> None:
    """Add a band of one standard deviation on both sides, behind the line."""
    widths = dict(zip(spread.x, spread.values, strict=True))
    known = [
        (x, value, width)
        for x, value in zip(curve.x, curve.values, strict=True)
        if value is not None and (width := widths.get(x)) is not None
    ]
    line = {"color": palette.BLUE, "width": 0}
    band = {"mode": "lines", "line": line, "hoverinfo": "skip", "showlegend": False, "x": [x for x, *_ in known]}
    upper = go.Scatter(y=[value + width for _, value, width in known], name="Mean + deviation", **band)
    lower = go.Scatter(
        y=[value - width for _, value, width in known], name="Mean - deviation", fill="tonexty",
        fillcolor=palette.faint(palette.BLUE), **band,
    )  # fmt: skip
    drawn = list(figure.data)
    figure.data = []
    figure.add_traces([upper, lower, *drawn])
    frame_values(figure)


def throughput(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the response tokens per second of rollout, over all engines."""
    description = "Response tokens of all engines per second of rollout."
    return _from_zero(lines([found["tokens_per_second"]], options, "Tokens/s", description, NO_ROLLOUT), options)


def step_parts(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the seconds of a step and of its parts."""
    names = ("step_seconds", "rollout_seconds", "train_seconds", "experience_seconds", "sync_seconds")
    description = "Seconds of a whole step, and of its parts; parts of different steps may overlap in time."
    return _from_zero(lines([found[name] for name in names], options, "Seconds", description, NO_ROLLOUT), options)


def lengths(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw response lengths in tokens."""
    names = {"length_mean": "Mean", "length_median": "Median", "length_p95": "95th percentile", "length_max": "Longest"}
    description = f"Response lengths of each step in tokens. Mean: {summary(found['length_mean'])}"
    shown = [found[name] for name in names]
    return _from_zero(lines(shown, options, "Tokens", description, NO_ROLLOUT, names=names), options)


def truncated(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw the share of responses that reached the length limit."""
    description = "Share of responses that were cut off at the length limit."
    return lines([found["truncated_share"]], options, "Share of responses", description, NO_ROLLOUT, share=True)


def metric_group(group: MetricGroup) -> Callable[[Mapping[str, Curve], OnAxis], go.Figure]:
    """Return the function that draws a group's metrics."""

    def draw(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
        shown = [found[name] for name in sorted(found)]
        names = {name: name.removeprefix("eval/").removeprefix("eval_") for name in found}
        return lines(shown, options, group.title, group.description, group.empty, names=names)

    return draw


def metric(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw a single metric."""
    (curve,) = found.values()
    figure = lines([curve], options, "", f"{curve.name}, as the trainer reports it.", "It has no finite value.")
    figure.update_layout(yaxis=y_axis("", options.scale, curve.values))
    return figure


def panel(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Draw curves that a reader has put together."""
    names = [text.label(name) for name in found]
    description = f"Curves of a reader's choice: {', '.join(names)}."
    return lines(list(found.values()), options, names[0] if len(names) == 1 else "", description, NO_CURVE)


def off_policyness(rows: Ages, options: object) -> go.Figure:
    """Draw the off-policyness of each step's samples, or of their tokens, as stacked shares."""
    description = "Off-policyness: training steps between the weights a sample was generated with and its use."
    ages = sorted({age for one in rows.buckets for age in one.amounts})
    total = sum(sum(one.amounts.values()) for one in rows.buckets)
    if not ages or not total:
        return blank(description, NO_VERSIONS[rows.of])
    shares = {age: sum(one.amounts.get(age, 0) for one in rows.buckets) / total for age in ages}
    words = ", ".join(f"{text.percent(share)} at {age}" for age, share in shares.items())
    looked_at = "" if rows.every == 1 else f" in one of every {rows.every} steps"
    figure = blank(f"{description} Of all {rows.of}{looked_at}: {words}.")
    shown = [one for one in rows.buckets if sum(one.amounts.values())]
    for index, age in enumerate(ages):
        name = "0 (on policy)" if age == 0 else str(age)
        values = [one.amounts.get(age, 0) / sum(one.amounts.values()) for one in shown]
        figure.add_trace(
            go.Bar(
                x=[(one.first + one.last) / 2 for one in shown], y=values, name=name,
                width=[one.last - one.first + 0.84 for one in shown], textposition="none",
                text=[
                    f"{text.span(one.first, one.last)}: {text.percent(value)} of {rows.of} at {age}"
                    for one, value in zip(shown, values, strict=True)
                ],
                hovertemplate="%{text}<extra></extra>",
                marker={
                    "color": palette.series_color(index), "line": {"width": 0},
                    "pattern": pattern(index, len(shown)),
                },
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="stack", showlegend=True, hovermode="closest", xaxis={"title": {"text": "Step"}},
        yaxis={"title": {"text": f"Share of {rows.of}"}, "tickformat": ".0%", "range": [0, 1]},
    )  # fmt: skip
    return figure


def _from_zero(figure: go.Figure, options: OnAxis) -> go.Figure:
    """Let a linear y axis begin at 0, so that amounts can be compared."""
    if options.scale == "linear" and figure.data:
        figure.update_layout(yaxis={"rangemode": "tozero"})
        frame_values(figure)
    return figure
