"""`rhyme simulate`: what a feature would give on a cluster, without the cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rhyme_openrlhf.cli.console import refuse
from rhyme_openrlhf.drafting_core import CoreMissing
from rhyme_openrlhf.latency.profile import Profile, ProfileError
from rhyme_openrlhf.latency.transfer_model import NotMeasured
from rhyme_openrlhf.settings.options import Parser
from rhyme_openrlhf.simulation import report, study
from rhyme_openrlhf.simulation.engine_kinds import SHIPPED, gaps, load_all
from rhyme_openrlhf.simulation.recommendation import recommend
from rhyme_openrlhf.simulation.recorded_run import read_run, replay
from rhyme_openrlhf.simulation.right_size import HEADINGS, right_size
from rhyme_openrlhf.simulation.settings import Acceptance, Cluster, Features
from rhyme_openrlhf.simulation.study import Variant
from rhyme_openrlhf.simulation.trace import read_trace
from rhyme_openrlhf.simulation.workload import PRESETS, Workload, WorkloadError, drawn

_refuse = partial(refuse, "rhyme simulate")

DESCRIPTION = """\
Simulates training on a cluster: engines with the step times of a profile, responses as long as a workload says, and the
scheduling decisions of this package. Nothing runs on a device; every figure is marked as simulated.

  rhyme simulate --profile pat-a40 --tp 2 --features tp-switch --ablate
      PAT's hardware and lengths: OpenRLHF's asynchronous trainer, then with TP switching
  rhyme profile --out mine.json --actor.model_name_or_path ...
  rhyme simulate --profile mine.json --nodes 16 --features pipeline,two-tier,speculation --ablate --html page.html
      your model as measured on one engine, on 16 nodes, each feature added in turn
  rhyme simulate --profile mine.json --trace lengths.jsonl --features pipeline --sweep rank-groups=4,8,16,32 --jobs 4
      your own lengths (docs/simulator.md has the format), and a setting swept
  rhyme simulate --profile mine.json --from-run runs/mine --advise
      how many rollout engines, and which features, a recorded run should have

