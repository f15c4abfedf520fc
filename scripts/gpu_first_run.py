"""The parts of `scripts/gpu_first_run.sh`: each is a command of ours with a time limit, whose figures go into one file.

Invariants:

- The file is written after every part, in one piece.
- A part that fails, is skipped or runs out of time has its row and its reason.
- Results of another device are never mixed in.
- All processes that a part starts are ended with it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhyme_openrlhf.cli import demo, fetch_model
from rhyme_openrlhf.cli.doctor_facts import gather
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import RolloutFinished, RunFinished, TrainStep
from rhyme_openrlhf.telemetry.run_directory import versions

ROOT = Path(__file__).parents[1]
RHYME = (sys.executable, "-m", "rhyme_openrlhf.cli.main")
BAD_INPUT = 2
OK, FAILED, SKIPPED, LEFT = "ok", "failed", "skipped", "left"
# From Ctrl-C to an ended command: engines are stopped and Ray is shut down.
END_SECONDS = 45
# A part with less time than this is left for the next call.
LEAST_SECONDS = 20
LOADS = ("512", "128", "32", "8", "1")
TINY_LOADS = ("4", "1")
# A run of two epochs with one step each.
TINY_RUN = (
    "--data.max_samples", "4", "--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4",
    "--rollout.micro_batch_size", "4", "--rollout.max_new_tokens", "48", "--train.batch_size", "16",
    "--train.micro_batch_size", "4",
)  # fmt: skip
LAST_LINES = 3
# Where `rhyme fetch-model` puts it by default.
MODEL_FOLDER = Path("models/smollm2-135m")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """Shared input of all parts of a call. `folder`: for their files; `options`: the user's, of `rhyme train`."""

    gpus: int
    tiny: bool
    folder: Path
    options: Sequence[str] = ()

    @property
    def checkpoints(self) -> Path:
        """Return where a part's run saves what it trained."""
        return self.folder / "checkpoints"

    def train(self, gpus: int | None = None, *, cuda_graphs: bool = False) -> list[str]:
        """Return the options of `rhyme train`: the demo's, then the user's."""
        chosen = demo.arguments(str(self.checkpoints), self.gpus if gpus is None else gpus, cuda_graphs=cuda_graphs)
        return [*chosen, *self.options]


@dataclass(frozen=True)
class Part:
    """One row. `command` makes the command line; `read` gets its figures from the file or folder that it wrote.

    `limit_s`: seconds it may take; `words` makes the cell of the table.
    """

    name: str
    what: str
    limit_s: float
    command: Callable[[Context, Path], list[str]]
    read: Callable[[Path], Figures]
    words: Callable[[Figures], str]
    gpu_only: bool = False
    # Exit codes that are an answer, not a failure.
    answers: tuple[int, ...] = field(default=(0,))


def read_json(path: Path) -> Figures:
    """Return the JSON object of a file."""
    found: Figures = json.loads(path.read_text())
    return found


def verify(only: str, *more: str, cuda_graphs: bool = False) -> Callable[[Context, Path], list[str]]:
    """Return what makes a `rhyme verify` of these checks."""
    return lambda context, out: [
        *RHYME, "verify", "--only", only, "--json", str(out), *context.train(cuda_graphs=cuda_graphs), *more,
    ]  # fmt: skip


def verify_words(figures: Figures) -> str:
    """Return each check's result, and what vLLM chose."""
    words = []
    for check in figures["checks"]:
        words.append(": ".join(filter(None, (f"{check['check']} {check['result']}", check["why"]))))
        for name, engine in check["figures"].get("engines", {}).items():
            scheduling = "async" if engine["async_scheduling"] else "sync"
            words.append(f"{name} engine: {engine['dtype']}, runner {engine['model_runner']}, {scheduling}")
    # Two checks may have had the same engines.
    return "; ".join(dict.fromkeys(words))


def doctor(context: Context, out: Path) -> list[str]:
    """Return the doctor's command; its report is written to `out`."""
    return ["bash", "-c", '"$@" > "$0"', str(out), *RHYME, "doctor", "--json"]


def doctor_words(figures: Figures) -> str:
    """Return what will run, and what is not as wanted."""
    runs = [use["use"] for use in figures["runs"] if use["runs"]]
    bad = [f"{check['component']} {check['state']}" for check in figures["checks"] if check["state"] not in GOOD]
    return f"runs: {', '.join(runs) or 'nothing'}; {', '.join(bad) or 'all as wanted'}"


GOOD = ("ok", "optional", "not here", "unverified")


def profile(context: Context, out: Path) -> list[str]:
    """Return the command of a sparse profile, with CUDA graphs where there is a GPU."""
    return [*RHYME, "profile", "--sparse", "--out", str(out), *context.train(cuda_graphs=context.gpus > 0)]


