"""One training run from checked arguments to summary: Ray, services, OpenRLHF's training, the run record.

Invariants:
- Once the run has started, every ending writes a RunFinished event, a summary and the processes' logs, as far as
  each can be done (run/ending.py). The terminal gets the reason in any case, and the exit code is the training's.
- Every process that this module starts is stopped here, also when this process is killed (run/reaper.py).
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.garbage import kept_for_good
from rhyme_openrlhf.history.archive import About
from rhyme_openrlhf.history.lineage import Ancestors, Lineage, lineage
from rhyme_openrlhf.history.workers import start_history_workers, stop_history_workers
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.platform.job_variables import job_variables
from rhyme_openrlhf.run.ending import Ending, LossyFile, Outcome, Reserve, outcome_of, say, tell
from rhyme_openrlhf.run.live_logs import LiveLogs, job_of
from rhyme_openrlhf.run.node_logs import OtherNodes
from rhyme_openrlhf.run.reaper import finish, start_reaper
from rhyme_openrlhf.run.reporting import Reporting, SystemWatch
from rhyme_openrlhf.run.resources import SPARE_CPUS, required_gpus, shortage
from rhyme_openrlhf.run.source_code import checkouts
from rhyme_openrlhf.run.supervisor import Supervisor, rank_jobs
from rhyme_openrlhf.run.termination import Termination
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.redaction import redact_command, redact_config
from rhyme_openrlhf.telemetry.event_log import EventLog, follow, read_events
from rhyme_openrlhf.telemetry.events import SCHEMA_VERSION, Note, RunFinished, RunStarted
from rhyme_openrlhf.telemetry.progress import make_display
from rhyme_openrlhf.telemetry.recorder import Recorder
from rhyme_openrlhf.telemetry.run_directory import RunDirectory, make_run_directory, versions
from rhyme_openrlhf.telemetry.services import Checkpoints, RunServices
from rhyme_openrlhf.telemetry.summary import UNFINISHED, RunState, RunSummary, render, summarize
from rhyme_openrlhf.training.failure import Interrupted, is_out_of_reach, unmasked_interruptions
from rhyme_openrlhf.training.resume import prepare

SOURCE = "driver"
# Upstream's own three (openrlhf/cli/train_ppo_ray.py).
VARIABLES = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
# The descriptor.
STDERR = 2
# In the run's logs, to Ray's own while the run goes on.
RAY_LINK = "ray"
# Of the actor, in the namespace that each run has for itself.
RECORDER_NAME = "recorder"
# The recorder only appends to a file; if it does not answer within this, its node is gone.
RECORDER_TIMEOUT_SECONDS = 30
RAY_ANSWERS_SECONDS = 5.0
# Ray finds a node lost that has not answered five times, 3 s apart.
LOST_NODE_SECONDS = 40.0


class LaunchError(Exception):
    """The run cannot start; the message is one sentence for the user."""


@dataclass(frozen=True)
class _Job:
    """A run as it was asked for: checked arguments, where it resumes, its directory, when it started (unix seconds).

    `prompts` are how many the data set has; `layouts` what was planned when the arguments were checked; `on_gpus` is
    `platform.run_has_gpus()`; `lineage`: what it leaves of its history and drafts from, None without history.
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
    lineage: Lineage | None = None


def run_training(
    args: SimpleNamespace,
    settings: RhymeSettings,
    prompts: int,
    layouts: LayoutPlan | None,
    on_gpus: bool,
    command: list[str],
    ancestors: Ancestors | None = None,
) -> int:
    """Train; returns the process's exit code: 0, 1 when the run failed, 130 or 143 when Ctrl-C or SIGTERM ended it.

    A run that stops because its directory has a stop request ends in order, with a checkpoint of its last step: 0.

    `prompts` are how many the data set has; `layouts` are those of its engines, None for one; `on_gpus` is
    `platform.run_has_gpus()`; `ancestors`: the earlier runs that it can draft from, None without history.
    Raises LaunchError, ResumeError or RunDirectoryError before anything of the run is started.
    """
    started = time.time()
    settings = dataclasses.replace(settings, control=settings.control.with_uids())
    checkpoints, notes = prepare(args, prompts)
    if ancestors is not None and ancestors.gone and checkpoints.resume is None:
        raise LaunchError(ancestors.gone[0])
    run = make_run_directory(settings.run.dir, settings.run.name, started)
    found, said = _lineage(args, settings, run, checkpoints, started, ancestors)
    notes += said
    if found is not None:
        more: dict[str, Any] = {"tokenizer": found.about.tokenizer}
        if settings.run.reproducible:
            more["drafted_from"] = found.fixed
        checkpoints = dataclasses.replace(checkpoints, more=more)
    job = _Job(args, settings, prompts, layouts, on_gpus, command, checkpoints, run, started, found)
    try:
        run.link_checkpoints(args.ckpt.path)
        run.write_json("config.json", _config(job))
    except OSError as error:
        raise LaunchError(f"--run.dir {run.path} takes no files: {error.strerror}") from error
    ending = Ending()
    reaper = start_reaper(os.getpid())
    reporting = Reporting(run, settings.control, reaper)
    started_parts = _Started()
    try:
        code = _run(job, notes, ending, started_parts)
    finally:
        ending.part("have the last events reported", reporting.close)
        ending.part("end the processes that are left", lambda: finish(reaper))
        ending.part("wait for the reporter", reporting.wait)
    if started_parts.ray_is_gone:
        # Ray's core, without its store, waits at Python's end and then crashes. Seen with Ray 2.55.0.
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _lineage(
    args: SimpleNamespace,
    settings: RhymeSettings,
    run: RunDirectory,
    checkpoints: Checkpoints,
    started: float,
    ancestors: Ancestors | None,
) -> tuple[Lineage | None, list[str]]:
    """Return what a run leaves of its history and drafts from, and what the user is to be told of it."""
    if ancestors is None or not settings.keeps_history:
        return None, []
    names = settings.run.name, ancestors.tokenizer, args.actor.model_name_or_path
    about = About(*names, started, settings.control.run_uid, args.data.prompt_dataset)
    resumed = checkpoints.resume.drafted_from if checkpoints.resume is not None else None
    return lineage(settings.history, settings.run.reproducible, run.path, about, ancestors, resumed)


