"""Routes for recorded responses of a run: steps with records, and the records of one step."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import ConfigDict, Field

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import PAGE, Limit, Offset, RunUid, StepNumber
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.read.log_files import LogError
from rhyme_openrlhf.api.read.pagination import Direction, part_of
from rhyme_openrlhf.api.read.sample_files import (
    NONE_KEPT,
    SEARCH_LENGTH,
    RecordedStep,
    SampleRecord,
    Sort,
    Wanted,
    recorded_steps,
    records_of_step,
    sample_folders,
)
from rhyme_openrlhf.api.store.bounds import NO_NUL, View
from rhyme_openrlhf.telemetry.draft_sources import TEXT_SOURCES

router = APIRouter(
    prefix="/runs/{uid}/sample-records", tags=["samples"], responses=documented(401, 403, 404, 422, 429, 503)
)

Bound = Annotated[float | None, Query(allow_inf_nan=False, description="Included; leaves out samples without reward.")]


class RecordedSteps(View):
    """Steps with recorded responses, the newest first; `missing`: the reason if there are none."""

    items: list[RecordedStep]
    next_cursor: str | None
    missing: str = Field(description="Empty, or one sentence with the flag that switches records on.")


_SOURCES = "; ".join(f"`{name}`: {source.words}" for name, source in TEXT_SOURCES.items())


class PieceView(View):
    """A part of a response."""

    source: str = Field(
        description=f"Empty: sampled by the model. {_SOURCES}.",
        examples=["history"],
    )
    text: str


class SampleRecordView(View):
    """One response. `drafted` and `accepted` (tokens) are null without speculation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "step": 12,
                    "number": 0,
                    "group": "d5b1e8a24c7f3b6092d1e4f7a8c9b0d2",
                    "prompt": "sort 3 1 2 ->",
                    "pieces": [{"source": "", "text": "1"}, {"source": "history", "text": " 2 3"}],
                    "tokens": 5,
                    "drafted": 6,
                    "accepted": 4,
                    "reward": 1.0,
                    "engines": [0],
                    "weight_versions": [11, 11],
                    "finish_reason": "stop",
                    "cut": False,
                }
            ]
        }
    )

    step: int
    number: int = Field(description="Names the sample within its step.")
    group: str = Field(description="Identifies the prompt, in all steps and runs.")
    prompt: str
    pieces: list[PieceView] = Field(description="Parts that form the response.")
    tokens: int
    drafted: int | None
    accepted: int | None
    reward: float | None
    engines: list[int] = Field(description="Engines that generated it, in this order.")
    weight_versions: list[int] = Field(description="Weight versions of its first and last token.")
    finish_reason: str
    cut: bool = Field(description="The response was longer than its record.")


class SampleRecordPage(View):
    """Responses of one step."""

    items: list[SampleRecordView]
    next_cursor: str | None
    matching: int = Field(description="Number of responses that match the filters.")
    unreadable: int = Field(description="Invalid lines of the file, which are left out.")


@router.get("", summary="Steps with recorded responses")
def get_recorded_steps(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
    limit: Limit = PAGE,
    cursor: Offset = None,
) -> RecordedSteps:
    """List the steps with recorded responses, the newest first."""
    folders = sample_folders(service.database, uid, readable_roots(launching))
    steps = recorded_steps(folders)
    items, following = part_of(steps, cursor, limit)
    return RecordedSteps(items=list(items), next_cursor=following, missing="" if steps else NONE_KEPT)


@router.get("/{step}", summary="Recorded responses of a step")
def get_sample_records(
    uid: RunUid,
    step: StepNumber,
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
    text: Annotated[
        str, Query(max_length=SEARCH_LENGTH, pattern=NO_NUL, description="Text in prompt or response, ignoring case.")
    ] = "",
    group: Annotated[str, Query(pattern=r"^([0-9a-f]{32})?$", description="Samples of one prompt.")] = "",
    min_reward: Bound = None,
    max_reward: Bound = None,
    sort: Annotated[Sort, Query(description="`number`: order of the file, prompt by prompt.")] = "number",
    direction: Direction = "asc",
    limit: Annotated[int, Query(ge=1, le=200, description="Responses of the page.")] = PAGE,
    cursor: Offset = None,
) -> SampleRecordPage:
    """Return the responses to a few prompts of a training step, with their drafted parts."""
    wanted = Wanted(text, group, min_reward, max_reward)
    folders = sample_folders(service.database, uid, readable_roots(launching))
    try:
        records, unreadable = records_of_step(folders, step, wanted, sort, direction == "desc")
    except LogError as error:
        raise ProblemError(404, str(error)) from error
    shown, following = part_of(records, cursor, limit)
    items = [_view(record) for record in shown]
    return SampleRecordPage(items=items, next_cursor=following, matching=len(records), unreadable=unreadable)


def _view(record: SampleRecord) -> SampleRecordView:
    pieces = [PieceView(source=source, text=text) for source, text in record.pieces]
    values = {name: getattr(record, name) for name in SampleRecordView.model_fields if name != "pieces"}
    return SampleRecordView(pieces=pieces, **values)
