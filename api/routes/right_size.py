"""The route for right-sizing: how many rollout engines and which features a run should have."""

from __future__ import annotations

from fastapi import APIRouter

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.launch.right_size import RightSizeView, advise
from rhyme_openrlhf.api.read.log_files import newest_directory
from rhyme_openrlhf.api.store.lookup import find_run

router = APIRouter(prefix="/runs/{uid}/right-size", tags=["runs"], responses=documented(401, 403, 404, 422, 429, 503))


@router.get("", summary="Recommended engines and features")
def get_right_size(uid: RunUid, who: auth.Viewer, service: ServiceDep, launching: LaunchingDep) -> RightSizeView:
    """Simulate the run's latest steps with other numbers of engines and other features, and recommend one of them.

    Needs the run directory below the service's roots, and a profile of the run's engines. Takes a few seconds.
    """
    roots = readable_roots(launching)
    with service.database.reading() as session:
        run = find_run(session, uid)
        directory, config = newest_directory(session, run, roots), run.config
    with service.limits.simulations.one():
        return advise(directory, config, roots)
