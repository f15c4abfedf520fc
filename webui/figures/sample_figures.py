"""Figures of a run's tables of samples: histograms over steps, and a step's gaps between engine and trainer.

They are drawn of files of the run directory, not of the store. Their address is
`/ui/runs/<uid>/sample-figures/<name>`.

Invariant: at most `MOST_STEPS` tables are read for a figure, the newest, and of each the few columns that are drawn.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plotly.graph_objects import Figure

from rhyme_openrlhf.api.read.log_files import LogError
from rhyme_openrlhf.api.read.sample_tables import Folders, Sample, gap_counts, samples_of_step, table_steps, tables
from rhyme_openrlhf.telemetry.sample_table import GAP_BOUNDS
from rhyme_openrlhf.webui.figures.drawing.chart import Chart, Content
from rhyme_openrlhf.webui.figures.drawing.series import Bars
from rhyme_openrlhf.webui.site import text

MOST_STEPS = 100
CLASSES = 6
COLUMNS = ("reward", "advantage", "tokens", "age", "gap_counts")
NO_GAPS = (
    "No gaps were recorded: engines give log-probabilities with --algo.advantage.is_correction_level other than off."
)


@dataclass(frozen=True)
class StepValues:
    """A step's samples, as far as they are drawn."""

    step: int
    samples: Sequence[Sample]


@dataclass(frozen=True)
class SampleFigure:
    """A figure of the newest steps, or `of_one_step`."""

    title: str
    chart: Chart
    of_one_step: bool = False

    def draw(self, folders: Folders, step: int | None) -> Figure:
        """Draw the newest steps, or the step."""
        recorded = table_steps(folders)
        if self.of_one_step:
            recorded = [one for one in recorded if step is None or one.step == step][:1]
        files = tables(folders, reversed(recorded[:MOST_STEPS]))
        return self.chart.draw(
            [StepValues(step, _values(folder, step, changed)) for step, folder, changed in files], None
        )


@functools.lru_cache(maxsize=4 * MOST_STEPS)
def _values(folder: Path, step: int, changed: int) -> Sequence[Sample]:
    """Return the samples of a table, which changes as a whole alone, and then when it was `changed`."""
    try:
        return samples_of_step([(0, folder)], step, COLUMNS)
    except LogError:
        return ()


def bounds_of(values: Sequence[float]) -> list[float]:
    """Return bounds that part the values into at most `CLASSES` classes of one width, or one class a value if few."""
    distinct = sorted(set(values))
    if len(distinct) <= CLASSES:
        return distinct[1:]
    width = (distinct[-1] - distinct[0]) / CLASSES
    return [distinct[0] + width * place for place in range(1, CLASSES)]


def class_names(values: Sequence[float], bounds: Sequence[float]) -> list[str]:
    """Return the classes' names: the value that alone is in one, or from where to where it goes."""
    distinct = sorted(set(values))
    if len(distinct) == len(bounds) + 1:
        return [text.number(value) for value in distinct]
    ends = [distinct[0], *bounds, distinct[-1]]
    return [f"{text.number(low)} to {text.number(high)}" for low, high in zip(ends, ends[1:], strict=False)]


def _histogram(name: str) -> Callable[[Sequence[StepValues]], Content | None]:
    def content(rows: Sequence[StepValues]) -> Content | None:
        of_steps = [(one.step, [v for s in one.samples if (v := s.values[name]) is not None]) for one in rows]
        of_steps = [(step, values) for step, values in of_steps if values]
        everything = [value for _, values in of_steps for value in values]
        if not everything:
            return None
        bounds = bounds_of(everything)
        names = class_names(everything, bounds)
        counts = [_counted(values, bounds) for _, values in of_steps]
        return Content(list(_bars([step for step, _ in of_steps], names, counts, "samples")))

    return content


def _counted(values: Sequence[float], bounds: Sequence[float]) -> list[int]:
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_right(bounds, value)] += 1
    return counts


