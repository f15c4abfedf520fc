"""Types of what requests carry: every field has bounds, so that whatever fits here also fits into both databases."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from rhyme_openrlhf.api.read.pagination import CURSOR_LENGTH
from rhyme_openrlhf.api.store.models import NAME_LENGTH, UID_LENGTH

# PostgreSQL keeps no NUL in text, and no name needs one.
NO_NUL = r"^[^\x00]*$"
# Columns of 4 and of 8 bytes.
INT32 = 2**31 - 1
INT64 = 2**63 - 1
# The year 9999 in unix seconds: a moment, not just any float.
LAST_TIME = 253402300799.0
NOTES_LENGTH = 20_000
TAG_LENGTH = 100
TAGS = 50
# Rows of a page: a browser's table shows no more at once.
PAGE = 50
LARGEST_PAGE = 1000

Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH, pattern=NO_NUL)]
Secret = Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL, examples=["rhyme_...", "once_..."])]
Notes = Annotated[str, Field(max_length=NOTES_LENGTH, pattern=NO_NUL)]
Tag = Annotated[str, Field(min_length=1, max_length=TAG_LENGTH, pattern=NO_NUL)]
Tags = Annotated[list[Tag], Field(max_length=TAGS)]

UidText = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{UID_LENGTH}}}$", examples=["0f3a5b7c9d1e2f40"])]
RunUid = Annotated[
    str,
    Path(alias="uid", pattern=rf"^[0-9a-f]{{{UID_LENGTH}}}$", description="The run.", examples=["0f3a5b7c9d1e2f40"]),
]
AttemptNumber = Annotated[int, Path(ge=1, le=INT32, description="Attempts count from 1.")]
StepNumber = Annotated[int, Path(ge=0, le=INT32)]

Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE, description="Rows of the page.")]
Cursor = Annotated[
    str | None, Query(max_length=CURSOR_LENGTH, pattern=NO_NUL, description="`next_cursor` of the page before.")
]
FromStep = Annotated[int, Query(ge=0, le=INT32, description="First step.")]
ToStep = Annotated[int, Query(ge=0, le=INT32, description="Last step, included.")]
Moment = Annotated[float | None, Query(ge=0, le=LAST_TIME, allow_inf_nan=False, description="Unix seconds.")]


class Body(BaseModel):
    """Base of request bodies: unknown fields are an error, not a wish that is silently dropped."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class View(BaseModel):
    """Base of answers that are made of rows."""

    model_config = ConfigDict(from_attributes=True)
