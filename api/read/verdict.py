"""The verdict on a run (`telemetry/verdict.py`) from its stored rows. Only reads.

Invariant: the cost does not grow with a run's length: the newest steps, and some notes of the newest attempt, are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curve_points import known_values, read_points
from rhyme_openrlhf.api.read.events import EventFilter, Level
from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.store.bounds import INT32, View
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import RawEvent
from rhyme_openrlhf.api.store.step_figures import BUBBLES
from rhyme_openrlhf.telemetry.events import DraftGain, Note
from rhyme_openrlhf.telemetry.metrics import EnginesGain, engines_gain
from rhyme_openrlhf.telemetry.phase import Phase
from rhyme_openrlhf.telemetry.verdict import WINDOW, Health, Verdict, verdict

# Most notes of a level that are read; the page Events has all.
MOST_NOTES = 50
# The newest gain of each engine of a large run.
MOST_GAINS = 512


class ReasonView(View):
    """Something that a person should look at."""

    level: str = Field(description="look or broken.")
    text: str
    page: str = Field(description="The run's page that shows it, such as `speculation`; empty for the overview.")


class VerdictView(View):
    """The health of the run in its newest steps."""

    level: str = Field(description="healthy, look (a person should look at it) or broken.")
    text: str = Field(description="One line: its step, reward, drafts, bubbles, warnings and errors.")
    reasons: list[ReasonView] = Field(description="Why one should look; warnings and errors are among them.")


def verdict_of(session: Session, run: Run, phases: Sequence[Phase]) -> Verdict:
    """Return the verdict on a run that is in these phases."""
    names = ("rollout_reward", "reward", "rollout_seconds", "engines", "truncated", "samples", *BUBBLES)
    newest = max(0, run.step - 2 * WINDOW + 1)
    curves = {
        name: known_values(points) for name, points in read_points(session, run.uid, names, newest, INT32).items()
    }
    recent = sorted(curves["rollout_seconds"])[-WINDOW:]
    sums = {name: sum(curves[name].get(step, 0.0) for step in recent) for name in ("truncated", "samples", *BUBBLES)}
    return verdict(
        Health(
            status=run.status,
            message=run.message,
            step=run.step,
            steps_total=run.steps_total,
            doing=[phase.name for phase in phases],
            rewards=[value for _, value in sorted((curves["reward"] | curves["rollout_reward"]).items())],
            gain=gain_of(session, run),
            bubble_seconds={name.removeprefix("bubble_"): sums[name] for name in BUBBLES},
            engine_seconds=sum(curves["rollout_seconds"][step] * curves["engines"].get(step, 0.0) for step in recent),
            truncated=sums["truncated"] / sums["samples"] if sums["samples"] else None,
            warnings=_notes(session, run, "warning"),
            errors=_notes(session, run, "error"),
            lost_events=run.dropped_events,
        )
    )


def gain_of(session: Session, run: Run) -> EnginesGain | None:
    """Return what drafts gain by the newest report of each engine; None without reports."""
    return engines_gain(latest(session, run, DraftGain.kind, DraftGain, MOST_GAINS, by=("engine",)).bodies)


def verdict_view(found: Verdict) -> VerdictView:
    """Return a verdict as the API shows it."""
    reasons = [ReasonView(level=one.level, text=one.text, page=one.where) for one in found.reasons]
    return VerdictView(level=found.level, text=found.text, reasons=reasons)


def _notes(session: Session, run: Run, level: Level) -> list[str]:
    """Return the newest notes of this level in the newest attempt, each text once."""
    if not run.attempts:
        return []
    wanted = EventFilter(kinds=(Note.kind,), attempt=run.attempts[-1].number, level=level).conditions(session, run)
    newest = select(RawEvent.body).where(*wanted).order_by(RawEvent.id.desc()).limit(MOST_NOTES)
    return list(dict.fromkeys(str(json.loads(body).get("text", "")) for body in session.scalars(newest)))
