"""Copies of a run in other experiment trackers: MLflow, and Weights & Biases' offline format.

Each copy is written by that project's own client, where it is installed. A copy has the run's name, tags, notes and
settings, and every figure and metric of every step. It is made once: a figure is never written twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.client.client import Client
from rhyme_openrlhf.client.errors import ClientError
from rhyme_openrlhf.settings.recorded import recorded_settings
from rhyme_openrlhf.telemetry.metrics import FIGURES

# What marks a copy, so that the same run is not copied twice.
UID = "rhyme.uid"
# Columns of a step that are no figure.
NO_FIGURES = ("step", "epoch", "started_at", "finished_at")
# Steps of one request for the figures that the service derives from columns: few enough for whole curves.
DERIVED_STEPS = 1000
# MLflow takes at most these in one request (its REST API, "Log Batch"), and cuts no text itself.
MLFLOW_METRICS, MLFLOW_PARAMETERS, MLFLOW_TEXT = 1000, 100, 6000
MLFLOW_STATUS = {
    "succeeded": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
    "crashed": "FAILED",
    "lost": "FAILED",
}


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step by name, and when it ended in unix seconds."""

    step: int
    time: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Copy:
    """A run as trackers know one. `settings`: options by their names on the command line, without the dashes."""

    uid: str
    name: str
    experiment: str
    status: str
    notes: str
    tags: tuple[str, ...]
    begun: float
    ended: float | None
    settings: Mapping[str, Any]
    steps: tuple[StepFigures, ...]


def read(client: Client, uid: str) -> Copy:
    """Read all of a run that a tracker keeps. Raises ClientError."""
    run = client.run(uid)
    figures: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    begun = run["started_at"] or run["created_at"]
    for row in client.steps(uid):
        step = int(row["step"])
        times[step] = row.get("finished_at") or row.get("started_at") or begun
        figures[step] = {name: value for name, value in row.items() if name not in NO_FIGURES and _is_number(value)}
    for first in range(0, max(figures, default=-1) + 1, DERIVED_STEPS):
        last = first + DERIVED_STEPS - 1
        for curve in client.series(uid, tuple(FIGURES), points=DERIVED_STEPS, from_step=first, to_step=last)["curves"]:
            for at, value in zip(curve["x"], curve["values"], strict=True):
                if value is not None:
                    figures.setdefault(int(at), {})[curve["name"]] = value
    with client.export(uid, "metrics", form="json") as pieces:
        for row in json.loads(b"".join(pieces)):
            if _is_number(row["value"]):
                figures.setdefault(row["step"], {})[row["name"]] = row["value"]
    return Copy(
        run["uid"],
        run["name"],
        run["experiment"] or "rhyme",
        run["status"],
        run["notes"],
        tuple(run["tags"]),
        begun,
        run["finished_at"],
        recorded_settings(run["config"], run["spec"]),
        tuple(StepFigures(step, times.get(step, begun), figures[step]) for step in sorted(figures)),
    )


def to_mlflow(copy: Copy, target: str) -> str:
    """Write a copy to the MLflow at the tracking URI `target` ("": MLflow's own choice), and return where it is.

    Raises ClientError where MLflow is not installed, where the run was copied before, and where MLflow refuses.
    """
    try:
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise ClientError("MLflow's client is not installed here: pip install mlflow-skinny") from None
    try:
        tracker = MlflowClient(target or None)
        found = tracker.get_experiment_by_name(copy.experiment)
        experiment = found.experiment_id if found else tracker.create_experiment(copy.experiment)
        for there in tracker.search_runs([experiment], f"tags.`{UID}` = '{copy.uid}'"):
            raise ClientError(f"MLflow has this run already, as {there.info.run_id}: delete that one first")
        tags = {UID: copy.uid, "mlflow.note.content": copy.notes, **{f"tag.{tag}": "yes" for tag in copy.tags}}
        made = tracker.create_run(experiment, round(1000 * copy.begun), tags, copy.name)
        run = made.info.run_id
        parameters = [Param(name, str(value)[:MLFLOW_TEXT]) for name, value in copy.settings.items()]
        for some in _pieces(parameters, MLFLOW_PARAMETERS):
            tracker.log_batch(run, params=some)
        metrics = [
            Metric(_mlflow_name(name), value, round(1000 * one.time), one.step)
            for one in copy.steps
            for name, value in one.figures.items()
        ]
        for some in _pieces(metrics, MLFLOW_METRICS):
            tracker.log_batch(run, metrics=some)
        if copy.ended is not None:
            tracker.set_terminated(run, MLFLOW_STATUS.get(copy.status, "FINISHED"), round(1000 * copy.ended))
    except MlflowException as error:
        raise ClientError(f"MLflow refuses: {error}") from None
    return f"experiment {copy.experiment}, run {run}"


def to_wandb_offline(copy: Copy, target: str) -> str:
    """Write a copy into the folder `target` ("": here) in W&B's offline format, and return the folder to `wandb sync`.

    W&B's service of this process is ended here. Without that, half of the files were not whole yet (W&B 0.31.0).
    Raises ClientError where W&B's client is not installed, fails, or has another run open in this process.
    """
    try:
        import wandb
    except ImportError:
        raise ClientError("W&B's client is not installed here: pip install wandb") from None
    if wandb.run is not None:
        raise ClientError("a W&B run is open in this process: finish it first")
    try:
        run = wandb.init(
            mode="offline",
            dir=target or ".",
            project=copy.experiment,
            id=copy.uid,
            name=copy.name,
            notes=copy.notes,
            tags=copy.tags,
            config={**copy.settings, UID: copy.uid},
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True
            ),
        )
        for one in copy.steps:
            run.log({**one.figures, "_timestamp": one.time}, step=one.step)
        folder = run.dir
        run.finish(exit_code=0 if copy.status in ("succeeded", "stopped") else 1)
        wandb.teardown()
    except wandb.Error as error:
        raise ClientError(f"W&B refuses: {error}") from None
    return folder.removesuffix("/files")


TRACKERS: Mapping[str, Callable[[Copy, str], str]] = {"mlflow": to_mlflow, "wandb-offline": to_wandb_offline}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mlflow_name(name: str) -> str:
    """Return a metric's name in the letters that MLflow takes."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)


def _pieces(items: list[Any], most: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), most):
        yield items[first : first + most]