def profile_words(figures: Figures) -> str:
    """Return what was profiled, and how many points there are."""
    subject = figures["subject"]
    points = f"{len(figures['steps'])} decode steps, {len(figures['prefills'])} prefills"
    return f"{subject['model']}, {subject['dtype']}, on {subject['hardware']}: {points}"


def speed(shape: str, seconds: int) -> Callable[[Context, Path], list[str]]:
    """Return what makes a model of this shape, and compares engines with drafts and without at every load.

    The heaviest load first: what drafts gain there is what is least known.
    """

    def command(context: Context, out: Path) -> list[str]:
        model = context.folder / "model"
        loads = TINY_LOADS if context.tiny else LOADS
        size = ("--rounds", "1", "--tokens", "24") if context.tiny else ("--rounds", "2", "--seconds", str(seconds))
        made = [sys.executable, str(ROOT / "benchmarks/real_shape.py"), "tiny" if context.tiny else shape, str(model)]
        measured = [
            sys.executable, str(ROOT / "benchmarks/speed_by_load.py"), "--running", *loads, *size, "--out", str(out),
            "--", *context.train(cuda_graphs=context.gpus > 0), "--actor.model_name_or_path", str(model),
        ]  # fmt: skip
        return ["bash", "-c", f"{shlex.join(made)} && exec {shlex.join(measured)}"]

    return command


def speed_words(figures: Figures) -> str:
    """Return the ratio at each load, by the model runner that drafts."""
    return ", ".join(
        f"{load['running']} running, {load['runner']}: {load['ratio']:.2f} times "
        f"({load['ratio_low']:.2f} to {load['ratio_high']:.2f})"
        for load in figures["loads"]
    )


def moves(context: Context, out: Path) -> list[str]:
    """Return the command that moves samples between two engines on one GPU, by each carrier."""
    # The first two of each condition are warm-up.
    size = ("--repeats", "3" if context.tiny else "4")
    return [sys.executable, str(ROOT / "benchmarks/move.py"), "cost", *size, "--out", str(out)]


def moves_words(figures: Figures) -> str:
    """Return the median downtime by carrier, over all contexts."""
    downtimes: dict[str, list[float]] = {}
    for row in figures["rows"]:
        if row["downtime_s"] is not None:
            downtimes.setdefault(row["carrier"], []).append(row["downtime_s"])
    return ", ".join(f"{carrier} {statistics.median(own) * 1000:.0f} ms" for carrier, own in downtimes.items())


def real_model(context: Context, out: Path) -> list[str]:
    """Return the command of two runs of SmolLM2-135M, with drafts and without; fetched if it is not there."""
    command = ["train", *fetch_model.training_arguments(MODEL_FOLDER)]
    size = (*TINY_RUN, "--rollout.max_new_tokens", "8") if context.tiny else ()
    place = ("--train.colocate_all",) if context.gpus == 1 else ()
    runs = " && ".join(
        shlex.join([
            *RHYME, *command, *size, *place, *more, "--ckpt.path", str(context.checkpoints),
            "--ckpt.output_dir", str(context.checkpoints / "trained"), "--run.dir", str(out / name),
            "--run.progress", "lines",
        ])
        for name, more in (("drafts", ()), ("plain", ("--no-histospec.enable",)))
    )  # fmt: skip
    fetch = shlex.join([*RHYME, "fetch-model", "smollm2", "--dir", str(MODEL_FOLDER)])
    return ["bash", "-c", f"{fetch} && {runs}"]


def read_two_runs(folder: Path) -> Figures:
    """Return what `read_run` does, of both. Raises ValueError."""
    return {name: read_run(folder / name) for name in ("drafts", "plain")}


def two_runs_words(figures: Figures) -> str:
    """Return the rollout's tokens a second by epoch, with drafts and without."""
    words = []
    for name, run in figures.items():
        for epoch in sorted({step["epoch"] for step in run["steps"]}):
            steps = [step for step in run["steps"] if step["epoch"] == epoch]
            tokens, seconds = sum(step["tokens"] or 0 for step in steps), sum(s["seconds"]["rollout"] for s in steps)
            words.append(f"{name}, epoch {epoch}: {tokens / seconds:,.0f} tokens/s in rollouts")
    return "; ".join(words)


