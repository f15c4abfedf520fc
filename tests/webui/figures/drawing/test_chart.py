"""Curves over the axis that a reader chooses, and what all charts share."""

import pytest

from rhyme_openrlhf.webui.figures.drawing import axes, palette
from tests.webui.figure_rows import Options, curve, curves, traces


def test_a_curve_keeps_its_colour_whichever_others_are_there() -> None:
    both = curves(curve("a", 1.0), curve("b", 2.0))
    alone = curves(curve("a"), curve("b", 2.0))
    assert traces(both)["b"].line.color == traces(alone)["b"].line.color == palette.series_color(1)


def test_a_logarithmic_scale_needs_something_above_zero() -> None:
    assert curves(curve("a", 0.1, 10), options=Options(scale="log")).layout.yaxis.type == "log"
    assert curves(curve("a", -1, 0), options=Options(scale="log")).layout.yaxis.type == "linear"


@pytest.mark.parametrize(("value", "form"), [(8e3, ",~f"), (8e8, None), (8e-6, None), (0.5, None)])
def test_thousands_are_written_out(value: float, form: str | None) -> None:
    assert curves(curve("a", 1e-7, value)).layout.yaxis.tickformat == form


@pytest.mark.parametrize(
    ("end", "shown"), [(3, 3), (37.5, 37.5), (199, 200), (1030, 1040), (5001, 5100), (5100, 5100), (0.3, 0.3)]
)
def test_an_axis_of_steps_ends_at_a_round_number(end: float, shown: float) -> None:
    assert axes.round_end(end) == shown


@pytest.mark.parametrize("steps", range(1, 20_000, 997))
def test_little_of_an_axis_is_left_empty(steps: int) -> None:
    assert steps <= axes.round_end(steps) <= steps * (1 + 1 / axes.ROOM)


def test_curves_over_all_steps_say_so() -> None:
    layout = curves(curve("a", *range(1, 105)), curve("b", None, 1.0)).layout
    assert layout.xaxis.autorangeoptions.include == 104
