"""A run's attempts, for pages that show one or all of them."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Attempt, Run


@dataclass(frozen=True)
class AttemptChoice:
    """An attempt with a `title` made of its number, whether it resumes another attempt, and its status."""

    number: int
    title: str


def attempts_of(session: Session, run: Run) -> list[AttemptChoice]:
    """Return the run's attempts, the newest first."""
    query = select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.number.desc())
    return [
        AttemptChoice(one.number, f"Attempt {one.number}{' (resumed)' if one.resumes else ''}: {one.status}")
        for one in session.scalars(query)
    ]