@dataclass
class _Started:
    """The parts of a run that are started so far, which its ending ends."""

    session: Path | None = None
    ray_job: str = ""
    recorder: Any = None
    services: RunServices | None = None
    supervisor: Supervisor | None = None
    system: SystemWatch | None = None
    logs: LiveLogs | None = None
    others: OtherNodes | None = None
    display: _Display | None = None
    figures: _Figures | None = None
    ray_is_gone: bool = False


def _run(job: _Job, notes: list[str], ending: Ending, started: _Started) -> int:
    run = job.run
    if job.settings.run.progress != "off":
        # There is no event log to show yet.
        print(f"rhyme train: starting Ray for {run.path}", file=sys.stderr)
    outcome = Outcome("succeeded", "", 0)
    failure: BaseException | None = None
    termination = Termination(run.stop_request, job.settings.limits.sigterm_s)
    reserve = ending.part("keep room for the run's last words", lambda: Reserve(run.path))
    try:
        try:
            termination.install()
            supervisor, services = _start(job, notes, started, termination)
            _train(job.args, services, run, supervisor)
        finally:
            # What comes from now on interrupts no ending.
            termination.close()
    # Upstream, and people's code in it, raise anything, SystemExit included: each is this run's end, and is told.
    except BaseException as error:  # noqa: BLE001
        # Ray's waits raise a plain KeyboardInterrupt for any kind of it.
        interrupted = termination.interrupts and type(error) is KeyboardInterrupt
        failure = Interrupted() if interrupted or termination.came_to_ray(error) else error
    if reserve is not None:
        ending.part("release the room for the run's last words", reserve.release)
    if isinstance(failure, LaunchError):
        outcome = Outcome("failed", str(failure), 1)
    elif failure is not None:
        outcome = outcome_of(failure, termination.requested, partial(_fault, started.supervisor, ending, failure))
        text = "".join(traceback.format_exception(failure))
        if outcome.status == "failed":
            ending.part("write driver-error.log", lambda: (run.logs / "driver-error.log").write_text(text))
    _end(run, started, RunFinished(outcome.status, outcome.message, time.time() - job.started), ending)
    if isinstance(failure, LaunchError):
        raise failure
    if outcome.status != "succeeded":
        tell(f"{outcome.status}: {outcome.message} (logs: {run.logs})")
    return outcome.code


def _start(job: _Job, notes: list[str], started: _Started, termination: Termination) -> tuple[Supervisor, RunServices]:
    """Start what a run needs beside OpenRLHF's own actors; `started` has at every moment what there is to end."""
    run = job.run
    started.figures = _Figures(run)
    session = started.session = _start_ray(job)
    # ray.init has set a handler of its own.
    termination.install()
    started.ray_job = ray.get_runtime_context().get_job_id()
    (run.logs / RAY_LINK).symlink_to(session / "logs")
    others = started.others = OtherNodes(run.logs)
    started.logs = LiveLogs(session / "logs", run.logs, started.ray_job, lambda: others.copy([started.ray_job]))
    started.logs.start()
    _check_gpus(job.args)
    recorder = started.recorder = _start_recorder(job)
    services = started.services = _services(job, recorder)
    supervisor = started.supervisor = _start_supervisor(job, session, services, termination, started.logs)
    started.system = SystemWatch(services, run.path, supervisor.names)
    started.system.start()
    started.display = _Display(run, job.settings.run.progress)
    services.record(_run_started(job, services), SOURCE)
    for note in (f"run directory {run.path}", *_reported(job), *notes, _starting(job)):
        services.record(Note("info", note), SOURCE)
    return supervisor, services


