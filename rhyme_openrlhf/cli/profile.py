"""`rhyme profile`: measure how long an engine's steps take; `rhyme profile show`: look at what was measured."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rhyme_openrlhf.cli import demo, train_arguments
from rhyme_openrlhf.cli.console import refuse
from rhyme_openrlhf.cli.train_arguments import BadInputError, TrainArguments
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.predictor import SpeculationOverhead
from rhyme_openrlhf.latency.profile import Profile, ProfileError
from rhyme_openrlhf.latency.step_model import Quality, assess
from rhyme_openrlhf.latency.transfer_model import carrying_words
from rhyme_openrlhf.settings.options import Parser
from rhyme_openrlhf.telemetry.run_directory import versions

_refuse = partial(refuse, "rhyme profile")
# One point: some steps of as many samples as fit.
POINT_SECONDS = 300
MOST_BESIDE = 64
# A person reads a table of this many rows.
TABLE_ROWS = 40

USAGE = """\
rhyme profile [--out FILE] [options of rhyme train]
       rhyme profile show FILE [--html PAGE]"""

DESCRIPTION = """\
Measures, on a real engine with your model and flags (the embedded model without any), how long a decode step takes for
how many samples, with how much context, verifying how many draft tokens; and how long a prefill takes. Contexts are
filled, not computed, so that long ones cost no time. Interrupted, it goes on where it was when it is run again.

  rhyme profile                                  the embedded model
  rhyme profile --actor.model_name_or_path ...   your model, with the flags of your run
  rhyme profile show FILE --html page.html       a table, and a page with the curves"""


def main(argv: list[str]) -> int:
    """0: measured or shown; 1: it could not be measured; 2: bad input."""
    if argv[:1] == ["show"]:
        return _show(argv[1:])
    options, train_argv = _parser().parse_known_args(argv)
    from rhyme_openrlhf.platform import run_gpus

    try:
        checked = train_arguments.check(train_argv or demo.arguments("unused", run_gpus()), print)
    except BadInputError as error:
        return _refuse(str(error))
    if not checked.settings.histospec.enable:
        return _refuse("--no-histospec.enable: an engine without speculation has no verifying steps to measure")
    if options.beside and options.out is None:
        return _refuse("--beside: a profile of engines that share a machine is no run's own: say where it goes (--out)")
    if not 0 <= options.beside <= MOST_BESIDE:
        return _refuse(f"--beside must be from 0 to {MOST_BESIDE}, got {options.beside}")
    from rhyme_openrlhf.cli.preflight_gpus import PreflightError, check_engines_alone

    try:
        check_engines_alone(checked.args, 1 + options.beside, checked.on_gpus)
    except PreflightError as error:
        return _refuse(str(error))
    return _measure(checked, options.out, options.beside, options.sparse)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="rhyme profile",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation could swallow an option of rhyme train.
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="where the profile goes (default: the user's cache)")
    parser.add_argument(
        "--beside",
        metavar="N",
        type=int,
        default=0,
        help="engines that do the same meanwhile: for rhyme simulate, where engines of a run share cores (%(default)s)",
    )
    parser.add_argument("--sparse", action="store_true", help="fewer points: a minute instead of minutes")
    return parser


def _measure(checked: TrainArguments, out: Path | None, beside: int, sparse: bool) -> int:
    from rhyme_openrlhf.engine.factory import parts_of_measured
    from rhyme_openrlhf.engine.port import MeasuredEngine
    from rhyme_openrlhf.engine_errors import EngineCallError
    from rhyme_openrlhf.latency.measure import (
        SPARSE,
        THOROUGH,
        UNSPECULATED,
        MeasureError,
        Plan,
        disturbed,
        measure,
        with_unspeculated,
    )
    from rhyme_openrlhf.verify.engines import EnginePool
    from rhyme_openrlhf.verify.outcome import VerifyError

    pool = EnginePool(checked.args, checked.settings, checked.on_gpus, parts=parts_of_measured)
    try:
        print(f"starting {beside + 1} engines" if beside else "starting an engine", flush=True)
        measured, *others = pool.several(1 + beside)
        engine = MeasuredEngine(measured, POINT_SECONDS, others)
        plan = Plan.of(engine, versions(), SPARSE if sparse else THOROUGH, beside)
        subject = plan.subject
        print(f"profile of {subject.model} on {subject.hardware}, {subject.dtype}, TP {subject.tensor_parallel_size}")
        out = out or profiles.folder() / profiles.file_name(subject, checked.settings.drafting.model_runner)
        out.parent.mkdir(parents=True, exist_ok=True)
        journal, without_journal = (out.with_name(out.name + end) for end in (".points", ".unspeculated-points"))
        with _Bar(plan.bursts()) as bar:
            profile = measure(plan, engine, journal, bar.point)
        profiles.write(profile, out)
        print("starting an engine without speculation", flush=True)
        measured, *others = pool.several(1 + beside, speculate=False)
        engine = MeasuredEngine(measured, POINT_SECONDS, others)
        plan = Plan.of(engine, versions(), UNSPECULATED, beside)
        with _Bar(plan.bursts()) as bar:
            profile = with_unspeculated(profile, engine, without_journal, bar.point)
    except (MeasureError, EngineCallError, VerifyError) as error:
        print(f"rhyme profile: error: {error}", file=sys.stderr)
        return 1
    finally:
        pool.close()
    profiles.write(profile, out)
    journal.unlink()
    without_journal.unlink()
    _print_carrying(profile)
    _print_overhead(profile)
    _print_quality(assess(profile))
    if reason := disturbed(profile):
        print(f"measure again when the machine is quiet: {reason}")
    print(f"profile: {out}\nrhyme profile show {out}")
    return 0


class _Bar:
    """A progress bar with the time left."""

    def __init__(self, points: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        )
        self._task = self._progress.add_task("", total=points)
        self._begun = False

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def point(self, words: str) -> None:
        """Mark the previous point as done and begin this one."""
        self._progress.update(self._task, description=words, advance=1 if self._begun else 0)
        self._begun = True


def _show(argv: Sequence[str]) -> int:
    parser = Parser(prog="rhyme profile show", description="A profile as a table, and as a page.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--html", type=Path, metavar="PAGE", help="also draw the curves into this self-contained page")
    options = parser.parse_args(argv)
    try:
        profile = profiles.read(options.file)
    except ProfileError as error:
        return _refuse(str(error))
    quality = assess(profile)
    _print_table(profile)
    _print_carrying(profile)
    _print_overhead(profile)
    _print_quality(quality)
    if options.html:
        try:
            from rhyme_openrlhf.latency.page import draw
        except ModuleNotFoundError:
            return _refuse("--html needs the package plotly: pip install -e '.[server]' in a clone of this package")
        options.html.write_text(draw(profile, quality), encoding="utf-8")
        print(f"page: {options.html}")
    return 0


def _print_table(profile: Profile) -> None:
    from rich.table import Table

    from rhyme_openrlhf.cli.console import console

    subject = profile.subject
    what = f"{subject.model}, {subject.hardware}, {subject.dtype}, TP {subject.tensor_parallel_size}"
    table = Table(title=f"{what} ({profile.origin})")
    for heading in ("samples", "context", "drafts", "ms a step", "+-"):
        table.add_column(heading, justify="right")
    shown = profile.steps[:: max(1, -(-len(profile.steps) // TABLE_ROWS))]
    for point in shown:
        table.add_row(
            str(point.running),
            str(point.context),
            str(point.drafts),
            f"{point.seconds * 1000:.2f}",
            f"{point.spread * 1000:.2f}",
        )
    console().print(table)
    if len(shown) < len(profile.steps):
        print(f"{len(shown)} of {len(profile.steps)} points; all are in the file")


def _print_carrying(profile: Profile) -> None:
    print("; ".join(carrying_words(profile)))


def _print_overhead(profile: Profile) -> None:
    if not profile.unspeculated:
        print("an engine without speculation was not measured: gains are against the engine that speculates")
        return
    overhead = SpeculationOverhead(profile)
    factors = sorted(overhead.factor(point.running, point.context) for point in profile.unspeculated)
    print(
        f"a step without drafts takes {statistics.median(factors):.2f} times as long as in an engine without "
        f"speculation ({factors[0]:.2f} to {factors[-1]:.2f})"
    )


def _print_quality(quality: Quality) -> None:
    error = "not known" if quality.held_out_error is None else f"{quality.held_out_error:.1%}"
    print(
        f"error of prediction on {quality.points} points held out one at a time: {error}; "
        f"spread of identical steps: {quality.noise:.1%}"
    )
