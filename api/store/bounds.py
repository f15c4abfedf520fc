"""Types of bounded values, which fit into both databases."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rhyme_openrlhf.api.store.models import NAME_LENGTH, UID_LENGTH

# PostgreSQL stores no NUL in text, and no name needs one.
NO_NUL = r"^[^\x00]*$"
# Columns of 4 and of 8 bytes.
INT32 = 2**31 - 1
INT64 = 2**63 - 1
# The year 9999 in unix seconds: limits a float to a plausible moment.
LAST_TIME = 253402300799.0
NOTES_LENGTH = 20_000
TAG_LENGTH = 100
TAGS = 50
Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH, pattern=NO_NUL)]
Secret = Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL, examples=["rhyme_...", "once_..."])]
Notes = Annotated[str, Field(max_length=NOTES_LENGTH, pattern=NO_NUL)]
Tag = Annotated[str, Field(min_length=1, max_length=TAG_LENGTH, pattern=NO_NUL)]
Tags = Annotated[list[Tag], Field(max_length=TAGS)]
UidText = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{UID_LENGTH}}}$", examples=["0f3a5b7c9d1e2f40"])]


class Body(BaseModel):
    """Base of request bodies; unknown fields are an error instead of being ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class View(BaseModel):
    """Base of responses made from rows."""

    model_config = ConfigDict(from_attributes=True)