def _fault(supervisor: Supervisor | None, ending: Ending, failure: BaseException) -> str:
    """Return the supervisor's explanation of a failure, or ""; it asks Ray, which may be what failed."""
    if supervisor is None:
        return ""
    explain = partial(supervisor.explain, LOST_NODE_SECONDS if is_out_of_reach(failure) else 0.0)
    return supervisor.fault or ending.part("look for processes that died", explain) or ""


def _start_supervisor(
    job: _Job, session: Path, services: RunServices, termination: Termination, logs: LiveLogs
) -> Supervisor:
    supervisor = Supervisor(
        job.run.events,
        (session / "logs", job.run.logs),
        job.settings.limits,
        lambda event: services.record(event, SOURCE),
        termination.interrupt,
        job.settings.outlives_engines,
        services.recorder,
        # The terminal of now: while OpenRLHF runs, standard error is led to a file.
        partial(tell, terminal=sys.stderr),
        logs.copy,
    )
    for number, worker in enumerate(services.history_workers):
        supervisor.name(worker, f"history worker {number}")
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
    if job.on_gpus:
        variables = job_variables(VARIABLES, os.environ)
        context = ray.init(runtime_env={"env_vars": variables}, log_to_driver=settings.run.worker_logs)
    else:
        from rhyme_openrlhf.platform.local_ray import LocalRayError, start_local_ray

        gpus = required_gpus(job.args)
        cpus = gpus + SPARE_CPUS + int(settings.history.workers_on(1) * settings.history.cpus_per_worker + 1)
        try:
            context = start_local_ray(gpus, cpus, VARIABLES, settings.run.worker_logs)
        except LocalRayError as error:
            raise LaunchError(str(error)) from error
    return Path(context.address_info["session_dir"])


def _check_gpus(args: SimpleNamespace) -> None:
    if os.environ.get("RAY_ADDRESS"):
        # That cluster may grow; the checks before the run have said what it waits for.
        return
    lack = shortage(args, int(ray.cluster_resources().get("GPU", 0)))
    if lack:
        raise LaunchError(lack)


