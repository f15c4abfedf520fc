"""Earlier runs of this service that a new run can draft from, with what they promise. Only reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from rhyme_openrlhf.api.launch.earlier_runs import named_uids
from rhyme_openrlhf.api.launch.spec import Arguments, value_of
from rhyme_openrlhf.api.store.models import Run, RunParameter
from rhyme_openrlhf.api.store.parameters import TEXT_LENGTH
from rhyme_openrlhf.api.store.record import EpochRow
from rhyme_openrlhf.history.archive import ArchiveError
from rhyme_openrlhf.history.store import archives_in

# Runs that are offered, the newest, of this many with the same prompts.
MOST_OFFERED, MOST_LOOKED_AT = 4, 50


@dataclass(frozen=True)
class Offered:
    """A run that has left responses to the same prompts by the same model.

    `epochs`: how many it has begun. `tokens_per_step`: tokens of a sample and decode step in its first epoch and in its
    second, None where it has none. With its responses, a first epoch becomes about what its second was.
    """

    uid: str
    name: str
    epochs: int
    tokens_per_step: tuple[float | None, float | None]


def unknown_uids(session: Session, arguments: Arguments) -> list[str]:
    """Return those uids that checked arguments name and that are of no run that this service started."""
    uids = named_uids(arguments)
    query = select(Run.uid).where(Run.uid.in_(uids), Run.origin == "launched")
    known = set(session.scalars(query)) if uids else set()
    return [uid for uid in uids if uid not in known]


def offered(session: Session, runs_directory: Path, arguments: Arguments) -> list[Offered]:
    """Return the newest runs of this service with the data and the model of checked arguments, and with responses."""
    wanted = [("data", "prompt_dataset"), ("actor", "model_name_or_path")]
    values = {".".join(where): value_of(arguments, *where) for where in wanted}
    query = select(Run).where(Run.origin == "launched").order_by(Run.created_at.desc()).limit(MOST_LOOKED_AT)
    for name, value in values.items():
        row = aliased(RunParameter)
        # A run's record has the path that its links lead to.
        texts = {value, os.path.realpath(value)} if os.path.isabs(value) else {value}
        is_same = row.text.in_([text[:TEXT_LENGTH] for text in sorted(texts)])
        query = query.join(row, row.run_id == Run.id).where(row.name == name, is_same)
    found: list[Offered] = []
    for run in session.scalars(query):
        if len(found) == MOST_OFFERED:
            break
        if _has_responses(runs_directory / run.uid):
            found.append(Offered(run.uid, run.name, run.epoch, _tokens_per_step(session, run)))
    return found


def _has_responses(directory: Path) -> bool:
    try:
        return any(any(archive.sizes.values()) for archive in archives_in(directory))
    except ArchiveError:
        return False


def _tokens_per_step(session: Session, run: Run) -> tuple[float | None, float | None]:
    query = select(EpochRow.epoch, EpochRow.decode_tokens, EpochRow.sample_steps).where(
        EpochRow.run_id == run.id, EpochRow.epoch.in_((1, 2))
    )
    by_epoch = {epoch: tokens / steps if steps else None for epoch, tokens, steps in session.execute(query)}
    return by_epoch.get(1), by_epoch.get(2)


def expected_gain(runs: Sequence[Offered]) -> float | None:
    """Return how many times the tokens a step a first epoch is expected to have; None where no run tells.

    That is the second epoch of the newest such run over its first: about what drafts from its responses give.
    """
    for run in runs:
        first, second = run.tokens_per_step
        if first and second:
            return second / first
    return None