def colocated(transport: str) -> Callable[[Context, Path], list[str]]:
    """Return what makes a run of two epochs whose engine and policy share one GPU, with this weight transport.

    Without a GPU OpenRLHF's transport has engine and policy apart, because it goes by CUDA IPC when they share a GPU.
    """

    def command(context: Context, out: Path) -> list[str]:
        gpus = 1 if context.gpus or transport == "buffer" else 0
        size = TINY_RUN if context.tiny else ()
        return [
            *RHYME, "train", *context.train(gpus), "--train.num_episodes", "2", *size,
            "--weights.transport", transport, "--run.dir", str(out), "--run.progress", "lines",
            # The other transport's run is beside this one.
            "--history.earlier", "none",
        ]  # fmt: skip

    return command


def read_run(folder: Path) -> Figures:
    """Return the seconds of each part of each step, the response tokens and the reward. Raises ValueError."""
    events = [recorded.event for recorded in read_events(folder / "events.jsonl")]
    tokens = {event.step: event.response_tokens for event in events if isinstance(event, RolloutFinished)}
    steps = [
        {"step": event.step, "epoch": event.epoch, "seconds": event.seconds_by_part, "tokens": tokens.get(event.step)}
        | {name: event.metrics[name] for name in ("reward",) if name in event.metrics}
        for event in events
        if isinstance(event, TrainStep)
    ]
    ends = [event for event in events if isinstance(event, RunFinished)]
    if not ends or ends[-1].status != "succeeded" or not steps:
        raise ValueError(ends[-1].message if ends else "the run did not end")
    return {"steps": steps, "seconds": ends[-1].seconds, "summary": read_json(folder / "summary.json")}


def run_words(figures: Figures) -> str:
    """Return the mean seconds of each part of a step, of the last epoch."""
    last = max(step["epoch"] for step in figures["steps"])
    steps = [step for step in figures["steps"] if step["epoch"] == last]
    parts = {name: sum(step["seconds"].get(name, 0.0) for step in steps) / len(steps) for name in steps[0]["seconds"]}
    said = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
    return f"{len(figures['steps'])} steps; a step of the last epoch: {said}"


def memory(context: Context, out: Path) -> list[str]:
    """Return the command of the out-of-memory probe."""
    size = ("--samples", "8", "--tokens", "32", "--vocabulary", "1024") if context.tiny else ()
    return [sys.executable, str(ROOT / "benchmarks/draft_memory.py"), *size, "--out", str(out)]


def memory_words(figures: Figures) -> str:
    """Return whether the engine survived."""
    free = figures.get("free_bytes_after", 0) / 2**30
    end = f"survived, {free:.1f} GiB free after it" if figures["survived"] else "the engine DIED"
    return f"{figures['samples']} samples, vocabulary {figures['vocabulary']:,}: {end}"


PARTS = (
    Part("doctor", "what is installed", 60, doctor, read_json, doctor_words, answers=(0, 1)),
    Part("proof", "a run's engine proves its drafts, with CUDA graphs", 300,
         verify("proof", cuda_graphs=True), read_json, verify_words),
    Part("speed-1.7b", "with drafts against without, in Qwen3-1.7B's shape", 360,
         speed("qwen3-1.7b", 300), read_json, speed_words),
    Part("speed-8b", "the same in Qwen3-8B's shape", 420, speed("qwen3-8b", 300), read_json, speed_words),
    Part("moves", "samples move between two engines on one GPU", 120, moves, read_json, moves_words),
    Part("real-model", "SmolLM2-135M, two epochs with drafts and without", 300,
         real_model, read_two_runs, two_runs_words),
    Part("train-openrlhf", "colocated, OpenRLHF's transport", 120, colocated("openrlhf"), read_run, run_words),
    Part("train-buffer", "colocated, weight buffer", 120, colocated("buffer"), read_run, run_words),
    # More than half an hour has room for.
    Part("lossless", "output with drafts is that without, exactly, in float32", 400,
         verify("weights,greedy,sampled"), read_json, verify_words),
    Part("profile", "step times", 300, profile, read_json, profile_words),
    Part("memory", "drafts beside log-probabilities", 240, memory, read_json, memory_words, gpu_only=True),
)  # fmt: skip


def run_part(part: Part, context: Context, limit_s: float) -> Figures:
    """Return the part's record: state, reason, seconds, command, figures."""
    out, log = context.folder / part.name, context.folder / f"{part.name}.log"
    # What an earlier call wrote must not be read as this one's.
    forget(out)
    command = part.command(context, out)
    began = time.monotonic()
    code, ended = run_command(command, log, limit_s)
    # Trained for nothing, and the largest of what a part leaves.
    forget(context.checkpoints)
    record: Figures = {"what": part.what, "seconds": round(time.monotonic() - began, 1), "command": command}
    record |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    reasons = [] if ended else [f"did not end within {limit_s:.0f} s"]
    if ended and code not in part.answers:
        reasons.append(f"exit code {code}: {last_lines(log)}")
    try:
        record["figures"] = part.read(out)
        record["words"] = part.words(record["figures"])
    except (OSError, ValueError, KeyError) as error:
        reasons.append(f"no figures: {error}")
    return record | {"state": FAILED if reasons else OK, "why": "; ".join(reasons)}


