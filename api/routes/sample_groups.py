"""Routes for a run's samples as prompt groups: steps with a table, a step's groups, and its table as a file."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field, create_model

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import Offset, RunUid, StepNumber
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.read.export import MEDIA_TYPES
from rhyme_openrlhf.api.read.log_files import LogError
from rhyme_openrlhf.api.read.pagination import part_of
from rhyme_openrlhf.api.read.sample_files import sample_folders
from rhyme_openrlhf.api.read.sample_tables import (
    NO_TABLES,
    SCALARS,
    Group,
    bytes_of_step,
    groups_of,
    samples_of_step,
    steps_of_prompt,
    table_steps,
)
from rhyme_openrlhf.api.store.bounds import INT32, View
from rhyme_openrlhf.telemetry.sample_table import COLUMNS, GAP_BOUNDS

router = APIRouter(prefix="/runs/{uid}", tags=["samples"], responses=documented(401, 403, 404, 422, 429, 503))

GROUPS, MOST_GROUPS = 20, 200
Key = Annotated[str, Query(pattern=r"^([0-9a-f]{32})?$", description="One prompt.")]
_KINDS: dict[str, Any] = {
    "int32": int | None, "float": float | None, "string": str | None, "bool": bool | None,
    "list<element: int32>": list[int] | None, "list<element: float>": list[float | None] | None,
    "list<element: string>": list[str] | None,
}  # fmt: skip
_FIELDS: dict[str, Any] = {
    name: (_KINDS[str(kind).replace("list<item:", "list<element:")], Field(None, description=words))
    for name, (kind, words) in COLUMNS.items()
}
SampleView: Any = create_model(
    "SampleView",
    __base__=View,
    __doc__="One sample as the trainer used it; null: not known, or not asked for.",
    parts=(dict[str, float | None], Field(description="Figures of the reward function, of the agent and the trainer.")),
    **_FIELDS,
)


class SampleGroup(View):
    """The samples of one prompt in a step."""

    group: str = Field(description="Identifies the prompt, in all steps and runs.")
    prompt: str | None = Field(description="Null where the responses were not kept.")
    label: str | None = Field(description="The reference answer.")
    reward_mean: float | None
    reward_spread: float | None = Field(description="Standard deviation.")
    has_signal: bool = Field(description="False where all rewards are equal.")
    samples: list[SampleView]


class SampleGroupPage(View):
    """Prompt groups of one step."""

    items: list[SampleGroup]
    next_cursor: str | None
    matching: int = Field(description="Number of groups.")
    gap_bounds: list[float] = Field(description="Bounds of the classes of `gap_counts`.")


class SampledSteps(View):
    """Steps with a table of samples, in their order; `missing`: the reason if there are none."""

    steps: list[int]
    missing: str


@router.get("/sample-groups", summary="Steps with prompt groups")
def get_sampled_steps(
    uid: RunUid, who: auth.Viewer, service: ServiceDep, launching: LaunchingDep, group: Key = ""
) -> SampledSteps:
    """List the steps whose samples were recorded, or those in which one prompt was generated."""
    folders = sample_folders(service.database, uid, readable_roots(launching))
    recorded = table_steps(folders)
    steps = steps_of_prompt(folders, group, recorded) if group else [one.step for one in recorded]
    return SampledSteps(steps=sorted(steps), missing="" if recorded else NO_TABLES)


@router.get("/sample-groups/{step}", summary="Prompt groups of a step")
def get_sample_groups(
    uid: RunUid,
    step: StepNumber,
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
    group: Key = "",
    tokens: Annotated[bool, Query(description="With lists of single tokens, of the kept responses.")] = False,
    limit: Annotated[int, Query(ge=1, le=MOST_GROUPS, description="Prompt groups of the page.")] = GROUPS,
    cursor: Offset = None,
) -> SampleGroupPage:
    """Return the samples of a training step by prompt: reward and its parts, advantage, length, age, gap."""
    folders = sample_folders(service.database, uid, readable_roots(launching))
    try:
        found = samples_of_step(folders, step, list(COLUMNS) if tokens else SCALARS, group)
    except LogError as error:
        raise ProblemError(404, str(error)) from error
    groups = groups_of(found)
    shown, following = part_of(groups, cursor, limit)
    items = [_view(one) for one in shown]
    return SampleGroupPage(items=items, next_cursor=following, matching=len(groups), gap_bounds=list(GAP_BOUNDS))


@router.get(
    "/sample-table",
    summary="Samples of a step as Parquet",
    response_class=Response,
    responses={200: {"content": {MEDIA_TYPES["parquet"]: {"schema": {"type": "string", "format": "binary"}}}}},
)
def get_sample_table(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
    step: Annotated[int | None, Query(ge=0, le=INT32, description="The newest without it.")] = None,
) -> Response:
    """Return all samples of a training step as a file, as the run directory has it."""
    folders = sample_folders(service.database, uid, readable_roots(launching))
    recorded = table_steps(folders)
    if not recorded:
        raise ProblemError(404, NO_TABLES)
    chosen = recorded[0].step if step is None else step
    try:
        content = bytes_of_step(folders, chosen)
    except LogError as error:
        raise ProblemError(404, str(error)) from error
    name = f'attachment; filename="{uid}-samples-{chosen}.parquet"'
    return Response(content, media_type=MEDIA_TYPES["parquet"], headers={"Content-Disposition": name})


def _view(group: Group) -> SampleGroup:
    return SampleGroup(
        group=group.key,
        prompt=group.first("prompt"),
        label=group.first("label"),
        reward_mean=group.mean,
        reward_spread=group.spread,
        has_signal=group.has_signal,
        samples=[SampleView(parts=one.parts, **one.values) for one in group.samples],
    )
