"""`rhyme doctor`: what is installed, what is missing, the command that mends it, and what will run here.

Invariants: works where only our own light dependencies are installed; changes nothing; exit code 0 exactly when the
embedded demo or training on GPUs will run.
"""

from __future__ import annotations

import dataclasses
import json

from rhyme_openrlhf import __version__
from rhyme_openrlhf.cli import upstream
from rhyme_openrlhf.cli.console import print_table, refuse
from rhyme_openrlhf.cli.doctor_checks import COLOURS, HEADER, Check, Run, Verdict, run_checks, verdicts
from rhyme_openrlhf.cli.doctor_facts import gather
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.run import model_shape, resources
from rhyme_openrlhf.run.resources import MemoryPlan
from rhyme_openrlhf.settings.options import Parser


def main(argv: list[str]) -> int:
    """Print the report; 0 when the demo or GPU training will run, else 1; 2 for options that rhyme train refuses.

    With the options of a run on a machine with GPUs: 0 when that run will.
    """
    parser = Parser(
        prog="rhyme doctor",
        usage="rhyme doctor [--json] [--cluster] [options of rhyme train]",
        description="Check this machine and say what will run on it. With options of rhyme train, also whether that "
        "run fits: its GPUs, their memory, /dev/shm.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="ask every node of the Ray cluster in RAY_ADDRESS instead: versions, /dev/shm, clocks, networks, and with "
        "options of rhyme train the paths and the control plane of that run",
    )
    options, train_argv = parser.parse_known_args(argv)
    if not any("." in word.partition("=")[0] for word in train_argv if word.startswith("--")):
        # No run is described without an option of a group: what is unknown is a mistake in an option of ours.
        parser.parse_args(argv)
    if options.cluster:
        from rhyme_openrlhf.cli import doctor_cluster

        return doctor_cluster.main(train_argv, options.json)
    try:
        run = _run(train_argv) if train_argv else None
    except upstream.ArgumentsError as error:
        return refuse("rhyme doctor", error)
    facts = gather()
    checks = run_checks(facts, run)
    uses = verdicts(facts, checks)
    plan = run.plan(nvidia.smallest_memory(facts.nvidia)) if run else None
    if options.json:
        print(_as_json(checks, uses, plan, gpu=facts.has_gpu))
    else:
        show(checks, uses)
    if plan is not None and not options.json:
        print(f"\n{resources.as_text(plan)}")
    wanted = ("training on GPUs",) if run and facts.has_gpu else ("embedded demo", "training on GPUs")
    return 0 if any(use.runs for use in uses if use.use in wanted) else 1


def _run(argv: list[str]) -> Run:
    """Return the run that these options of rhyme train describe. Raises ArgumentsError."""
    args = upstream.parse(argv)
    model = model_shape.named_by_command(args.actor.model_name_or_path)
    return Run(args, model_shape.shapes_of(args), model_shape.is_hybrid(model_shape.read_config(model)))


def show(checks: list[Check], uses: list[Verdict]) -> None:
    """Print both tables."""
    print_table([dataclasses.astuple(check) for check in checks], COLOURS, HEADER)
    print("\nWhat will run here:")
    print_table([(use.use, "yes" if use.runs else "no", use.reason) for use in uses], COLOURS)


def _as_json(checks: list[Check], uses: list[Verdict], plan: MemoryPlan | None, *, gpu: bool) -> str:
    report = {
        "version": __version__,
        "gpu": gpu,
        "checks": [dataclasses.asdict(check) for check in checks],
        "runs": [dataclasses.asdict(use) for use in uses],
    }
    if plan is not None:
        report["memory"] = dataclasses.asdict(plan)
    return json.dumps(report, indent=2)