def run_command(command: Sequence[str], log: Path, limit_s: float) -> tuple[int, bool]:
    """Run a command in a session of its own; return its exit code, and whether it ended by itself."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s), True
        except subprocess.TimeoutExpired:
            return 0, False
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs as Ctrl-C would, and then by force; end what is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def forget(path: Path) -> None:
    """Delete a file or a folder that may be there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def last_lines(log: Path) -> str:
    """Return the end of what a command printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:]) or "no output"


def table(found: Figures) -> str:
    """Return the Markdown table of all parts so far, in the order of PARTS."""
    rows = [
        f"On {found['machine']['device']}:",
        "",
        "| part | what | result | took | figures |",
        "|---|---|---|---|---|",
    ]
    for part in PARTS:
        if record := found["parts"].get(part.name):
            cell = "; ".join(filter(None, (record["why"], record.get("words", "")))).replace("|", "/")
            rows.append(
                f"| {part.name} | {part.what} | {record['state']} | {record.get('seconds', 0):.0f} s | {cell} |"
            )
    return "\n".join(rows) + "\n"


def save(path: Path, found: Figures) -> None:
    """Write the file in one piece, and the table beside it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.rename(path)
    path.with_suffix(".md").write_text(table(found))


def begin(path: Path) -> Figures:
    """Return what earlier calls found on this device, or the start of a new file. Raises ValueError for another's."""
    facts = gather()
    machine: Figures = {"device": facts.device, "gpus": list(facts.torch.gpus), "driver": facts.driver}
    machine |= {"cores": facts.cores, "memory_bytes": facts.ram, "versions": versions()}
    parts: Figures = {}
    if path.exists():
        earlier = read_json(path)
        if earlier["machine"]["device"] != facts.device:
            raise ValueError(f"--out {path} has results of {earlier['machine']['device']}, and this is {facts.device}")
        parts = earlier["parts"]
    return {"machine": machine, "parts": parts}


def chosen_parts(only: str) -> list[Part]:
    """Return the parts of a list of names, in the order of PARTS. Raises ValueError."""
    names = [name.strip() for name in only.split(",")] if only else [part.name for part in PARTS]
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {unknown[0]}: there is no such part; there are: {', '.join(known)}")
    return [part for part in PARTS if part.name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts; 0: all are ok or skipped; 1: one failed or is left; 2: bad input."""
    names = "\n".join(f"  {part.name:16}{part.what}{' (GPUs alone)' * part.gpu_only}" for part in PARTS)
    parser = argparse.ArgumentParser(
        prog="gpu_first_run.sh", epilog=f"parts:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PART,PART", help="these parts alone")
    parser.add_argument("--seconds", type=float, default=3600, help="for all parts of this call (%(default)g)")
    parser.add_argument("--out", type=Path, default=Path("gpu_first_run.json"), help="results (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the smallest useful size of each part")
    parser.add_argument("options", nargs="*", help="options of rhyme train, after --")
    chosen = parser.parse_args(argv)
    try:
        parts = chosen_parts(chosen.only)
        found = begin(chosen.out)
    except ValueError as error:
        print(f"gpu_first_run: error: {error}", file=sys.stderr)
        return BAD_INPUT
    until = time.monotonic() + chosen.seconds
    folder = chosen.out.with_suffix(".parts").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(len(found["machine"]["gpus"]), chosen.tiny, folder, chosen.options)
    for part in parts:
        limit_s = min(part.limit_s, until - time.monotonic() - END_SECONDS)
        if part.gpu_only and not context.gpus:
            record: Figures = {"state": SKIPPED, "why": "for GPUs alone"}
        elif limit_s < LEAST_SECONDS:
            record = {"state": LEFT, "why": "no time was left in this call"}
        else:
            print(f"{part.name}: {part.what}, {limit_s:.0f} s at most", flush=True)
            record = run_part(part, context, limit_s)
        # What an earlier call found is worth more than that this one had no time.
        if record["state"] != LEFT or part.name not in found["parts"]:
            found["parts"][part.name] = record
        print(f"{part.name}: {record['state']} {record['why'] or record.get('words', '')}", flush=True)
        save(chosen.out, found)
    print(f"\n{table(found)}\nall figures: {chosen.out}; what each part wrote and printed: {folder}")
    return 1 if any(found["parts"][part.name]["state"] in (FAILED, LEFT) for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