def _start_recorder(job: _Job) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # Started again, it goes on with its file; what was on its way to it is lost.
    return Recorder.options(name=RECORDER_NAME, scheduling_strategy=here, max_restarts=-1).remote(
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
        workers = start_history_workers(settings.history, job.run.history, saved, RECORDER_NAME, job.lineage)
    return RunServices(
        settings, recorder, tuple(workers), steps, args.ckpt.path, job.on_gpus, job.checkpoints, job.layouts
    )


class _Display:
    """Shows the run on the terminal, from now until its RunFinished event or `stop`."""

    def __init__(self, run: RunDirectory, mode: str) -> None:
        # Fixed now: while OpenRLHF runs, what it prints is led to a file.
        self._terminal = sys.stdout
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._show, args=(run, mode), name="display", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show what is recorded by now, and end. The last event may be missing: a full disk has refused it."""
        self._finished.set()
        self._thread.join()

    def _show(self, run: RunDirectory, mode: str) -> None:
        with make_display(mode, self._terminal) as display:
            for recorded in follow(run.events, self._finished.is_set):
                display.show(recorded)
                if isinstance(recorded.event, RunFinished):
                    self._finished.set()


class _Figures:
    """Folds the run's events into its summary while it goes on, so that its end need not read all of them."""

    def __init__(self, run: RunDirectory) -> None:
        self._events = run.events
        self._state = RunState()
        self._finished = threading.Event()
        self._whole = False
        self._thread = threading.Thread(target=self._fold, name="figures", daemon=True)
        self._thread.start()

    def _fold(self) -> None:
        for recorded in follow(self._events, self._finished.is_set):
            self._state.apply(recorded)
        self._whole = True

    def stop(self) -> RunSummary:
        """Take what is written by now, and return the summary. Raises what an event of the log leads to."""
        self._finished.set()
        self._thread.join()
        # The thread has ended at an event: to read the log again raises the same here.
        return self._state.summary() if self._whole else summarize(read_events(self._events))


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
    lossy = TextIOWrapper(BufferedWriter(LossyFile(run.logs / "driver.log", "w")), "utf-8", line_buffering=True)
    with lossy as log, redirect_stdout(log), redirect_stderr(log):
        with _children_print_to(log), kept_for_good():
            from rhyme_openrlhf.run import placement

        def engine_started(index: int, engine: Any) -> None:
            supervisor.name(engine, f"engine {index}", engine=True)

        placement.install(services, args.train.seed, engine_started)
        with unmasked_interruptions():
            placement.train(args)


def _end(run: RunDirectory, started: _Started, finished: RunFinished, ending: Ending) -> None:
    """End what was started, close the record, write the summary and keep the logs; each as far as it can be done.

    A scheduler's SIGTERM may have ended Ray, too. Then nothing is asked of it: each question would wait, and after a
    minute Ray ends this process by itself.
    """
    gone = started.session is not None and ending.part("see whether Ray is there", _ray_is_gone) is True
    started.ray_is_gone = gone
    if started.system is not None:
        ending.part("stop the system probe", started.system.stop)
    if started.supervisor is not None:
        ending.part("stop the supervisor", started.supervisor.stop)
    if started.logs is not None:
        ending.part("copy no more logs", started.logs.close)
    if started.services is not None and not gone:
        workers = started.services.history_workers
        ending.part("stop the history workers", lambda: stop_history_workers(workers))
    if gone:
        ending.part("record the end of the run", lambda: _record_without_ray(run, finished))
    elif started.recorder is not None:
        _close_record(started.recorder, finished, ending)
    if started.display is not None:
        ending.part("show the last events", started.display.stop)
    _summarize(run, started, finished, ending)
    if started.session is None:
        # Ray may have begun to start.
        ending.part("end Ray", ray.shutdown)
        return
    session, jobs = started.session, None
    if not gone:
        jobs = ending.part("find the processes of engines of several ranks", _jobs)
        if started.others is not None:
            others, all_jobs = started.others, jobs or [started.ray_job]
            ending.part("keep the logs of other nodes", lambda: others.copy_all(all_jobs))
        ending.part("end Ray", ray.shutdown)
    if gone or "end Ray" in ending.failed:
        # Python would wait for it again.
        atexit.unregister(ray.shutdown)
    ending.part("keep the logs of the run's processes", lambda: _keep_logs(session, run, jobs or [started.ray_job]))


def _ray_is_gone() -> bool:
    """Return whether nothing listens where Ray's control store was."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_ANSWERS_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        # A node that is away may come back.
        return False
    return False


def _record_without_ray(run: RunDirectory, finished: RunFinished) -> None:
    """Write the last event here, because the recorder, its only writer, went with Ray."""
    with EventLog(run.events) as log:
        log.write(finished, SOURCE)


def _close_record(recorder: Any, finished: RunFinished, ending: Ending) -> None:
    """Write the last event and close the event log. What the recorder does not do in time is left."""

    def answer(reference: Any) -> None:
        ray.get(reference, timeout=RECORDER_TIMEOUT_SECONDS)

    ending.part("record the end of the run", lambda: answer(recorder.write.remote(finished, SOURCE, time.time())))
    ending.part("close the event log", lambda: answer(recorder.close.remote()))


def _summarize(run: RunDirectory, started: _Started, finished: RunFinished, ending: Ending) -> None:
    """Write the summary and print it; the end of the run is in it, also where the record could not take that."""
    summary = None if started.figures is None else ending.part("sum the run up", started.figures.stop)
    if summary is None or not run.events.exists():
        return
    if summary.status == UNFINISHED:
        tell(f"the event log lacks the end of the run (disk full?): {run.events}")
        summary = dataclasses.replace(
            summary, status=finished.status, message=finished.message, seconds=finished.seconds
        )
    written = summary
    ending.part("write summary.json", lambda: run.write_json("summary.json", written.to_dict()))
    ending.part("print the summary", lambda: say(render(written, str(run.path))))


def _jobs() -> list[str]:
    """Return the Ray jobs whose processes are the run's: its own, and those of engines of several ranks."""
    return [ray.get_runtime_context().get_job_id(), *rank_jobs()]


def _keep_logs(session: Path, run: RunDirectory, jobs: Sequence[str]) -> None:
    """Copy what the processes of these jobs printed out of Ray's session directory, which Ray will clean.

    Raises OSError when some could not be copied, after all the others; the link to Ray's directory then stays.
    """
    refused: list[tuple[Path, OSError]] = []
    # On a shared cluster there are those of other jobs too.
    for log in sorted((session / "logs").glob("worker-*")):
        try:
            if job_of(log) in jobs and not _is_whole(log, run.logs / log.name):
                shutil.copy2(log, run.logs / log.name)
        except OSError as error:
            refused.append((log, error))
            # The whole one is where the link leads.
            with suppress(OSError):
                (run.logs / log.name).unlink()
    if refused:
        first, why = refused[0]
        raise OSError(f"{len(refused)} of them stay in {first.parent}: {why.strerror} ({first.name})")
    (run.logs / RAY_LINK).unlink(missing_ok=True)


def _is_whole(log: Path, copy: Path) -> bool:
    """Return whether a live copy has all of its log already; readers may be following it."""
    return copy.exists() and copy.stat().st_size == log.stat().st_size
