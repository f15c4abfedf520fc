"""Parallel coordinates: where values stand on their axes, and which class a run is of."""

from __future__ import annotations

from typing import Any

import pytest

from rhyme_openrlhf.webui.figures.drawing.parallel import CLASSES, Line, Place, parallel_coordinates
from tests.webui.figure_rows import traces


def line(name: str, *values: Any) -> Line:
    return Line(name, tuple(Place(value, "–" if value is None else str(value)) for value in values))


def drawn(*lines: Line) -> dict[str, Any]:
    return traces(parallel_coordinates([f"axis {at}" for at in range(len(lines[0].places))], lines))


def test_a_class_is_one_trace_with_gaps_between_its_lines() -> None:
    found = drawn(*(line(f"run {at}", at, at / 10) for at in range(8)))
    assert set(found) == {*CLASSES[:4], "Values of the axes"}
    best = found["Best quarter"]
    assert list(best.x) == ["axis 0", "axis 1", None] * 2 and best.connectgaps is False
    assert [text.partition("<br>")[0] for text in best.text if text] == ["run 6"] * 2 + ["run 7"] * 2
    looks = [(found[name].line.color, found[name].line.dash, found[name].marker.symbol) for name in CLASSES[:4]]
    assert all(len(set(column)) == 4 for column in zip(*looks, strict=True))


def test_a_run_without_a_result_ends_at_its_last_option() -> None:
    found = drawn(line("ended", 1, 0.5), line("queued", 2, None))
    assert list(found["No result yet"].y) == [1, None, None]
    assert list(found["Best quarter"].y) == [0, 0.5, None]


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ((1e-7, 1e-6, 1e-5), [0, 0.5, 1]),  # far apart: logarithmic
        ((1, 2, 5), [0, 0.25, 1]),
        ((0, 50, 100), [0, 0.5, 1]),  # a zero has no logarithm
        (("grpo", "gae", "rloo"), [0.5, 0, 1]),
        ((True, False, True), [1, 0, 1]),
        (([0.1, 0.2], 0.3, [0.1, 0.2]), [1, 0, 1]),
        ((7, 7, 7), [0.5, 0.5, 0.5]),
    ],
)
def test_numbers_stand_by_their_size_and_words_in_order(values: tuple[Any, ...], places: list[float]) -> None:
    lines = [line(f"run {at}", value, float(at)) for at, value in enumerate(values)]
    figure = parallel_coordinates(["option", "result"], lines)
    by_run = {
        trace.text[at].partition("<br>")[0]: trace.y[at]
        for trace in figure.data[:-1]
        for at in range(0, len(trace.x), 3)
    }
    assert [by_run[one.name] for one in lines] == pytest.approx(places)


def test_an_axis_names_only_values_with_room_between_them() -> None:
    lines = [line(f"run {at}", at, at) for at in range(101)]
    values = drawn(*lines)["Values of the axes"]
    named = [text for axis, text in zip(values.x, values.text, strict=True) if axis == "axis 0"]
    assert {"0", "100"} <= set(named) and len(named) == 8
