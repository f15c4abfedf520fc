"""Events of a kind as they came, for figures of what has no table of its own: the newest ones, read once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import RawEvent, of_kinds

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class Latest(Generic[Body]):
    """Events in the order in which they came. `more`: earlier ones were left out."""

    bodies: list[Body]
    more: bool


def latest(session: Session, run: Run, kind: str, form: type[Body], most: int, *, by: tuple[str, ...]) -> Latest[Body]:
    """The last `most` events of `kind`, which is none of `record.FREQUENT_KINDS`.

    `by`: fields that name what one is about; a step done again replaces it. What has not this form is a newer writer's,
    and left out.
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
