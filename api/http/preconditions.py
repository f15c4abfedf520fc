"""Entity tags of what people edit, so that an edit can be refused if somebody else was faster (RFC 9110, If-Match).

A tag names the state of the edited fields alone. A run's reported figures change all the time, and do not change its
tag.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from fastapi import Header

from rhyme_openrlhf.api.http.problems import ProblemError
from rhyme_openrlhf.api.read.run_json import RunDetail

IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=1000,
        description="The ETag of the state that the edit is based on; a later edit is refused with 412.",
    ),
]
# Entries of `responses` of operations that send or check tags.
TAGGED: dict[str, Any] = {"headers": {"ETag": {"schema": {"type": "string"}, "description": "For If-Match."}}}


def entity_tag(*edited: Any) -> str:
    """Return the tag of these values."""
    text = json.dumps(edited, sort_keys=True, ensure_ascii=True)
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:20]}"'


def run_tag(run: RunDetail) -> str:
    """Return the tag of a run's name, notes, tags, experiment, and whether it is archived."""
    return entity_tag(run.name, run.notes, run.tags, run.experiment, run.archived_at is not None)


def require_match(if_match: str | None, tag: str) -> None:
    """Raise ProblemError 412 if the client bases its edit on another state."""
    if if_match is None or if_match.strip() == "*" or tag in [one.strip() for one in if_match.split(",")]:
        return
    raise ProblemError(412, "it was changed meanwhile: read it again, then repeat the edit")
