"""Types of path and query parameters, with the bounds of `store/bounds.py`, and the address of what was created."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Response

from rhyme_openrlhf.api.read.pagination import CURSOR_LENGTH
from rhyme_openrlhf.api.store.bounds import INT32, LAST_TIME, NO_NUL
from rhyme_openrlhf.api.store.models import UID_LENGTH

# Default rows per page: a table in the browser shows no more at once.
PAGE = 50
LARGEST_PAGE = 1000


# Where the API's addresses begin.
PREFIX = "/api/v1"

RunUid = Annotated[
    str,
    Path(alias="uid", pattern=rf"^[0-9a-f]{{{UID_LENGTH}}}$", description="The run.", examples=["0f3a5b7c9d1e2f40"]),
]
AttemptNumber = Annotated[int, Path(ge=1, le=INT32, description="Attempts count from 1.")]
ExperimentId = Annotated[int, Path(ge=1, le=INT32)]
StepNumber = Annotated[int, Path(ge=0, le=INT32)]

Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE, description="Most rows of the page.")]
Cursor = Annotated[
    str | None, Query(max_length=CURSOR_LENGTH, pattern=NO_NUL, description="`next_cursor` of the previous page.")
]
FromStep = Annotated[int, Query(ge=0, le=INT32, description="First step.")]
ToStep = Annotated[int, Query(ge=0, le=INT32, description="Last step, included.")]
Moment = Annotated[float | None, Query(ge=0, le=LAST_TIME, allow_inf_nan=False, description="Unix seconds.")]
# An offset, because a step's file of responses only ever changes as a whole.
Offset = Annotated[
    str | None, Query(pattern=r"^[0-9]{1,6}$", description="`next_cursor` of the previous page.", examples=["50"])
]


def created_at(response: Response, path: str) -> None:
    """Name the address of what a request created: `path` below the API's prefix."""
    response.headers["Location"] = PREFIX + path
