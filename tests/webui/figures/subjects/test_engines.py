"""Engines once a second."""

import pytest

from rhyme_openrlhf.webui.figures.subjects.engines import Look, Looks
from tests.webui.figure_rows import MIDNIGHT, draw, traces


def look(engine: int, at: float, running: int = 4, drafted: int = 10, accepted: int = 5) -> Look:
    return Look(engine, MIDNIGHT + at, running, 100.0 * running, drafted, accepted)


def test_a_line_an_engine_with_gaps_between_rollouts() -> None:
    figure = draw("running", Looks(1, 2, [look(0, 0), look(0, 1), look(1, 1, 7), look(0, 60)], False))
    drawn = traces(figure)
    assert list(drawn["Engine 0"].x) == [0, 1, None, 60] and list(drawn["Engine 1"].y) == [7]
    assert figure.layout.meta["description"] == "Samples running on each engine, steps 1 to 2."


def test_acceptance_is_of_what_was_drafted() -> None:
    looks = [look(0, 0, drafted=0, accepted=0), look(0, 1)]
    (line,) = draw("engine_acceptance", Looks(1, 1, looks, False)).data
    assert list(line.y) == [0.5]


def test_many_engines_are_their_mean_between_the_extremes() -> None:
    figure = draw("engine_speed", Looks(1, 1, [look(engine, 0.2, running=engine) for engine in range(11)], True))
    drawn = traces(figure)
    assert list(drawn["Largest"].y) == [1000.0] and list(drawn["Smallest"].y) == [0.0]
    (mean,) = [trace for name, trace in drawn.items() if name.startswith("Mean of 11 engines")]
    assert list(mean.y) == pytest.approx([500.0])
    assert "Only the latest samples" in figure.layout.meta["description"]
