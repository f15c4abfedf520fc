"""The newest events of one kind, for what has no table of its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import RawEvent, of_kinds

Body = TypeVar("Body")


@dataclass(frozen=True)
class Latest(Generic[Body]):
    """Events in the order in which they arrived. `more`: earlier events were left out."""

    bodies: list[Body]
    more: bool


def latest(session: Session, run: Run, kind: str, form: type[Body], most: int, *, by: tuple[str, ...]) -> Latest[Body]:
    """Return the last `most` events of `kind`, which must not be one of `record.FREQUENT_KINDS`.

    `by`: fields that identify an event's subject; if a subject has several events, the newest counts. Events of another
    form come from newer versions and are left out.
    """
    rows = session.scalars(
        select(RawEvent.body)
        .where(RawEvent.run_id == run.id, *of_kinds([kind]))
        .order_by(RawEvent.id.desc())
        .limit(most + 1)
    ).all()
    decode = msgspec.json.Decoder(form).decode
    found: dict[Hashable, Body] = {}
    for row in rows[:most]:
        try:
            body = decode(row)
        except msgspec.ValidationError:
            continue
        found.setdefault(tuple(getattr(body, name) for name in by), body)
    return Latest(list(reversed(found.values())), len(rows) > most)
