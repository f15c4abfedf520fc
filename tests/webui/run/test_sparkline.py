"""The small curves of the table of runs."""

import pytest

pytest.importorskip("fastapi")

from rhyme_openrlhf.webui.run.sparkline import HEIGHT, POINTS, WIDTH, sampled_steps, sparkline


def test_few_steps_of_a_long_run_are_read_with_both_ends() -> None:
    assert sampled_steps(5) == [1, 2, 3, 4, 5]
    steps = sampled_steps(5000)
    assert len(steps) == len(set(steps)) == POINTS and steps[0] == 1 and steps[-1] == 5000
    assert sampled_steps(0) == sampled_steps(1) == []


def test_a_line_goes_up_with_its_values_and_stays_inside() -> None:
    line = sparkline([0.0, None, 0.5, 1.0])
    assert line is not None and line.words == "from 0 to 1"
    places = [tuple(map(float, point.split(","))) for point in line.points.split()]
    assert len(places) == 3 and places[-1] == line.end
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_one_value_is_no_curve_and_a_constant_is_a_level_one() -> None:
    assert sparkline([None, 0.5]) is None
    level = sparkline([0.5, 0.5])
    assert level is not None and {point.split(",")[1] for point in level.points.split()} == {str(HEIGHT / 2)}
