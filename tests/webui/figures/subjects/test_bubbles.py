"""The bubble fraction, by cause."""

from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.series import Span
from rhyme_openrlhf.webui.figures.subjects.bubbles import StepBucket, fraction
from tests.webui.figure_rows import Options, traces


def bucket(first: int, last: int, **causes: float) -> StepBucket:
    return StepBucket(Span(first, last), float(last), 100.0, {**dict.fromkeys(palette.CAUSES, 0.0), **causes})


def test_the_bubble_fraction_is_stacked_by_cause() -> None:
    figure = fraction([bucket(1, 5, tail=10, weights=5), bucket(6, 10, tail=30)], Options())
    drawn = traces(figure)
    assert set(drawn) == {"Others' tail", "First request"}
    assert list(drawn["Others' tail"].y) == [0.1, 0.3] and list(drawn["Others' tail"].x) == [3, 8]
    assert list(drawn["Others' tail"].customdata) == [5, 10]
    assert "others' tail 20.0%, first request 2.5%" in figure.layout.meta["description"]
    assert list(traces(fraction([bucket(1, 5, tail=1)], Options("time")))["Others' tail"].x) == [5.0]


def test_many_buckets_of_bubbles_are_areas_that_lead_to_their_steps_too() -> None:
    many = [bucket(step, step, tail=step) for step in range(1, 101)]
    (area,) = fraction(many, Options()).data
    assert (area.type, area.stackgroup, len(area.x)) == ("scatter", "stack", 100)
    assert list(area.customdata) == list(area.x) and area.text[7] == "Step 8: others' tail 8.0%"
