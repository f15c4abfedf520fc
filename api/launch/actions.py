"""Actions on rows of runs that the service starts: create from a spec, stop, resume, clone. The dispatcher does the
rest.

    <launch dir>/runs/<run uid>/attempt-<n>    run directories
    <launch dir>/checkpoints/<run uid>         checkpoints and the trained model, unless the spec names another place

Invariants: the caller's transaction holds all changes or none; an idempotency key creates at most one run; only one
attempt of a run is active.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.launch.job_file import LaunchFile
from rhyme_openrlhf.api.launch.offered_runs import unknown_uids
from rhyme_openrlhf.api.launch.ray_jobs import Launcher
from rhyme_openrlhf.api.launch.schema import by_flag
from rhyme_openrlhf.api.launch.spec import NAME_PATTERN, Arguments, RunSpec, merged
from rhyme_openrlhf.api.launch.spec_command import from_argv, to_argv
from rhyme_openrlhf.api.store import run_status
from rhyme_openrlhf.api.store.models import Attempt, Experiment, Run, RunTag
from rhyme_openrlhf.api.store.parameters import keep_parameters
from rhyme_openrlhf.api.store.status import ACTIVE, PERHAPS_ACTIVE
from rhyme_openrlhf.settings.control import check_address, new_uid
from rhyme_openrlhf.settings.options import Settings, option

RUNS, CHECKPOINTS = "runs", "checkpoints"


@dataclass(frozen=True)
class LaunchSettings(Settings):
    """Settings for starting runs."""

    group: ClassVar[str] = "launch"
    title: ClassVar[str] = "Starting runs: how many at once, where they write, and how long the service waits for them."

    dir: str = option(
        "",
        "Directory for run directories and checkpoints, on a file system that the service and all nodes of the cluster "
        "share; required with --ray-address. If not given: the data directory.",
        kind="output",
    )
    max_runs: int = option(2, "Most runs that are active at once; others wait in the queue.", low=1, high=1000)
    stop_grace_s: float = option(
        600.0,
        "Seconds that a run has to finish its step and write a checkpoint when asked to stop; then Ray ends it.",
        low=1,
        high=86400,
    )
    lost_after_s: float = option(
        300.0, "Seconds without a sign of life from Ray or the reporter after which a run is shown as lost.", low=10
    )
    control_url: str = option(
        "",
        "Address at which the runs' nodes reach this service, as http://HOST:PORT; required with --ray-address. If not "
        "given: the address that it listens on.",
        kind="url",
    )

    def check(self) -> None:
        if self.control_url:
            check_address(self.flag("control_url"), self.control_url)


class LaunchConflict(Exception):
    """The run's state does not allow the action; the message is one sentence for the user."""


class KeyReused(LaunchConflict):
    """Another request has used this idempotency key."""


@dataclass(frozen=True)
class Launching:
    """The service's parts that starting runs needs. `data`: the service's own directory, for private files.

    `launcher`: the cluster, None if the service starts no runs. `cluster`: the cluster's name, unique among all
    services on the database. `demo`: the service shows recordings.
    """

    settings: LaunchSettings
    data: Path
    roots: tuple[Path, ...]
    control_url: str
    launcher: Launcher | None = None
    cluster: str = ""
    demo: bool = False

    @property
    def why_not(self) -> str:
        """Return the reason for which a service without a cluster starts no runs, and what to do: two sentences."""
        if self.demo:
            return "This demonstration shows recordings and starts no runs. `rhyme serve` without `--demo` starts them."
        return (
            "This service has no Ray cluster and cannot start runs. Restart `rhyme serve` without `--no-local`, or "
            "with `--ray-address`."
        )

    @property
    def directory(self) -> Path:
        """Directory in which runs write."""
        return Path(self.settings.dir).expanduser().absolute() if self.settings.dir else self.data

    @property
    def runs_directory(self) -> Path:
        """Directory of their run directories."""
        return self.directory / RUNS

    def launch_file(self, run: Run, attempt: Attempt) -> LaunchFile:
        """Return the file that is sent with the attempt's job."""
        assert run.spec is not None and attempt.checkpoint_path is not None and attempt.run_directory is not None
        given = "path" in run.spec["arguments"].get("ckpt", {})
        # Use the attempt's path, because a service with another directory may have created the run.
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
        )

    def checkpoint_path(self, run_uid: str) -> Path:
        """Return the checkpoint directory of a new run whose spec names none."""
        return self.directory / CHECKPOINTS / run_uid


