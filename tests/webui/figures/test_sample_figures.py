"""Figures of tables of samples: classes over steps, and a step's gaps."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.telemetry.sample_table import GAP_BOUNDS, encoded_table
from rhyme_openrlhf.telemetry.samples import TABLE, file_name
from rhyme_openrlhf.webui.figures.sample_figures import (
    CLASSES,
    MOST_STEPS,
    SAMPLE_FIGURES,
    bounds_of,
    class_names,
    gap_sizes,
)


def write(folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
    given = [{"step": step, "number": number, "group": "g", **row} for number, row in enumerate(rows)]
    (folder / file_name(step, TABLE)).write_bytes(encoded_table(given))


def counts_of(*gaps: float) -> list[int]:
    counts = [0] * (len(GAP_BOUNDS) + 1)
    for gap in gaps:
        counts[bisect_right(GAP_BOUNDS, gap)] += 1
    return counts


def test_few_values_are_a_class_each_and_many_are_ranges() -> None:
    assert bounds_of([0.0, 1.0, 1.0]) == [1.0] and class_names([0.0, 1.0], [1.0]) == ["0", "1"]
    many = [float(value) for value in range(61)]
    bounds = bounds_of(many)
    assert bounds == [10, 20, 30, 40, 50] and class_names(many, bounds)[0] == "0 to 10"
    assert len(class_names(many, bounds)) == CLASSES


def test_a_gaps_size_has_no_sign() -> None:
    assert gap_sizes(counts_of(0.0, 0.005, -0.005)) == [3, 0, 0, 0, 0, 0, 0]
    assert gap_sizes(counts_of(0.02, -0.02, 0.5, -9.0)) == [0, 2, 0, 0, 1, 0, 1]


def test_a_steps_bars_are_the_shares_of_its_samples(tmp_path: Path) -> None:
    write(tmp_path, 1, [{"reward": 0.0}] * 3 + [{"reward": 1.0}])
    write(tmp_path, 2, [{"reward": 1.0}, {"reward": None}])
    drawn = SAMPLE_FIGURES["rewards"].draw([(1, tmp_path)], None)
    assert [(trace.name, list(trace.x), list(trace.y)) for trace in drawn.data] == [
        ("0", [1, 2], [0.75, 0.0]), ("1", [1, 2], [0.25, 1.0]),
    ]  # fmt: skip


def test_a_steps_gaps_are_those_of_all_its_tokens(tmp_path: Path) -> None:
    write(tmp_path, 1, [{"gap_counts": counts_of(0.0, 0.0, 5.0)}, {"gap_counts": counts_of(-0.2)}])
    write(tmp_path, 2, [{"gap_counts": counts_of(0.0)}])
    drawn = SAMPLE_FIGURES["gaps"].draw([(1, tmp_path)], 1)
    (bars,) = drawn.data
    assert dict(zip(bars.x, bars.y, strict=True))["-0.01 to 0.01"] == 0.5 and sum(bars.y) == pytest.approx(1.0)
    assert "Of 4 tokens, 50.000% have a gap of 0.1 or more." in drawn.layout.meta["description"]


def test_without_gaps_the_figure_names_the_option(tmp_path: Path) -> None:
    write(tmp_path, 1, [{"reward": 1.0}])
    for name in ("gaps", "gaps_over_steps"):
        assert (
            "--algo.advantage.is_correction_level"
            in SAMPLE_FIGURES[name].draw([(1, tmp_path)], None).layout.meta["empty"]
        )


def test_no_more_steps_are_read_than_are_drawn(tmp_path: Path) -> None:
    for step in range(1, MOST_STEPS + 6):
        write(tmp_path, step, [{"tokens": step}])
    drawn = SAMPLE_FIGURES["tokens"].draw([(1, tmp_path)], None)
    assert list(drawn.data[0].x) == list(range(6, MOST_STEPS + 6))
