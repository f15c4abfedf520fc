"""Runs that the service starts, as rows: made from specs, stopped, resumed, cloned. The dispatcher does the rest.

    <launch dir>/runs/<run uid>/attempt-<n>    run directories
    <launch dir>/checkpoints/<run uid>         checkpoints and the trained model, where the spec names no other place

Invariants: the caller's transaction holds everything or nothing; an idempotency key makes at most one run; only one
attempt of a run is active.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.launch.job_file import LaunchFile
from rhyme_openrlhf.api.launch.ray_jobs import Launcher
from rhyme_openrlhf.api.launch.schema import by_flag
from rhyme_openrlhf.api.launch.spec import Arguments, RunSpec, merged
from rhyme_openrlhf.api.launch.spec_command import from_argv, to_argv
from rhyme_openrlhf.api.store import run_status
from rhyme_openrlhf.api.store.models import Attempt, Experiment, Run, RunTag
from rhyme_openrlhf.api.store.status import ACTIVE
from rhyme_openrlhf.settings.control import new_uid
from rhyme_openrlhf.settings.options import Settings, option

RUNS, CHECKPOINTS = "runs", "checkpoints"


@dataclass(frozen=True)
class LaunchSettings(Settings):
    """How the service starts runs."""

    group: ClassVar[str] = "launch"
    title: ClassVar[str] = (
        "Starting runs: how many at once, where they keep what they write, how long they are waited for."
    )

    dir: str = option(
        "",
        "Where runs keep run directories and checkpoints; on a file system that all nodes of the cluster and the "
        "service share. If not given: the data directory.",
        kind="output",
    )
    max_runs: int = option(2, "Runs that are active at once; more wait in the queue.", low=1, high=1000)
    stop_grace_s: float = option(
        600.0,
        "Seconds a run has to finish its step and write a checkpoint when it is asked to stop; after that Ray ends it.",
        low=1,
        high=86400,
    )
    lost_after_s: float = option(
        300.0, "Seconds after which a run that neither Ray nor its reporter answers for is shown as lost.", low=10
    )
    control_url: str = option(
        "",
        "Address under which the runs' nodes reach this service. If not given: the one it listens on.",
        kind="url",
    )


class LaunchConflict(Exception):
    """The run is in no state for this; the message is one sentence for the user."""


@dataclass(frozen=True)
class Launching:
    """What starting runs needs to know of the service. `data` is its own directory, for what nobody else reads.

    `launcher` is the cluster; None where the service starts no runs. `cluster` names it among those of all services on
    the database.
    """

    settings: LaunchSettings
    data: Path
    roots: tuple[Path, ...]
    control_url: str
    launcher: Launcher | None = None
    cluster: str = ""

    @property
    def directory(self) -> Path:
        """Where runs write."""
        return Path(self.settings.dir).expanduser().absolute() if self.settings.dir else self.data

    @property
    def runs_directory(self) -> Path:
        """Where their run directories are."""
        return self.directory / RUNS

    def launch_file(self, run: Run, attempt: Attempt, token_file: Path) -> LaunchFile:
        """What travels to the attempt's job."""
        assert run.spec is not None and attempt.checkpoint_path is not None and attempt.run_directory is not None
        given = "path" in run.spec["arguments"].get("ckpt", {})
        # As the attempt says: a service with another directory may have taken the run in.
        place = self.checkpoint_path(run.uid) if given else Path(attempt.checkpoint_path)
        outputs = {"path": str(place), "output_dir": str(place / "trained")}
        arguments = merged({"ckpt": outputs}, run.spec["arguments"])
        return LaunchFile(
            run_uid=run.uid,
            attempt_uid=attempt.uid,
            name=run.spec["name"],
            arguments=arguments,
            resumes=attempt.resumes,
            roots=[*map(str, self.roots), str(place.parent)],
            run_directory=attempt.run_directory,
            control_url=self.control_url,
            token_file=str(token_file),
        )

    def checkpoint_path(self, run_uid: str) -> Path:
        """Where a new run writes checkpoints, if its spec does not say."""
        return self.directory / CHECKPOINTS / run_uid


@dataclass(frozen=True)
class Request:
    """Who asks for a new run, and the idempotency key with the digest of what was asked, if there is one."""

    by: str
    now: float
    key: str | None = None
    digest: str | None = None


