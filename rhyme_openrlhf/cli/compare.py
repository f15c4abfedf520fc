"""`rhyme compare`: the same run without and with drafts, one after the other, and which one is faster.

Both runs are ordinary commands in processes of their own. Their records are compared (telemetry/two_runs.py), so two
runs that are there already can be compared, too.

Invariant: nothing is started where the comparison could not be made: the directory is new, and a command follows `--`.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rhyme_openrlhf.cli.console import aligned, refuse
from rhyme_openrlhf.settings.options import Parser
from rhyme_openrlhf.telemetry.event_json import EventError
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.metrics import WARM_UP
from rhyme_openrlhf.telemetry.run_directory import RunDirectory
from rhyme_openrlhf.telemetry.two_runs import FEWEST, Gain, Step, common, rollout_gain, step_gain, steps_of

COMMAND = "rhyme compare"
STARTED = ("train", "demo")
WITHOUT, WITH = "without", "with"
EXAMPLES = """\
  rhyme compare ab -- rhyme train OPTIONS            both runs, below the new directory ab
  rhyme compare ab -- rhyme demo --train.num_episodes 3
  rhyme compare ab --first "--no-histospec.enable --dispatch.by_history" -- rhyme train OPTIONS
  rhyme compare runs/one runs/two                    two runs that are there; the first one is the base
"""


class CompareError(Exception):
    """A comparison that cannot be made; the message says what is missing."""


def main(argv: Sequence[str]) -> int:
    """Start both runs if a command is given, and print the comparison; 2 where there is nothing to compare."""
    own, command = _split(list(argv))
    parser = Parser(
        prog=COMMAND,
        description="The same run without drafts from history and with them, one after the other, and which is faster.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a new directory, or two runs")
    parser.add_argument(
        "--first",
        default="--no-histospec.enable",
        metavar="OPTIONS",
        help="what the first run has more than the second one (default: %(default)s)",
    )
    chosen = parser.parse_args(own)
    try:
        if command:
            if len(chosen.directories) != 1:
                raise CompareError("give one new directory for both runs")
            code = _run_both(chosen.directories[0], shlex.split(chosen.first), command)
            if code:
                return code
            directories = [chosen.directories[0] / name for name in (WITHOUT, WITH)]
        elif len(chosen.directories) == 2:
            directories = chosen.directories
        else:
            raise CompareError("give a directory and a command (-- rhyme train ...), or the directories of two runs")
        first, second = map(steps, directories)
        print(report(first, second, [path.name for path in directories]))
    except CompareError as error:
        return refuse(COMMAND, error)
    return 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the own arguments, and the command behind `--`."""
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :] or ["--"]


def _run_both(directory: Path, first: list[str], command: list[str]) -> int:
    """Return 0 when both runs have ended well, otherwise the exit code of the one that did not."""
    if command[:1] != ["rhyme"] or command[1:2] not in ([name] for name in STARTED):
        raise CompareError("behind -- comes `rhyme train` or `rhyme demo` with its options")
    if directory.exists():
        raise CompareError(f"{directory} exists: name a new directory for the two runs")
    for name, more in ((WITHOUT, first), (WITH, [])):
        # Checkpoints lie beside the runs: a run directory must be empty.
        run, saved = (directory / name).absolute(), (directory / "saved" / name).absolute()
        # What an earlier run knows would make the second one faster than it is by itself; options of the command win.
        options = ["--history.earlier", "none", *command[2:], *more, "--run.dir", str(run)]
        options += ["--ckpt.path", str(saved / "resume"), "--ckpt.output_dir", str(saved / "model")]
        print(f"{COMMAND}: the run {name!r}{' with ' if more else ', as given'}{' '.join(more)}", flush=True)
        started = [sys.executable, "-m", "rhyme_openrlhf.cli.main", command[1], *options]
        code = subprocess.run(started, check=False).returncode
        if code:
            print(f"{COMMAND}: the run {name!r} in {run} ended with exit code {code}", file=sys.stderr)
            return code
    return 0


def steps(path: Path) -> dict[int, Step]:
    """Return the finished steps of a run. Raises CompareError."""
    try:
        return steps_of(read_events(RunDirectory(path).events))
    except (OSError, EventError) as error:
        raise CompareError(f"{path} has no record of a run: {error}") from error


def report(first: dict[int, Step], second: dict[int, Step], names: Sequence[str]) -> str:
    """Return the table by epoch and the verdict. Raises CompareError where no steps are common."""
    pairs = common(first, second)
    if not pairs:
        raise CompareError(
            f"the runs have no steps in common after the first {WARM_UP}: let both train {WARM_UP + FEWEST} or more"
        )
    rows = [("epoch", "steps", *(f"{name}: rollout tokens/s" for name in names), "rollout", "whole steps", "reward")]
    for epoch in sorted({one.epoch for one, _ in pairs}):
        rows.append(_row(str(epoch), [pair for pair in pairs if pair[0].epoch == epoch]))
    rows.append(_row("all", pairs))
    return f"{aligned(rows)}\n\n{verdict(rollout_gain(pairs), step_gain(pairs), names)}"


def _row(name: str, pairs: list[tuple[Step, Step]]) -> tuple[str, ...]:
    speeds = [f"{statistics.median(run.rollout_speed for run in runs):,.0f}" for runs in zip(*pairs, strict=True)]
    rewards = [statistics.fmean(known) if (known := _rewards(runs)) else None for runs in zip(*pairs, strict=True)]
    reward = ", ".join("-" if one is None else f"{one:.3g}" for one in rewards)
    return name, str(len(pairs)), *speeds, _shown(pairs, rollout_gain), _shown(pairs, step_gain), reward


def _rewards(runs: Sequence[Step]) -> list[float]:
    return [run.reward for run in runs if run.reward is not None]


def _shown(pairs: list[tuple[Step, Step]], of: Callable[[list[tuple[Step, Step]]], Gain | None]) -> str:
    found = of(pairs)
    return "-" if found is None else f"{found.ratio:.2f}x ({found.low:.2f} to {found.high:.2f})"


def verdict(rollout: Gain | None, whole: Gain | None, names: Sequence[str]) -> str:
    """Return the comparison in one sentence; the later run of the two is the one that is said to be faster."""
    if rollout is None or whole is None:
        return f"Too few steps to say more: at least {WARM_UP + FEWEST} of both runs."
    said = [f"{what} {_words(one)}" for what, one in (("Rollouts", rollout), ("whole steps", whole))]
    return f"{names[1]} against {names[0]}: {said[0]}, {said[1]}, over {rollout.steps} steps."


def _words(found: Gain) -> str:
    between = f"{found.low:.2f} to {found.high:.2f}"
    if not found.differs:
        return f"show no difference ({between} times as fast)"
    if not found.is_exact:
        return f"are {'faster' if found.low > 1 else 'slower'} ({between} times as fast)"
    return f"are {found.ratio:.2f} times as fast ({between})"