Features: sync or async (OpenRLHF's trainers; async if neither is named), pipeline, two-tier, outliers, defer (of
outliers), dispatch, reallocation, tp-switch (by history), tp-switch-max (by longest response), speculation, budget.
Two-tier and outliers go with pipeline only. What rhyme train refuses together can be simulated, and is never among the
settings to use that are printed at the end."""


def _parser() -> argparse.ArgumentParser:
    cluster, features = Cluster(), Features()
    parser = Parser(
        prog="rhyme simulate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="rhyme simulate --profile NAME_OR_FILE [options]",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is simulated")
    what.add_argument(
        "--profile",
        action="append",
        required=True,
        metavar="NAME_OR_FILE",
        help=f"a file of rhyme profile, or of those that come along: {', '.join(SHIPPED)}; again for another "
        "tensor-parallel size (what TP switches go to), or with engines beside (for engines that share cores)",
    )
    source = what.add_mutually_exclusive_group()
    source.add_argument(
        "--workload",
        choices=sorted(PRESETS),
        default="pat-deepscaler",
        help="lengths as a paper prints them (%(default)s)",
    )
    source.add_argument("--trace", type=Path, metavar="FILE", help="lengths of your own, as JSON lines")
    source.add_argument(
        "--from-run",
        type=Path,
        metavar="DIRECTORY",
        help="a real run again: its lengths, engines, trainer's speed, what its drafts gave, how slow its "
        "engines were beside the profile in each step; --features come on top",
    )
    _number(what, "--steps", int, 20, "steps to draw (not with --trace)")
    _number(what, "--prompts", int, 128, "prompts a step")
    _number(what, "--samples", int, 8, "samples a prompt")
    _number(what, "--steps-per-epoch", int, 4, "steps an epoch: prompts come again after them")
    _number(what, "--seed", int, 1, "of the drawn lengths")
    machines = parser.add_argument_group("cluster")
    _number(machines, "--nodes", int, cluster.nodes, "nodes that generate")
    _number(machines, "--devices", int, cluster.devices, "devices of a node")
    _number(machines, "--tp", int, cluster.tensor_parallel, "devices of an engine")
    _number(machines, "--running", int, cluster.running, "samples that an engine runs at once")
    _number(machines, "--step-tokens", int, cluster.step_tokens, "tokens that an engine computes in a step")
    _number(
        machines,
        "--trainer-tokens-per-second",
        float,
        cluster.trainer_tokens_per_second,
        "response tokens trained in a second",
    )
    _number(machines, "--publish-seconds", float, 0.0, "from trained weights to their being on every node")
    _number(machines, "--switch-seconds", float, 0.0, "of a TP switch, beside carrying the samples")
    use = parser.add_argument_group("features")
    use.add_argument("--features", default="", metavar="A,B,...", help="in use, in this order")
    _number(use, "--rank-groups", int, features.rank_groups, "rank groups of the pipeline")
    _number(use, "--alpha", float, features.alpha, "outliers: the last share of a rank group")
    _number(use, "--beta", float, features.beta_floor, "outliers: at least so many times the longest in history")
    _number(use, "--cooldown", int, features.cooldown, "decode steps between reallocations")
    _number(
        use, "--threshold", int, features.threshold, "samples above which an engine gives some away; 0: by throughput"
    )
    _number(use, "--window-max", int, features.window_max, "most draft tokens of a sample")
    _number(use, "--interval", float, features.interval, "seconds between two reports of the engines for reallocation")
    use.add_argument(
        "--acceptance",
        default="0.3:0.65,0.7:0.79,10",
        metavar="C:P,C:P,EPOCHS",
        help="share of steps with a draft, and acceptance of a draft token: in the second epoch, and EPOCHS-1 later. "
        "The default is from RhymeRL's acceptance rates and figure 17 (%(default)s)",
    )
    out = parser.add_argument_group("comparing, and where it goes")
    out.add_argument("--ablate", action="store_true", help="add the features one after another")
    out.add_argument("--sweep", metavar="SETTING=A,B,...", help="each value of one of the numbers above")
    out.add_argument(
        "--advise",
        action="store_true",
        help="with --from-run: how many rollout engines, and which features, this run should have",
    )
    _number(out, "--jobs", int, 1, "processes")
    out.add_argument("--html", type=Path, metavar="PAGE", help="also draw this self-contained page")
    out.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    return parser


def _number(group: argparse._ArgumentGroup, name: str, kind: type, default: float, words: str) -> None:
    group.add_argument(name, type=kind, default=default, metavar="N", help=f"{words} (%(default)s)")


def main(argv: list[str]) -> int:
    """0: simulated; 2: bad input."""
    options = _parser().parse_args(argv)
    try:
        profiles, crowds = load_all(options.profile)
        cluster, base = _asked(options)
        run = read_run(options.from_run, cluster, base) if options.from_run else None
        workload = run.workload if run else _workload(options)
        variants = _variants(options, run.cluster, run.features) if run else _variants(options, cluster, base)
        measured = run.rates if run else ()
        if options.advise and not run:
            raise ValueError("--advise needs a recorded run: --from-run DIRECTORY")
        if options.advise and (options.features or options.sweep or options.ablate or options.html or options.json):
            raise ValueError("--advise chooses features itself and prints one table: use it with --from-run alone")
        if options.html:
            from rhyme_openrlhf.simulation.page import draw
        replayed = replay(run, profiles, crowds) if run else None
        conditions = replayed.conditions if replayed else ()
        if run and options.advise:
            found = right_size(run, profiles, crowds, conditions, options.jobs)
            heading = report.title(workload, profiles, run.cluster.tensor_parallel)
            _print(heading, gaps(profiles), found.rows(), HEADINGS)
            settings = found.settings(_files(options.profile, profiles)).lines()
            print("\n".join([found.sentence, found.method, *(f"assumed: {one}" for one in found.assumed), *settings]))
            return 0
        results = study.simulate(variants, workload, profiles, options.jobs, measured, crowds, conditions)
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        return _refuse("--html needs the package plotly: pip install -e '.[server]' in a clone of this package")
    except (ProfileError, WorkloadError, NotMeasured, CoreMissing, ValueError) as error:
        return _refuse(str(error))
    heading = report.title(workload, profiles, variants[0].cluster.tensor_parallel)
    notes = _notes(profiles, options, variants)
    _print(heading, notes, report.rows(variants, results))
    if replayed:
        print("\n".join(replayed.lines()))
    if options.sweep and all(result == results[0] for result in results):
        setting = options.sweep.partition("=")[0]
        print(f"{setting} changes nothing here: what uses it is not among the features, or never acts")
    best = max(range(len(results)), key=lambda place: results[place].samples_per_second)
    print(f"most samples a second (simulated): {variants[best].name}")
    advice = recommend(variants, results, _files(options.profile, profiles))
    print("\n".join(advice.lines()))
    if options.json:
        content = report.as_json(heading, notes, variants, results, advice)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.html:
        options.html.write_text(draw(heading, [*notes, *advice.lines()], variants, results), encoding="utf-8")
        print(f"page: {options.html}")
    return 0


def _workload(options: argparse.Namespace) -> Workload:
    if options.trace:
        return read_trace(options.trace)
    for name in ("steps", "prompts", "samples", "steps_per_epoch", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {options.seed}")
    shape = PRESETS[options.workload]
    return drawn(shape, options.steps, options.prompts, options.samples, options.steps_per_epoch, options.seed)


def _files(names: Sequence[str], profiles: dict[int, Profile]) -> dict[int, str]:
    """Return the names of the user's own profiles: shipped profiles describe no engine of the user's."""
    own = {size: name for name in names if name not in SHIPPED for size in load_all([name])[0]}
    return {size: own.get(size, f"PROFILE_OF_TP_{size}") for size in profiles}


def _asked(options: argparse.Namespace) -> tuple[Cluster, Features]:
    """Return the cluster and the feature settings that the options describe."""
    cluster = Cluster(
        options.nodes,
        options.devices,
        options.tp,
        options.running,
        options.step_tokens,
        options.trainer_tokens_per_second,
        options.publish_seconds,
        options.switch_seconds,
    )
    first, last, epochs = _acceptance(options.acceptance)
    base = Features(
        rank_groups=options.rank_groups,
        alpha=options.alpha,
        beta_floor=options.beta,
        cooldown=options.cooldown,
        threshold=options.threshold,
        window_max=options.window_max,
        first_acceptance=first,
        last_acceptance=last,
        acceptance_epochs=epochs,
        interval=options.interval,
    )
    return cluster, base


def _variants(options: argparse.Namespace, cluster: Cluster, base: Features) -> list[Variant]:
    names = [name for name in options.features.split(",") if name]
    if options.ablate and options.sweep:
        raise ValueError("--ablate and --sweep are two tables: ask for them one after the other")
    if options.ablate:
        return study.ablation(names, cluster, base)
    features = study.with_features(names, base)
    if options.sweep:
        setting, _, values = options.sweep.partition("=")
        if not values:
            raise ValueError(f"--sweep takes SETTING=A,B,..., as rank-groups=4,8,16, got {options.sweep!r}")
        return study.sweep(setting, values.split(","), cluster, features)
    asked = Variant(", ".join(names) or features.trainer, cluster, features)
    if not options.from_run:
        return [asked]
    as_it_was = Variant("as it was", cluster, base)
    return [as_it_was, asked] if names else [as_it_was]


def _acceptance(text: str) -> tuple[Acceptance, Acceptance, int]:
    try:
        first, last, epochs = text.split(",")
        pairs = [[float(value) for value in pair.split(":")] for pair in (first, last)]
        return Acceptance(*pairs[0]), Acceptance(*pairs[1]), int(epochs)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--acceptance takes C:P,C:P,EPOCHS with shares from 0 to 1, got {text!r}") from error


def _notes(profiles: dict[int, Profile], options: argparse.Namespace, variants: Sequence[Variant]) -> list[str]:
    notes = gaps(profiles)
    if any(name in options.features.split(",") for name in ("speculation", "budget")):
        notes.append(f"acceptance is a parameter, not measured: --acceptance {options.acceptance}")
    return [*notes, *dict.fromkeys(filter(None, (variant.no_effect for variant in variants)))]


def _print(
    heading: str,
    notes: Sequence[str],
    rows: Sequence[Sequence[str]],
    headings: Sequence[str] = report.HEADINGS,
) -> None:
    from rich.table import Table

    from rhyme_openrlhf.cli.console import console

    table = Table()
    for place, name in enumerate(headings):
        table.add_column(name, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*row)
    for line in (heading, *notes):
        print(line)
    console().print(table)