def _bars(steps: Sequence[int], names: Sequence[str], counts: Sequence[Sequence[int]], of: str) -> Iterator[Bars]:
    for place, name in enumerate(names):
        shares = [one[place] / max(1, sum(one)) for one in counts]
        words = [
            f"Step {step}: {text.percent(share)} of {of} ({one[place]}) at {name}"
            for step, share, one in zip(steps, shares, counts, strict=True)
        ]
        yield Bars(name, list(steps), shares, words, steps=list(steps))


def range_names(bounds: Sequence[float]) -> list[str]:
    """Return the names of the classes that bounds part, the open ones at both ends too."""
    edges = [f"{bound:g}" for bound in bounds]
    return [f"below {edges[0]}", *map(" to ".join, zip(edges, edges[1:], strict=False)), f"{edges[-1]} and above"]


# Sizes of gaps, from those that rounding makes to those that a wrong model makes.
_SIZES = range_names([bound for bound in GAP_BOUNDS if bound > 0])


def gap_sizes(counts: Sequence[int]) -> list[int]:
    """Return how many tokens have a gap of each size."""
    middle = len(counts) // 2
    pairs = [counts[middle - away] + counts[middle + away] for away in range(1, middle + 1)]
    return [counts[middle], *pairs]


def _gaps_over_steps(rows: Sequence[StepValues]) -> Content | None:
    counted = [(one.step, gap_sizes(gap_counts(one.samples))) for one in rows]
    counted = [(step, sizes) for step, sizes in counted if sum(sizes)]
    if not counted:
        return None
    return Content(list(_bars([step for step, _ in counted], _SIZES, [sizes for _, sizes in counted], "tokens")))


def _gaps(rows: Sequence[StepValues]) -> Content | None:
    counts = gap_counts(sample for one in rows for sample in one.samples)
    total = sum(counts)
    if not total:
        return None
    names = range_names(GAP_BOUNDS)
    shares = [count / total for count in counts]
    words = [
        f"{name}: {count:,} tokens, {text.percent(share, 3)}"
        for name, count, share in zip(names, counts, shares, strict=True)
    ]
    far = sum(counts[: GAP_BOUNDS.index(-0.1) + 1] + counts[GAP_BOUNDS.index(0.1) + 1 :])
    facts = f"Of {total:,} tokens, {text.percent(far / total, 3)} have a gap of 0.1 or more."
    return Content([Bars("Tokens", names, shares, words)], facts, facts)


def _over_steps(title: str, name: str, description: str) -> SampleFigure:
    return SampleFigure(
        title,
        Chart(
            content=_histogram(name), y="Share of samples", share=True, top=1.0, legend=True,
            empty="No step of this run has recorded it.", description=description,
        ),
    )  # fmt: skip


SAMPLE_FIGURES: dict[str, SampleFigure] = {
    "gaps": SampleFigure(
        "Gap between engine and trainer in this step",
        Chart(
            content=_gaps, x="Trainer's less engine's log-probability of a token", counted="other",
            y="Share of tokens", share=True, legend=False, empty=NO_GAPS,
            description="How far the trainer's log-probabilities of a step's tokens are from the engine's.",
        ),
        of_one_step=True,
    ),
    "gaps_over_steps": SampleFigure(
        "Gap over steps",
        Chart(
            content=_gaps_over_steps, y="Share of tokens", share=True, top=1.0, legend=True, empty=NO_GAPS,
            description="Sizes of the gaps between trainer and engine of each step's tokens.",
        ),
    ),
    "rewards": _over_steps("Reward over steps", "reward", "Rewards of each step's samples, in classes."),
    "advantages": _over_steps("Advantage over steps", "advantage", "Advantages of each step's samples, in classes."),
    "tokens": _over_steps("Length over steps", "tokens", "Response tokens of each step's samples, in classes."),
    "ages": _over_steps("Age over steps", "age", "Age of each step's samples in training steps."),
}  # fmt: skip
