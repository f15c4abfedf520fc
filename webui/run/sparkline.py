"""A small reward curve as the points of an SVG line, for the table of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.webui.site import text

# Number of points: one every 4 pixels.
POINTS = 24
WIDTH, HEIGHT = 92, 22
# Margin for the thickness of the line.
MARGIN = 2


@dataclass(frozen=True)
class Sparkline:
    """A small curve. `points`: an SVG polyline in WIDTH x HEIGHT; `end`: its last point; `words`: its text
    alternative.
    """

    points: str
    end: tuple[float, float]
    words: str


def sparkline(values: Sequence[float | None]) -> Sparkline | None:
    """Return the curve of these values, or None with fewer than two values."""
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return None
    lowest = min(value for _, value in known)
    span = max(value for _, value in known) - lowest
    last = known[-1][0]

    def place(index: int, value: float) -> tuple[float, float]:
        share = (value - lowest) / span if span else 0.5
        x = MARGIN + (WIDTH - 2 * MARGIN) * (index - known[0][0]) / (last - known[0][0])
        return round(x, 1), round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share, 1)

    places = [place(index, value) for index, value in known]
    words = f"from {text.number(known[0][1])} to {text.number(known[-1][1])}"
    return Sparkline(" ".join(f"{x},{y}" for x, y in places), places[-1], words)


def reward_lines(session: Session, steps: Mapping[str, int]) -> dict[str, Sparkline]:
    """Return reward curves by uid, for runs whose last step is `steps[uid]`.

    Only a few steps of each run are read, however long the run is.
    """
    ids = dict(session.execute(select(Run.uid, Run.id).where(Run.uid.in_(steps))).tuples().all())
    wanted = [(ids[uid], step) for uid, last in steps.items() if uid in ids for step in sampled_steps(last)]
    if not wanted:
        return {}
    rows = session.execute(
        select(Step.run_id, Step.step, Step.reward, Step.rollout_reward)
        .where(tuple_(Step.run_id, Step.step).in_(wanted))
        .order_by(Step.run_id, Step.step)
    )
    values: dict[int, list[float | None]] = {}
    for run_id, _, reward, rollout_reward in rows:
        values.setdefault(run_id, []).append(rollout_reward if reward is None else reward)
    lines = {uid: sparkline(values.get(run_id, [])) for uid, run_id in ids.items()}
    return {uid: line for uid, line in lines.items() if line is not None}


def sampled_steps(last: int) -> list[int]:
    """Return at most POINTS of the steps 1 to `last`, evenly spaced, including `last`."""
    count = min(POINTS, last)
    return [last - (last - 1) * (count - 1 - i) // (count - 1) for i in range(count)] if count > 1 else []
