"""`rhyme verify`: find out whether what is promised holds on this machine, with this model and these flags.

Thin: parses, builds what the checks work on, runs them, writes the report and the record. A new check is a module
with `run(bench) -> Outcome` and one line in CHECKS.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rhyme_openrlhf.cli import demo, train_arguments
from rhyme_openrlhf.cli.console import print_table, refuse
from rhyme_openrlhf.cli.doctor_checks import BLOCKING, LOW, run_checks, verdicts
from rhyme_openrlhf.cli.doctor_facts import Facts, gather
from rhyme_openrlhf.cli.train_arguments import BadInputError
from rhyme_openrlhf.engine_errors import first_line
from rhyme_openrlhf.settings.drafting import HISTORY
from rhyme_openrlhf.settings.options import Parser
from rhyme_openrlhf.telemetry.run_directory import versions
from rhyme_openrlhf.verify import record, report
from rhyme_openrlhf.verify.outcome import Outcome, Row

if TYPE_CHECKING:
    from rhyme_openrlhf.verify.bench import Bench

_refuse = partial(refuse, "rhyme verify")
# What a shell reports of a process that SIGTERM ended.
KILLED = 128 + signal.SIGTERM
INSTALLS = "installs"
# Name -> module with `run(bench) -> Outcome`, in the order in which they run. The training run comes before the
# engines, which stay up for the later checks. Memory comes last, when the engines are there to be measured.
CHECKS = {
    "weights": "rhyme_openrlhf.verify.weights",
    "greedy": "rhyme_openrlhf.verify.greedy",
    "sampled": "rhyme_openrlhf.verify.sampled",
    "proof": "rhyme_openrlhf.verify.proof",
    "speed": "rhyme_openrlhf.verify.speed",
    "memory": "rhyme_openrlhf.verify.memory",
}
# Enough for every kind of prompt to be among them, few enough for minutes on two cores.
PROMPTS = 12

USAGE = """\
rhyme verify [--json FILE] [--only CHECK,CHECK] [--keep] [options of rhyme train]"""

DESCRIPTION = """\
Measures, on this machine, whether what rhyme-openrlhf promises holds with your model and flags; without options of
rhyme train, with the embedded model. About five minutes for the embedded model on two cores.

  installs   what rhyme doctor checks
  weights    a real training run of three steps: do trained weights reach every engine? (Reward, learning rate and
             lengths are the check's own; the trained model is thrown away.)
  greedy     is greedy output the same with drafts as without, whatever the history?
  sampled    do sampled tokens follow the model's own distribution with drafts?
  proof      what a run's own engine proves of its drafts before its first sample, in its own number format
  speed      tokens a second with drafts and without, in turn (never fails)
  memory     is there room for weight versions, indexes and objects?

On GPUs two engines run at a time: each on GPUs of its own where the cluster has them, else side by side on one
engine's GPUs, each with half of --vllm.gpu_memory_utilization."""


def main(argv: list[str]) -> int:
    """Verify; 0 when nothing failed, 1 when something did, 2 for bad input before anything was started."""
    # A plain kill would leave the training run and the engines behind; this way they are ended as on Ctrl-C.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(KILLED))
    try:
        return _verify(argv)
    finally:
        signal.signal(signal.SIGTERM, before)


def _verify(argv: list[str]) -> int:
    options, train_argv = _parser().parse_known_args(argv)
    chosen = _chosen(options.only)
    if isinstance(chosen, str):
        return _refuse(chosen)
    progress = report.Progress()
    facts = gather()
    rows: list[Row] = []
    if INSTALLS in chosen:
        rows += report.run_checks({INSTALLS: lambda: check_installs(facts)}, progress)
    others = [name for name in CHECKS if name in chosen]
    missing = lack(facts)
    if missing:
        unable: dict[str, Callable[[], Outcome]] = {name: _never for name in others}
        rows += report.run_checks(unable, progress, lambda name: f"the training stack is not complete: {missing}")
    elif others:
        folder = Path(tempfile.mkdtemp(prefix="rhyme-verify-"))
        try:
            rows += _run(others, train_argv, folder, progress, lambda outcome: _note(facts, outcome))
        except BadInputError as error:
            return _refuse(str(error))
        finally:
            # What the training run printed is what explains a failure.
            if options.keep or report.failed(rows):
                print(f"\nlogs of the checks: {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
    _finish(rows, facts, argv, Path(options.json))
    return 1 if report.failed(rows) else 0


def use(facts: Facts) -> str:
    """Return the doctor's name of the use that `rhyme verify` needs here."""
    return "training on GPUs" if facts.has_gpu else "embedded demo"


def lack(facts: Facts) -> str:
    """Return why no engine will start here; "" when one will."""
    (verdict,) = [verdict for verdict in verdicts(facts, run_checks(facts)) if verdict.use == use(facts)]
    return "" if verdict.runs else verdict.reason


def check_installs(facts: Facts) -> Outcome:
    """Failed where a run is certain to fail; what is merely low is said."""
    checks = run_checks(facts)
    bad = [check for check in checks if check.state in (*BLOCKING, LOW)]
    lines = [f"{len(checks)} components looked at, {len(bad)} of them not as wanted"]
    lines += [f"{c.component}: {c.found}, wanted {c.wanted}{f'; run: {c.mend}' if c.mend else ''}" for c in bad]
    reason = lack(facts)
    figures = {"components": [dataclasses.asdict(check) for check in checks]}
    return Outcome(
        "what rhyme doctor checks",
        "failed" if reason else "ok",
        f"{reason}; see rhyme doctor" if reason else "",
        lines,
        figures,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="rhyme verify",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation could swallow an option of rhyme train.
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="FILE", default="rhyme-verify.json", help="where everything measured goes")
    parser.add_argument("--only", metavar="CHECK,CHECK", default="", help="these checks alone")
    parser.add_argument("--keep", action="store_true", help="keep records and logs, as after a failure")
    return parser


def _chosen(only: str) -> tuple[str, ...] | str:
    """Return the checks to run, or one sentence that says why `only` is no list of checks."""
    known = (INSTALLS, *CHECKS)
    names = tuple(name.strip() for name in only.split(",")) if only else known
    unknown = [name for name in names if name not in known]
    return f"--only {unknown[0]}: there is no such check; there are: {', '.join(known)}" if unknown else names


def _never() -> Outcome:
    raise AssertionError("a check that is skipped was run")


def _run(
    names: Sequence[str], argv: list[str], folder: Path, progress: report.Progress, note: Callable[[Outcome], None]
) -> list[Row]:
    """Return the outcomes of these checks; each is noted at once, so that a killed verification loses none."""
    progress.enter("prepare")
    progress.say("arguments, model and prompts")
    from rhyme_openrlhf.platform import run_gpus

    bench = _bench(argv or demo.arguments(str(folder / "checkpoints"), run_gpus()), folder, progress)
    try:
        return report.run_checks({name: _bound(CHECKS[name], bench) for name in names}, progress, note=note)
    finally:
        bench.close()


def _bound(module: str, bench: Bench) -> Callable[[], Outcome]:
    return lambda: importlib.import_module(module).run(bench)


def _bench(argv: list[str], folder: Path, progress: report.Progress) -> Bench:
    """Check the arguments as `rhyme train` does, and load what the checks work on. Raises BadInputError."""
    checked = train_arguments.check(argv, progress.say)
    if checked.settings.drafting.source != HISTORY:
        raise BadInputError(
            f"--drafting.source {checked.settings.drafting.source}: rhyme verify puts histories there to know what is "
            "drafted, so it checks drafts from history alone; leave the option out"
        )
    from rhyme_openrlhf.cli import preflight, preflight_data
    from rhyme_openrlhf.verify.bench import Bench, Inputs, Prompt

    try:
        prompts = preflight_data.some_prompts(checked.args, PROMPTS)
        parameters = _parameters(checked.args)
    except preflight.PreflightError as error:
        raise BadInputError(str(error)) from error
    inputs = Inputs(
        argv=tuple(argv),
        args=checked.args,
        settings=checked.settings,
        prompts=tuple(Prompt(text, tuple(tokens)) for text, tokens in prompts),
        parameters=parameters,
        on_gpus=checked.on_gpus,
        folder=folder,
    )
    return Bench(inputs, progress.say)


def _parameters(args: SimpleNamespace) -> int:
    """Return the model's parameters, counted from its configuration alone. Raises PreflightError."""
    import torch
    import transformers

    from rhyme_openrlhf.cli import preflight

    config = transformers.AutoConfig.from_pretrained(args.actor.model_name_or_path, trust_remote_code=True)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    except ValueError as error:
        reason = first_line(error)
        path = args.actor.model_name_or_path
        raise preflight.PreflightError(
            f"--actor.model_name_or_path: {path} is no causal language model ({reason})"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def _note(facts: Facts, outcome: Outcome) -> None:
    """Write what a check proves or disproves to the record, unless engines may run on other machines."""
    if os.environ.get("RAY_ADDRESS"):
        return
    with contextlib.suppress(OSError):
        # Without a place for it, the doctor goes on saying "unverified"; the report is given all the same.
        known = record.read(record.path())
        record.write(record.path(), record.update(known, facts.device, facts.versions, [outcome], _now()))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _finish(rows: list[Row], facts: Facts, argv: list[str], file: Path) -> None:
    """Show the table, and write the JSON file."""
    about: dict[str, Any] = {
        "command": ["rhyme", "verify", *argv],
        "date": _now(),
        "device": facts.device,
        "gpus": list(facts.torch.gpus),
        "driver": facts.driver,
        "cores": facts.cores,
        "memory_bytes": facts.ram,
        "versions": versions(),
    }
    driver = f", driver {facts.driver}" if facts.driver else ""
    print(f"\n{facts.device}{driver}")
    print_table(report.table(rows), report.COLOURS)
    try:
        file.write_text(json.dumps(report.as_json(rows, about), indent=2, allow_nan=False) + "\n")
        print(f"\neverything measured: {file}")
    except OSError as error:
        print(f"rhyme verify: {file} cannot be written: {error.strerror}", file=sys.stderr)
    if os.environ.get("RAY_ADDRESS"):
        print("nothing is noted for rhyme doctor: the engines of a cluster (RAY_ADDRESS) may run on other machines")
