"""`rhyme train` accepts what `rhyme simulate` recommends: checked with its own parser and preflight checks."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

pytest.importorskip("openrlhf")

from transformers import AutoConfig

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import preflight, preflight_layouts, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import model_name
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings
from rhyme_openrlhf.simulation.recommendation import flags, refused
from rhyme_openrlhf.simulation.settings import Cluster, Features, Switching, Trainer
from tests.latency import formula

CLUSTER = Cluster(devices=4)
FILES = {1: "one.json", 2: "two.json"}
TRAINERS: tuple[Trainer, ...] = ("sync", "async", "pipeline")
SWITCHES: tuple[Switching, ...] = ("off", "maximum", "history")


def combinations() -> list[Features]:
    found = []
    for trainer, switching, reallocation, more in itertools.product(TRAINERS, SWITCHES, (False, True), (False, True)):
        piped = more and trainer == "pipeline"
        found.append(
            Features(
                trainer,
                rank_groups=2 if piped else 0,
                two_tier=piped,
                outliers=piped,
                defer=piped,
                dispatch=more,
                reallocation=reallocation,
                switching=switching,
                speculation="budget" if more else "off",
            )
        )
    return found


def test_every_combination_is_taken_or_known_to_be_refused(tmp_path: Path) -> None:
    for features in combinations():
        args = upstream.parse([*arguments(str(tmp_path)), *flags(CLUSTER, features, FILES)])
        RhymeSettings.from_namespace(args)
        rules = preflight._NOT_PIPELINED if args.histopipe.enable else ()
        reasons = [reason for asked, reason in rules if asked(args)]
        rules = preflight_layouts._NOT_SWITCHED if args.tp_switch.enable else ()
        reasons += [reason for asked, reason in rules if asked(args)]
        assert bool(reasons) == bool(refused(features)), (features, reasons)


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize(
    "features",
    [
        Features("pipeline", two_tier=True, outliers=True, defer=True, speculation="budget"),
        Features("sync", dispatch=True, reallocation=True, threshold=4, speculation="window"),
        Features("async", reallocation=True, speculation="measured"),
    ],
    ids=["pipeline", "sync", "async"],
)
def test_a_recommended_run_passes_all_checks(features: Features, tmp_path: Path) -> None:
    files = {1: str(tmp_path / "one.json")}
    model = model_name(AutoConfig.from_pretrained(embedded.MODEL), DraftingSettings())
    profiles.write(formula.profile(subject=dataclasses.replace(formula.SUBJECT, model=model)), Path(files[1]))
    preflight.check(upstream.parse([*arguments(str(tmp_path)), *flags(CLUSTER, features, files)]))
