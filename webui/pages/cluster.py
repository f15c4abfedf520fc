"""The page `/cluster`: which resources exist, and which runs wait for them?

Only the page's parts query Ray, after the page has loaded, so a Ray that does not respond delays nothing.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.access.launching import LaunchingDep
from rhyme_openrlhf.api.launch.actions import Launching
from rhyme_openrlhf.api.launch.cluster_state import ClusterState
from rhyme_openrlhf.api.launch.lease import find_holder, not_dispatching
from rhyme_openrlhf.api.launch.queue_state import queue_state
from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep

router = APIRouter(include_in_schema=False)

# Ray's names of the actor classes (engine/factory.py, OpenRLHF's own) that are rollout engines.
ENGINE_CLASSES = ("RhymeRolloutActor", "RolloutRayActor", "LLMRayActor")
# What the actors of these classes do, for readers who do not know their names.
ACTOR_WORDS: dict[str, str] = {
    **dict.fromkeys(ENGINE_CLASSES, "rollout engine: generates responses"),
    **dict.fromkeys(("RhymePolicyModelActor", "PolicyModelActor"), "policy: is trained"),
    **dict.fromkeys(("RhymeCriticModelActor", "CriticModelActor"), "critic: estimates rewards to come"),
    "ReferenceModelActor": "reference model: the policy before training",
    "RewardModelActor": "reward model: rates responses",
    "HistoryWorker": "draft history: keeps earlier responses to draft from",
    "RhymeTrainingActor": "trainer: updates the policy while engines generate",
    "RhymeGenerateSamplesActor": "generation: gives prompts to engines",
    "HomeActor": "home of running samples: moves them between engines",
    "FrontActor": "front of a node: runs agents and reward functions",
}


@router.get("/cluster")
def cluster_page(page: PageDep) -> HTMLResponse:
    """Render the frame of the page; its parts query Ray."""
    return page.render("cluster.html")


@router.get("/ui/cluster/parts/state")
def cluster_piece(page: PageDep, launching: LaunchingDep) -> HTMLResponse:
    """Render nodes, resources, engines and queue."""
    return page.render("parts/cluster_state.html", **_state(page, launching))


@router.get("/ui/cluster/parts/room")
def room_piece(page: PageDep, launching: LaunchingDep) -> HTMLResponse:
    """Render one sentence about the free resources, for the form of a new run."""
    return page.render("parts/cluster_room.html", **_state(page, launching))


def _state(page: Page, launching: Launching) -> dict[str, Any]:
    state: ClusterState | None = None
    away = ""
    used = 0
    if launching.launcher is not None:
        try:
            state = launching.launcher.state()
            used = launching.launcher.used_gpus()
        except ClusterUnreachable as error:
            away = str(error)
    total = None if state is None else int(state.amount("GPU").total)
    with page.service.database.reading() as session:
        queue = queue_state(session, total, used, launching.settings.max_runs, launching.cluster)
        holder = find_holder(session)
    return {
        "not_dispatching": not_dispatching(holder, page.service.uid),
        "why_not": "" if launching.launcher is not None else launching.why_not,
        "address": getattr(launching.launcher, "address", ""),
        "away": away,
        "state": state,
        "actor_words": ACTOR_WORDS,
        "gpus": total,
        "engines": sum(one.count for one in state.actors if one.name in ENGINE_CLASSES) if state else 0,
        "queue": queue,
        "max_runs": launching.settings.max_runs,
    }
