"""Runs and their parts in API responses: the models, and the conversion from rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field

from rhyme_openrlhf.api.read.earlier_runs import EarlierRunView
from rhyme_openrlhf.api.read.verdict import VerdictView, verdict_view
from rhyme_openrlhf.api.store.bounds import View
from rhyme_openrlhf.api.store.models import Artifact, Attempt, Run
from rhyme_openrlhf.api.store.status import ENDED
from rhyme_openrlhf.telemetry.phase import Phase
from rhyme_openrlhf.telemetry.verdict import Verdict

RUN_EXAMPLE: dict[str, Any] = {
    "uid": "0f3a5b7c9d1e2f40",
    "name": "math-7b",
    "experiment": "ablation",
    "parent": None,
    "origin": "launched",
    "status": "running",
    "message": "",
    "tags": ["baseline"],
    "created_at": 1760000000.0,
    "started_at": 1760000012.5,
    "finished_at": None,
    "paused_seconds": 0.0,
    "paused_at": None,
    "archived_at": None,
    "step": 42,
    "epoch": 1,
    "steps_total": 500,
    "reward": 0.61,
    "tokens_per_second": 5210.0,
    "speculation_rate": 0.57,
    "bubble_fraction": 0.08,
    "dropped_events": 0,
    "last_event_at": 1760000912.0,
}


class RunSummary(View):
    """A run as a row of the table of runs. Times are unix seconds."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [RUN_EXAMPLE]})

    uid: str
    name: str
    experiment: str | None = None
    parent: str | None = Field(default=None, description="The run that it was cloned from.")
    origin: str = Field(description="launched, reported or imported.")
    status: str
    message: str
    tags: list[str] = []
    created_at: float
    started_at: float | None
    finished_at: float | None
    paused_seconds: float = Field(description="Seconds between its attempts, which are no part of its duration.")
    paused_at: float | None = Field(description="When its last attempt ended, while the next one waits for its start.")
    archived_at: float | None
    engines: int | None = None
    tensor_parallel_size: int | None = None
    epochs: int | None = None
    steps_total: int | None
    step: int
    epoch: int
    reward: float | None
    tokens_per_second: float | None
    speculation_rate: float | None
    bubble_fraction: float | None
    dropped_events: int
    last_event_at: float | None
    values: dict[str, float | str | None] = Field(default={}, description="The requested `column`s.")

    def duration(self, now: float) -> float | None:
        """Return the seconds in which the run ran, until `now` if it runs; None before its start."""
        end = self.finished_at if self.status in ENDED else self.paused_at or now
        return None if self.started_at is None or end is None else end - self.started_at - self.paused_seconds


class AttemptView(View):
    """One start or resume of a run."""

    uid: str
    number: int
    resumes: bool
    status: str
    message: str
    submission_id: str | None
    run_directory: str | None
    checkpoint_path: str | None
    queued_at: float
    started_at: float | None
    finished_at: float | None
    heartbeat_at: float | None
    stop_requested_at: float | None


class PhaseView(View):
    """A phase of a run, since `since` (unix seconds)."""

    name: str = Field(description="Such as starting engines, measuring, generating, training or loading weights.")
    text: str = Field(description="All of it as a sentence, at the time of the answer.")
    step: int | None = Field(description="The training step it belongs to; null before the first.")
    done: int | None = Field(description="Engines, points or samples done of `total`; null where none are counted.")
    total: int | None
    slowest: str = Field(description="The longest sample that is still generated.")
    since: float
    usual_seconds: float | None = Field(
        description="Median of earlier runs with the same model, number of engines and machine; null without any."
    )


class RunDetail(RunSummary):
    """A run with its complete configuration and attempts."""

    verdict: VerdictView
    phases: list[PhaseView] = Field(description="What it does now; empty unless it runs.")
    earlier_runs: list[EarlierRunView] = Field(
        description="Earlier runs that have some of its prompts, those that it drafts from most first."
    )

    notes: str
    spec: dict[str, Any] | None
    command: list[str]
    config: dict[str, Any]
    versions: dict[str, Any]
    created_by: str
    attempts: list[AttemptView]
    etag: str = Field(description="The state of what people edit, for If-Match; also in the header ETag.")


class ArtifactView(View):
    """A file or directory that an attempt has written."""

    kind: str
    step: int
    path: str
    created_at: float
    attempt: int = Field(description="Number of the attempt.")


def run_summary(
    run: Run, experiment: str | None, parent: str | None, values: dict[str, float | str | None] | None = None
) -> RunSummary:
    """Return a row of the table; `run.tags` is loaded."""
    tags = [tag.tag for tag in run.tags]
    return RunSummary(**_columns(run), experiment=experiment, parent=parent, tags=tags, values=values or {})


def run_detail(
    run: Run, experiment: str | None, parent: str | None, phases: Sequence[Phase], earlier: list[EarlierRunView],
    found: Verdict, now: float,
) -> RunDetail:  # fmt: skip
    """Return a complete run, in these phases at `now`, with the verdict `found`.

    `run.tags` and `run.attempts` are loaded.
    """
    return RunDetail(
        **_columns(run),
        experiment=experiment,
        parent=parent,
        tags=[tag.tag for tag in run.tags],
        phases=[PhaseView(**dataclasses.asdict(phase), text=phase.text(now)) for phase in phases],
        earlier_runs=earlier,
        verdict=verdict_view(found),
        notes=run.notes,
        spec=run.spec,
        command=run.command,
        config=run.config,
        versions=run.versions,
        created_by=run.created_by,
        attempts=[attempt_view(attempt) for attempt in run.attempts],
        etag=run_tag(run),
    )


def run_tag(run: Run) -> str:
    """Return the entity tag of a run; `run.tags` is loaded."""
    tags = [tag.tag for tag in run.tags]
    return entity_tag(run.name, run.notes, tags, run.experiment_id, run.archived_at is not None)


def entity_tag(*edited: Any) -> str:
    """Return the tag of the state of edited fields.

    A run's reported figures are none of them: they change all the time, and an edit does not depend on them.
    """
    text = json.dumps(edited, ensure_ascii=True)
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:20]}"'


def attempt_view(attempt: Attempt) -> AttemptView:
    """Return an attempt as the API shows it."""
    return AttemptView.model_validate(attempt)


def artifact_view(artifact: Artifact, attempt: int) -> ArtifactView:
    """Return an artifact as the API shows it. `attempt`: its number."""
    return ArtifactView(
        kind=artifact.kind, step=artifact.step, path=artifact.path, created_at=artifact.created_at, attempt=attempt
    )


_MADE_APART = {"experiment", "parent", "tags", "values"}


def _columns(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in RunSummary.model_fields if name not in _MADE_APART}
