"""The earlier runs that a run drafts from: what its history workers report of them, added up. Only reads."""

from __future__ import annotations

from collections import defaultdict

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.store.bounds import View
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.telemetry.events import EarlierRun

# One event per run, worker and step: the last steps of 16 workers with 20 runs each.
MOST_EVENTS = 1000


class EarlierRunView(View):
    """An earlier run whose responses to the same prompts a run drafts from, over all workers."""

    name: str
    uid: str | None = Field(description="Null where this service does not know it.")
    directory: str = Field(description="Where its responses are.")
    prompts: int = Field(description="Prompts of this run that it had at the start; 0 for one that came later.")
    of: int = Field(description="All prompts of this run; 0 where `prompts` was not counted.")
    epochs: int = Field(description="The most rollouts that it had of one of these prompts.")
    drafted_from: int = Field(description="How often the draft index of a prompt was built with its responses.")
    right_share: float | None = Field(
        description="Share of the tokens of drafts from it alone that would have been right; null before any."
    )
    left_out: bool = Field(description="Too few of them are right, so nothing is drafted from it now.")


def earlier_runs_of(session: Session, run: Run) -> list[EarlierRunView]:
    """Return the earlier runs of a run, those that drafted most first."""
    found = latest(session, run, EarlierRun.kind, EarlierRun, MOST_EVENTS, by=("worker", "directory")).bodies
    by_directory: dict[str, list[EarlierRun]] = defaultdict(list)
    for event in found:
        by_directory[event.directory].append(event)
    uids = {event.uid for event in found if event.uid}
    known = set(session.scalars(select(Run.uid).where(Run.uid.in_(uids)))) if uids else set()
    states = [_together(of_run, known) for of_run in by_directory.values()]
    return sorted(states, key=lambda one: (-one.drafted_from, -one.prompts, one.name, one.directory))


def _together(events: list[EarlierRun], known: set[str]) -> EarlierRunView:
    one, judged = events[-1], sum(event.judged for event in events)
    return EarlierRunView(
        name=one.run,
        uid=one.uid if one.uid in known else None,
        directory=one.directory,
        prompts=sum(event.prompts for event in events),
        of=sum(event.of for event in events),
        epochs=max(event.epochs for event in events),
        drafted_from=sum(event.drafted_from for event in events),
        right_share=sum(event.right for event in events) / judged if judged else None,
        left_out=all(event.left_out for event in events),
    )
