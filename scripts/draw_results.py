#!/usr/bin/env python3
"""Draw the chart of the first page from the tables of results: `docs/images/results/first-epochs.svg`.

    scripts/draw_results.py            # writes the chart

Every number is read from a page: each figure stands once. The file is plain SVG, and its colours follow the reader's
light or dark scheme. `tests/scripts/test_draw_results.py` compares it with what this script draws.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from draw_figures import WIDTH, figure, line, text

DOCS = Path(__file__).parents[1] / "docs"
FILE = DOCS / "images" / "results" / "first-epochs.svg"
SPEED, RESULTS = DOCS / "measurements" / "speed.md", DOCS / "results.md"
LEFT, TOP, BOTTOM, BAR = 60, 76, 300, 62
MOST = 2.4
NUMBER = r"\d+\.\d+"


class Ratio(NamedTuple):
    """Speed with drafts over speed without: the figure and the range of its repeats."""

    value: float
    low: float
    high: float


class Bar(NamedTuple):
    """One bar: its lines of text, its ratio, and the class of its colour."""

    lines: tuple[str, ...]
    ratio: Ratio
    kind: str


def cells(page: Path, beginning: str) -> list[str]:
    """Return the cells of the one table row that begins with these words. Raises ValueError without it."""
    rows = [row for row in page.read_text().splitlines() if row.startswith(f"| {beginning} |")]
    if len(rows) != 1:
        raise ValueError(f"{page.name} has {len(rows)} rows that begin with {beginning!r}, not one")
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


def ratio(cell: str) -> Ratio:
    """Return the ratio that a cell prints: its figure, then its repeats or its range in brackets."""
    value, *others = map(float, re.findall(NUMBER, cell))
    return Ratio(value, min(others), max(others))


def bars() -> list[Bar]:
    """Return the bars, from the pages."""
    own, earlier = cells(SPEED, "ours / no drafts"), cells(SPEED, "earlier / no drafts")
    real = cells(RESULTS, "SmolLM2-135M-Instruct, answers of up to 160 tokens, three epochs")
    return [
        Bar(("drafts", "epoch 1"), ratio(own[1]), "a"),
        Bar(("drafts", "epoch 2"), ratio(own[2]), "a"),
        Bar(("and an earlier run", "epoch 1"), ratio(earlier[1]), "c"),
        Bar(("and an earlier run", "epoch 2"), ratio(earlier[2]), "c"),
        Bar(("drafts", "epochs 1 to 3"), ratio(real[2]), "b"),
    ]


def chart() -> str:
    """Return the chart as an SVG file."""

    def height(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / MOST

    elements = [text(WIDTH / 2, 26, "Rollout tokens/s with drafts, over those without drafts", "title")]
    for value in (0, 0.5, 1, 1.5, 2):
        elements += [line((LEFT, height(value)), (WIDTH - 20, height(value)))]
        elements += [text(LEFT - 8, height(value) + 4, f"{value:g}x", anchor="end")]
    # A gap stands between the two models.
    places = [LEFT + 24 + number * 126 + (34 if number > 3 else 0) for number in range(5)]
    for place, bar in zip(places, bars(), strict=True):
        middle, top = place + BAR / 2, height(bar.ratio.value)
        elements += [
            f'<rect class="{bar.kind}" x="{place:g}" y="{top:.1f}" width="{BAR}" height="{BOTTOM - top:.1f}"/>',
            f'<path class="arrow" d="M{middle:g} {height(bar.ratio.low):.1f} V{height(bar.ratio.high):.1f}"/>',
            text(middle, BOTTOM - 8, f"{bar.ratio.value:.2f}x", "title"),
        ]
        elements += [text(middle, BOTTOM + 18 + 15 * number, words) for number, words in enumerate(bar.lines)]
    elements += [
        text(places[0] + 220, 52, "embedded model, 1 M parameters: responses 84 to 91 % alike"),
        text(places[4] + BAR / 2, 52, "SmolLM2-135M: 18 to 19 %"),
        text(WIDTH / 2, BOTTOM + 62, "Measured on two CPU cores; lines show the range. No GPU.", "label"),
    ]
    return figure("Rollout speed with drafts from history, by model and epoch", BOTTOM + 76, *elements)


def write(file: Path) -> None:
    """Write the chart."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(chart(), encoding="utf-8")


def main() -> None:
    """Write the chart of the documentation."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    write(FILE)


if __name__ == "__main__":
    main()
