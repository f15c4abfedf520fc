"""Figures of the trainer's metrics: groups of metrics by their names, single metrics, and readers' panels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curves import Curve, curve_names
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import METRIC_LENGTH
from rhyme_openrlhf.api.store.step_figures import COLUMNS
from rhyme_openrlhf.api.store.step_figures import FIGURES as STEP_FIGURES
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.run_figure import RunCurves, RunFigure, Window, curves_of
from rhyme_openrlhf.webui.figures.subjects.learning import SPREADS
from rhyme_openrlhf.webui.site import text

# Most curves of one chart: one per colour.
MOST_CURVES = len(palette.CATEGORICAL)
CurveName = Annotated[str, Field(min_length=1, max_length=METRIC_LENGTH, pattern=NO_NUL)]


class OneMetric(Window):
    """The options of the figure "metric". `name`: a metric of the run."""

    name: CurveName


class Panel(Window):
    """The options of the figure "panel". `curve`: names of curves."""

    curve: Annotated[list[CurveName], Field(min_length=1, max_length=MOST_CURVES)]


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
DRAWN = frozenset({*SPREADS, *COLUMNS, *STEP_FIGURES})


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


def metric_names(session: Session, run: Run) -> list[str]:
    """Return the names of the run's metrics."""
    return curve_names(session, run)["metrics"]


def _metric(session: Session, run: Run, window: OneMetric) -> dict[str, Curve]:
    return curves_of(window.name)(session, run, window)


def _panel(session: Session, run: Run, panel: Panel) -> dict[str, Curve]:
    return curves_of(*panel.curve)(session, run, panel)


def _metrics_of(group: MetricGroup) -> Callable[[Session, Run, Window], dict[str, Curve]]:
    def ask(session: Session, run: Run, window: Window) -> dict[str, Curve]:
        names, _ = grouped(metric_names(session, run))
        return curves_of(*names[group.name])(session, run, window)

    return ask


def _metric_label(name: str) -> str:
    return name.removeprefix("eval/").removeprefix("eval_")


def _group_figure(group: MetricGroup) -> RunFigure:
    return RunCurves(
        group.name, group.title, _metrics_of(group), y=group.title, description=group.description, empty=group.empty,
        label=_metric_label,
    )  # fmt: skip


FIGURES: tuple[RunFigure, ...] = (
    *map(_group_figure, GROUPS),
    RunCurves(
        "metric", "Metric", _metric,
        description=lambda found: f"{next(iter(found))}, as the trainer reports it.",
        empty="It has no finite value.",
        options=OneMetric,
    ),
    RunCurves(
        "panel", "Panel", _panel,
        y=lambda found: text.label(next(iter(found))) if len(found) == 1 else "",
        description=lambda found: f"Curves of a reader's choice: {', '.join(map(text.label, found))}.",
        empty="The run has not reported any of these curves.",
        options=Panel,
    ),
)  # fmt: skip
