"""The route for right-sizing: how many rollout engines and which features a run should have."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.launch.right_size import advise
from rhyme_openrlhf.api.read.log_files import newest_directory
from rhyme_openrlhf.api.store.bounds import View
from rhyme_openrlhf.api.store.lookup import find_run

router = APIRouter(prefix="/runs/{uid}/right-size", tags=["runs"], responses=documented(401, 403, 404, 422, 429, 503))


class CandidateView(View):
    """One simulated configuration. Ratios are to the run as it was."""

    engines: int = Field(description="Rollout engines.")
    features: str = Field(description="Features by their names in `rhyme simulate --features`.")
    samples_per_second: float
    ratio: float = Field(description="Of samples per second.")
    ratio_per_device: float = Field(description="Of samples per second and rollout device.")
    idle: float = Field(description="Share of device time with nothing to run.")
    older: bool = Field(description="It trains on samples of older weights than the run did; never recommended.")
    recommended: bool


class RightSizeView(View):
    """A recommendation by simulation. Without one, `missing` has the reason and the rest is empty."""

    rows: list[CandidateView]
    sentence: str
    method: str = Field(description="How the recommendation was found.")
    assumed: list[str]
    settings: str = Field(description="Options of the recommended run.")
    missing: str


@router.get("", summary="Recommended engines and features")
def get_right_size(uid: RunUid, who: auth.Viewer, service: ServiceDep, launching: LaunchingDep) -> RightSizeView:
    """Simulate the run's latest steps with other numbers of engines and other features, and recommend one of them.

    Needs the run directory below the service's roots, and a profile of the run's engines. Takes a few seconds.
    """
    roots = readable_roots(launching)
    with service.database.reading() as session:
        run = find_run(session, uid)
        directory, config = newest_directory(session, run, roots), run.config
    return RightSizeView.model_validate(advise(directory, config, roots))
