"""Edits with If-Match (RFC 9110): refused if another edit was faster. `read/run_json.py` makes the entity tags."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header

from rhyme_openrlhf.api.http.problems import ProblemError

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


def require_match(if_match: str | None, tag: str) -> None:
    """Raise ProblemError 412 if the client bases its edit on another state."""
    if if_match is None or if_match.strip() == "*" or tag in [one.strip() for one in if_match.split(",")]:
        return
    raise ProblemError(412, "it was changed meanwhile: read it again, then repeat the edit")
