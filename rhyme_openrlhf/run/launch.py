"""One training run from checked arguments to summary: Ray, services, OpenRLHF's training, the run record.

Invariants:
- Once the run directory exists, every ending writes a RunFinished event, a summary and the processes' logs.
- Every process that this module starts is stopped here, also when this process is killed (run/reaper.py).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.garbage import kept_for_good
from rhyme_openrlhf.history.worker import start_history_workers, stop_history_workers
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.run.reaper import finish, start_reaper
from rhyme_openrlhf.run.reporting import Reporting, SystemWatch
from rhyme_openrlhf.run.resources import SPARE_CPUS, required_gpus, shortage
from rhyme_openrlhf.run.source_code import checkouts
from rhyme_openrlhf.run.supervisor import Supervisor, rank_jobs
from rhyme_openrlhf.run.termination import Termination
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.redaction import redact_command, redact_config
from rhyme_openrlhf.telemetry.event_log import follow, read_events
from rhyme_openrlhf.telemetry.events import SCHEMA_VERSION, Note, RunFinished, RunStarted, RunStatus
from rhyme_openrlhf.telemetry.progress import make_display
from rhyme_openrlhf.telemetry.recorder import Recorder
from rhyme_openrlhf.telemetry.run_directory import RunDirectory, make_run_directory, versions
from rhyme_openrlhf.telemetry.services import Checkpoints, RunServices
from rhyme_openrlhf.telemetry.summary import render, summarize
from rhyme_openrlhf.training.failure import (
    STOPPED_ON_REQUEST,
    TERMINATED,
    TERMINATED_CODE,
    TERMINATED_IN_ORDER,
    Interrupted,
    is_stop_request,
    one_sentence,
    unmasked_interruptions,
)
from rhyme_openrlhf.training.resume import prepare

SOURCE = "driver"
# The descriptor.
STDERR = 2
# As Ray writes a job that is not known yet.
NO_JOB = "ffffffff"
# Of the actor, in the namespace that each run has for itself.
RECORDER_NAME = "recorder"
# The recorder only appends to a file; if it does not answer within this, its node is gone.
RECORDER_TIMEOUT_SECONDS = 30


class LaunchError(Exception):
    """The run cannot start; the message is one sentence for the user."""


@dataclass(frozen=True)
class _Job:
    """A run as it was asked for: checked arguments, where it resumes, its directory, when it started (unix seconds).

    `prompts` are how many the data set has; `layouts` what was planned when the arguments were checked; `on_gpus` is
    `platform.run_has_gpus()`.
    """

    args: SimpleNamespace
    settings: RhymeSettings
    prompts: int
    layouts: LayoutPlan | None
    on_gpus: bool
    command: list[str]
    checkpoints: Checkpoints
    run: RunDirectory
    started: float


def run_training(
    args: SimpleNamespace,
    settings: RhymeSettings,
    prompts: int,
    layouts: LayoutPlan | None,
    on_gpus: bool,
    command: list[str],
) -> int:
    """Train; returns the process's exit code: 0, 1 when the run failed, 130 or 143 when Ctrl-C or SIGTERM ended it.

    A run that stops because its directory has a stop request ends in order, with a checkpoint of its last step: 0.

    `prompts` are how many the data set has; `layouts` are those of its engines, None for one; `on_gpus` is
    `platform.run_has_gpus()`.
    Raises LaunchError, ResumeError or RunDirectoryError before anything of the run is started.
    """
    started = time.time()
    settings = dataclasses.replace(settings, control=settings.control.with_uids())
    checkpoints, notes = prepare(args, prompts)
    run = make_run_directory(settings.run.dir, settings.run.name, started)
    run.link_checkpoints(args.ckpt.path)
    job = _Job(args, settings, prompts, layouts, on_gpus, command, checkpoints, run, started)
    run.write_json("config.json", _config(job))
    reaper = start_reaper(os.getpid())
    reporting = Reporting(run, settings.control, reaper)
    try:
        return _run(job, notes)
    finally:
        reporting.close()
        finish(reaper)
        reporting.wait()


def _run(job: _Job, notes: list[str]) -> int:
    run = job.run
    if job.settings.run.progress != "off":
        # There is no event log to show yet.
        print(f"rhyme train: starting Ray for {run.path}", file=sys.stderr)
    session = _start_ray(job)
    (run.logs / "ray").symlink_to(session / "logs")
    status: RunStatus = "failed"
    message, code = "", 1
    display = threading.Thread()
    recorder = supervisor = system = services = None
    termination = Termination(run.stop_request, job.settings.limits.sigterm_s)
    try:
        _check_gpus(job.args)
        recorder = _start_recorder(job)
        services = _services(job, recorder)
        supervisor = _start_supervisor(job, session, services, termination)
        system = SystemWatch(services, run.path, supervisor.names)
        system.start()
        display = _start_display(run, job.settings.run.progress)
        services.record(_run_started(job, services), SOURCE)
        for note in (f"run directory {run.path}", *_reported(job), *notes, _starting(job)):
            services.record(Note("info", note), SOURCE)
        _train(job.args, services, run, supervisor)
        status, message, code = "succeeded", "", 0
    except LaunchError as error:
        message = str(error)
        raise
    except Interrupted:
        # Processes that were told to end die before they are asked for.
        if supervisor is not None and supervisor.fault and not termination.requested:
            message = supervisor.fault
        else:
            status, message, code = "stopped", TERMINATED, TERMINATED_CODE
    except KeyboardInterrupt:
        status, message, code = "stopped", "interrupted", 130
    except (ray.exceptions.RayError, RuntimeError, ValueError, OSError, AssertionError) as error:
        if is_stop_request(error):
            status, message, code = "stopped", STOPPED_ON_REQUEST, 0
            if termination.requested:
                message, code = TERMINATED_IN_ORDER, TERMINATED_CODE
        elif termination.requested:
            status, message, code = "stopped", f"{TERMINATED} ({one_sentence(error)})", TERMINATED_CODE
        else:
            message = (supervisor.explain() if supervisor is not None else "") or one_sentence(error)
            (run.logs / "driver-error.log").write_text(traceback.format_exc())
    finally:
        termination.close()
        if system is not None:
            system.stop()
        if supervisor is not None:
            supervisor.stop()
        if services is not None:
            stop_history_workers(services.history_workers)
        _finish(run, recorder, RunFinished(status, message, time.time() - job.started), display)
        jobs = _jobs()
        ray.shutdown()
        _keep_logs(session, run, jobs)
    if status != "succeeded":
        print(f"rhyme train: {status}: {message} (logs: {run.logs})", file=sys.stderr)
    return code


def _start_supervisor(job: _Job, session: Path, services: RunServices, termination: Termination) -> Supervisor:
    supervisor = Supervisor(
        job.run.events,
        session / "logs",
        job.settings.limits,
        lambda event: services.record(event, SOURCE),
        termination.interrupt,
        job.settings.outlives_engines,
    )
    for number, worker in enumerate(services.history_workers):
        supervisor.name(worker, f"history worker {number}")
    termination.install()
    supervisor.start()
    return supervisor


def _config(job: _Job) -> dict[str, Any]:
    found = {
        "command": job.command,
        "settings": job.settings.to_dict(),
        "arguments": _plain(job.args),
        "versions": versions(),
        "git": checkouts(Path.cwd()),
        "machine": {"cpus": os.cpu_count(), "host": os.uname().nodename},
    }
    return redact_config(found)


def _plain(node: Any) -> Any:
    """Turn a nested namespace into dictionaries."""
    if not isinstance(node, SimpleNamespace):
        return node
    return {name: _plain(value) for name, value in vars(node).items()}


def _start_ray(job: _Job) -> Path:
    """Connect to Ray, or start it; returns its session directory on this machine."""
    settings = job.settings
    variables = {
        # Upstream's own three, with the user's values if set (openrlhf/cli/train_ppo_ray.py).
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": os.environ.get("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1"),
    }
    if job.on_gpus:
        context = ray.init(runtime_env={"env_vars": variables}, log_to_driver=settings.run.worker_logs)
    else:
        from rhyme_openrlhf.platform.local_ray import LocalRayError, start_local_ray

        gpus = required_gpus(job.args)
        cpus = gpus + SPARE_CPUS + int(settings.history.workers * settings.history.cpus_per_worker + 1)
        try:
            context = start_local_ray(gpus, cpus, variables, settings.run.worker_logs)
        except LocalRayError as error:
            raise LaunchError(str(error)) from error
    return Path(context.address_info["session_dir"])


def _check_gpus(args: SimpleNamespace) -> None:
    lack = shortage(args, int(ray.cluster_resources().get("GPU", 0)))
    if lack:
        raise LaunchError(lack)


def _start_recorder(job: _Job) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Recorder.options(name=RECORDER_NAME, scheduling_strategy=here).remote(
        str(job.run.events), job.settings.telemetry
    )


def _services(job: _Job, recorder: Any) -> RunServices:
    args, settings = job.args, job.settings
    # Dynamic filtering draws as many prompts as it takes to fill a step.
    fixed = not args.algo.dynamic_filtering_enable
    steps = -(-job.prompts // args.rollout.batch_size) if fixed else None
    workers = []
    if settings.keeps_history:
        saved = job.checkpoints.resume.history if job.checkpoints.resume is not None else ()
        workers = start_history_workers(settings.history, job.run.history, saved, RECORDER_NAME)
    return RunServices(
        settings, recorder, tuple(workers), steps, args.ckpt.path, job.on_gpus, job.checkpoints, job.layouts
    )


def _start_display(run: RunDirectory, mode: str) -> threading.Thread:
    """Show the run on the terminal until its RunFinished event."""

    # Fixed now: while OpenRLHF runs, what it prints is led to a file.
    terminal = sys.stdout

    def show() -> None:
        finished = threading.Event()
        with make_display(mode, terminal) as display:
            for recorded in follow(run.events, finished.is_set):
                display.show(recorded)
                if isinstance(recorded.event, RunFinished):
                    finished.set()

    thread = threading.Thread(target=show, name="display", daemon=True)
    thread.start()
    return thread


def _run_started(job: _Job, services: RunServices) -> RunStarted:
    args = job.args
    return RunStarted(
        schema_version=SCHEMA_VERSION,
        name=job.settings.run.name,
        command=redact_command(job.command),
        engines=args.vllm.num_engines,
        tensor_parallel_size=args.vllm.tensor_parallel_size,
        epochs=args.train.num_episodes,
        steps_per_epoch=services.steps_per_epoch,
        prompts_per_step=args.rollout.batch_size,
        samples_per_prompt=args.rollout.n_samples_per_prompt,
        asynchronous=args.train.async_enable,
        emulated=_emulated(job.settings),
    )


def _emulated(settings: RhymeSettings) -> str:
    path = settings.emulate.profile
    return profiles.read(Path(path)).subject.hardware if path else ""


def _starting(job: _Job) -> str:
    args, engines = job.args, job.args.vllm.num_engines
    return (
        f"{job.prompts} prompts, {args.rollout.n_samples_per_prompt} samples each; starting {engines} "
        f"engine{'s' if engines > 1 else ''} (tensor parallel {args.vllm.tensor_parallel_size}) and the trainer"
    )


def _reported(job: _Job) -> list[str]:
    control = job.settings.control
    return [f"reported to {control.url} as run {control.run_uid}"] if control.url else []


@contextmanager
def _children_print_to(log: TextIO) -> Iterator[None]:
    """Send what child processes write to standard error to the log, within the block.

    DeepSpeed starts linkers when it is imported. It redirects their output through the descriptor of Python's
    `sys.stderr`, which is the log already, so their errors would still reach the terminal.
    """
    terminal = os.dup(STDERR)
    os.dup2(log.fileno(), STDERR)
    try:
        yield
    finally:
        os.dup2(terminal, STDERR)
        os.close(terminal)


def _train(args: SimpleNamespace, services: RunServices, run: RunDirectory, supervisor: Supervisor) -> None:
    # What OpenRLHF, vLLM and DeepSpeed print when they are imported and run is the log's, not the terminal's.
    with (run.logs / "driver.log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        with _children_print_to(log), kept_for_good():
            from rhyme_openrlhf.run import placement

        def engine_started(index: int, engine: Any) -> None:
            supervisor.name(engine, f"engine {index}", engine=True)

        placement.install(services, args.train.seed, engine_started)
        with unmasked_interruptions():
            placement.train(args)


def _finish(run: RunDirectory, recorder: Any, finished: RunFinished, display: threading.Thread) -> None:
    """Close the record and write the summary; works with the recorder gone."""
    if recorder is not None:
        try:
            ray.get(recorder.write.remote(finished, SOURCE, time.time()), timeout=RECORDER_TIMEOUT_SECONDS)
            ray.get(recorder.close.remote(), timeout=RECORDER_TIMEOUT_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            print(f"rhyme train: the event log could not be closed: {error}", file=sys.stderr)
    if display.ident is not None:
        display.join(timeout=RECORDER_TIMEOUT_SECONDS)
    if run.events.exists():
        summary = summarize(read_events(run.events))
        run.write_json("summary.json", summary.to_dict())
        print(render(summary, str(run.path)))


def _jobs() -> list[str]:
    """Return the Ray jobs whose processes are the run's: its own, and those of engines of several ranks."""
    own = ray.get_runtime_context().get_job_id()
    try:
        return [own, *rank_jobs()]
    except (ray.exceptions.RayError, RuntimeError) as error:
        print(f"rhyme train: the logs of tensor-parallel ranks are not kept: {one_sentence(error)}", file=sys.stderr)
        return [own]


def _keep_logs(session: Path, run: RunDirectory, jobs: Sequence[str]) -> None:
    """Copy what the processes of these jobs printed out of Ray's session directory, which Ray will clean."""
    link = run.logs / "ray"
    link.unlink(missing_ok=True)
    # On a shared cluster there are those of other jobs too.
    for log in (session / "logs").glob("worker-*"):
        if _job_of(log) in jobs:
            shutil.copy2(log, run.logs / log.name)


def _job_of(log: Path) -> str:
    """Return the Ray job of a worker's log, "" for an empty one: worker-<worker>-<job>-<process>.

    Ray 2.55 starts some workers before their job, and names these logs so. Its first line then says which job it was.
    """
    with log.open(errors="replace") as file:
        first = file.readline().strip()
    job = log.name.split("-")[2]
    if first and job == NO_JOB:
        return first.removeprefix(":job_id:")
    return job if first else ""
