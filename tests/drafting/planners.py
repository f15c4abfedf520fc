"""Draft planners with step times of the test's own."""

from __future__ import annotations

from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES
from rhyme_openrlhf.drafting.planner import DraftPlanner
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from tests.latency import formula

SOURCES = len(SOURCE_NAMES)


def planner(ms_a_row: float) -> DraftPlanner:
    """A planner for decode steps of 10 ms and `ms_a_row` for each row."""
    points = tuple(
        StepPoint(b, b * each, b * d, 0.010 + ms_a_row / 1000 * (b + b * d), 0.0, 9)
        for b in (1, 64)
        for each in (16, 1024)
        for d in (0, 1, 31)
    )
    model = StepModel(formula.profile(steps=points, padded_rows=()))
    return DraftPlanner(Predictor(model), SOURCES)