# Letters of a run's name that its clones keep, which leaves room for "-clone" and a number.
CLONED_LETTERS = 80


@dataclass(frozen=True)
class Request:
    """The user who requests a new run, and the idempotency key with the request's digest, if there is one."""

    by: str
    now: float
    key: str | None = None
    digest: str | None = None


def clone_name(session: Session, parent: Run) -> str:
    """Return a name for a clone of `parent` that no run has: "demo-clone", then "demo-clone-2"."""
    # A run that was not started here may have any name.
    name = parent.spec["name"] if parent.spec is not None else parent.name
    if not re.fullmatch(NAME_PATTERN, name):
        name = "run"
    stem = re.sub(r"-clone(-[0-9]+)?$", "", name)[:CLONED_LETTERS] + "-clone"
    taken = set(session.scalars(select(Run.name).where(Run.name.startswith(stem, autoescape=True))))
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)


def digest_of(what: str, body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a request, which depends on its content, not on its formatting."""
    text = json.dumps([what, body], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find_by_key(session: Session, key: str, digest: str) -> Run | None:
    """Return the run that this key created, or None. Raises LaunchConflict if another request created it."""
    run = session.scalar(select(Run).where(Run.idempotency_key == key))
    if run is not None and run.request_digest != digest:
        raise KeyReused("this Idempotency-Key was used with another request: use a new key")
    return run


def find_or_create_run(
    session: Session, launching: Launching, spec: RunSpec, request: Request, parent: Run | None = None
) -> tuple[Run, bool]:
    """Return the run of the request's key, or a new one, and whether it is new. Raises what either function does."""
    if request.key is not None and request.digest is not None:
        found = find_by_key(session, request.key, request.digest)
        if found is not None:
            return found, False
    return create_run(session, launching, spec, request, parent), True


def create_run(
    session: Session, launching: Launching, spec: RunSpec, request: Request, parent: Run | None = None
) -> Run:
    """Create a run with its first attempt in the queue. `spec.arguments` are checked.

    Raises LaunchConflict for an earlier run that is not there, and sqlalchemy's IntegrityError if another request with
    the same key was faster.
    """
    if unknown := unknown_uids(session, spec.arguments):
        raise LaunchConflict(f"--history.earlier: {unknown[0]} is no run that this service started")
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
    keep_parameters(session, run)
    _add_attempt(session, launching, run, [], request.now)
    return run


def resume_run(session: Session, launching: Launching, run_id: int, now: float, key: str | None = None) -> None:
    """Add an attempt that continues from the run's last checkpoint; only once for a key. Raises LaunchConflict."""
    run, attempts = run_status.lock_run(session, run_id)
    if key is not None and any(attempt.idempotency_key == key for attempt in attempts):
        return
    if run.spec is None:
        raise LaunchConflict("the run was not started by this service and cannot be resumed here: clone it")
    if run.status in ACTIVE:
        raise LaunchConflict(f"the run is {run.status}: stop it first")
    if run.status == "lost":
        raise LaunchConflict("the run is lost and may still be active: stop it first, which gives it up")
    if run.status == "succeeded":
        raise LaunchConflict("the run succeeded and has no steps left: clone it to continue with other settings")
    _add_attempt(session, launching, run, attempts, now, key)


def stop_run(session: Session, run_id: int, now: float) -> None:
    """Ask the run to end, or end it at once if it has not started. Raises LaunchConflict if it has ended."""
    run, attempts = run_status.lock_run(session, run_id)
    attempt = attempts[-1]
    if attempt.status not in PERHAPS_ACTIVE:
        raise LaunchConflict(f"the run has already ended: it is {attempt.status}")
    if attempt.stop_requested_at is None:
        attempt.stop_requested_at = now
    if attempt.status == "queued":
        run_status.move(run, attempts, attempt, "stopped", "stopped before it started", now)
    elif attempt.status in ("starting", "running"):
        run_status.move(run, attempts, attempt, "stopping", "", now)


def arguments_of(run: Run) -> Arguments:
    """Return the arguments of a run, without those that only its own service or machine can set. Raises SpecError."""
    if run.spec is not None:
        arguments: Arguments = run.spec["arguments"]
        return arguments
    if run.command[:2] != ["rhyme", "train"]:
        raise LaunchConflict("the options with which the run was started are not known")
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


def _add_attempt(
    session: Session, launching: Launching, run: Run, attempts: Sequence[Attempt], now: float, key: str | None = None
) -> Attempt:
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
        idempotency_key=key,
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