def digest_of(what: str, body: Mapping[str, Any]) -> str:
    """SHA-256 of a request: the same for the same content, however it was written."""
    text = json.dumps([what, body], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find_by_key(session: Session, key: str, digest: str) -> Run | None:
    """The run that this key made, or None. Raises LaunchConflict when it was made by another request."""
    run = session.scalar(select(Run).where(Run.idempotency_key == key))
    if run is not None and run.request_digest != digest:
        raise LaunchConflict("this Idempotency-Key was used with another request: take a new key")
    return run


def create_run(
    session: Session, launching: Launching, spec: RunSpec, request: Request, parent: Run | None = None
) -> Run:
    """A new run with its first attempt, in the queue. `spec.arguments` are checked.

    Raises sqlalchemy's IntegrityError when another request with the same key was faster.
    """
    run = Run(
        uid=new_uid(),
        parent_id=parent.id if parent else None,
        experiment_id=_experiment(session, spec.experiment, request.now),
        origin="launched",
        name=spec.name,
        notes=spec.notes,
        tags=[RunTag(tag=tag) for tag in sorted(set(spec.tags))],
        status="queued",
        message="",
        spec={"name": spec.name, "arguments": spec.arguments},
        command=["rhyme", "train", *to_argv(spec.arguments)],
        config={},
        versions={},
        created_by=request.by,
        idempotency_key=request.key,
        request_digest=request.digest,
        created_at=request.now,
        step=0,
        epoch=0,
        dropped_events=0,
    )
    session.add(run)
    session.flush()
    _add_attempt(session, launching, run, [], request.now)
    return run


def resume_run(session: Session, launching: Launching, run_id: int, now: float) -> None:
    """A new attempt that goes on from the run's last checkpoint. Raises LaunchConflict."""
    run, attempts = run_status.lock_run(session, run_id)
    if run.spec is None:
        raise LaunchConflict("the run was not started here, so it cannot be resumed here: clone it")
    if run.status in ACTIVE:
        raise LaunchConflict(f"the run is {run.status}: stop it first")
    if run.status == "lost":
        raise LaunchConflict("the run is lost and may still be there: stop it first, which gives it up")
    if run.status == "succeeded":
        raise LaunchConflict("the run succeeded and has nothing left to do: clone it to go on with other settings")
    _add_attempt(session, launching, run, attempts, now)


def stop_run(session: Session, run_id: int, now: float) -> None:
    """Ask the run to end; at once if nothing of it has started. Raises LaunchConflict if it has ended."""
    run, attempts = run_status.lock_run(session, run_id)
    attempt = attempts[-1]
    if attempt.status not in ACTIVE and attempt.status != "lost":
        raise LaunchConflict(f"the run has ended already: it is {attempt.status}")
    if attempt.stop_requested_at is None:
        attempt.stop_requested_at = now
    if attempt.status == "queued":
        run_status.move(run, attempts, attempt, "stopped", "stopped before it started", now)
    elif attempt.status in ("starting", "running"):
        run_status.move(run, attempts, attempt, "stopping", "", now)


def arguments_of(run: Run) -> Arguments:
    """What a run was started with, without what only its own service or machine could say. Raises SpecError."""
    if run.spec is not None:
        arguments: Arguments = run.spec["arguments"]
        return arguments
    if run.command[:2] != ["rhyme", "train"]:
        raise LaunchConflict("it is not known with which options the run was started")
    _, found = from_argv(run.command[2:])
    return {
        group: {
            name: value
            for name, value in values.items()
            if (option := by_flag().get(f"--{group}.{name}")) is not None and not option.refused
        }
        for group, values in found.items()
        if group != "openrlhf"
    }


def _add_attempt(session: Session, launching: Launching, run: Run, attempts: Sequence[Attempt], now: float) -> Attempt:
    assert run.spec is not None
    number = attempts[-1].number + 1 if attempts else 1
    uid = new_uid()
    given = run.spec["arguments"].get("ckpt", {}).get("path")
    earlier = attempts[-1].checkpoint_path if attempts else None
    attempt = Attempt(
        run_id=run.id,
        number=number,
        uid=uid,
        resumes=number > 1,
        vouched=True,
        submission_id=uid,
        run_directory=str(launching.runs_directory / run.uid / f"attempt-{number}"),
        checkpoint_path=given or earlier or str(launching.checkpoint_path(run.uid)),
        status="queued",
        message="",
        queued_at=now,
    )
    session.add(attempt)
    session.flush()
    run_status.follow(run, [*attempts, attempt])
    return attempt


def _experiment(session: Session, name: str | None, now: float) -> int | None:
    if name is None:
        return None
    found = session.scalar(select(Experiment).where(Experiment.name == name))
    if found is None:
        found = Experiment(name=name, description="", created_at=now)
        session.add(found)
        session.flush()
    return found.id
