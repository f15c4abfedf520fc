"""The profiles that come along: as their script derives them, with the paper's printed step times."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import ProfileError
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.simulation import shipped
from tests.latency import formula

SCRIPT = Path(__file__).parents[2] / "scripts" / "derive_profiles.py"


@pytest.mark.parametrize(
    ("size", "running", "milliseconds"), [(2, 1, 15.37), (2, 32, 24.41), (8, 1, 9.64), (8, 128, 30.87)]
)
def test_figure_4_is_met(size: int, running: int, milliseconds: float) -> None:
    profile = shipped.load(["pat-a40"])[size]
    assert profile.origin == "derived"
    assert StepModel(profile).seconds(running, 0, 0) * 1000 == pytest.approx(milliseconds, rel=1e-3)


def test_section_5_4_is_met() -> None:
    found = shipped.load(["pat-a40"])
    assert TransferModel(found[2]).kv_transfer_seconds([12288] * 9) == pytest.approx(2.36, rel=1e-3)
    assert TransferModel(found[8]).prefill_seconds([12288] * 9) == pytest.approx(19.01, rel=1e-3)


def test_the_files_are_what_the_script_derives() -> None:
    spec = importlib.util.spec_from_file_location("derive_profiles", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for size in script.STEP_SECONDS:
        assert profiles.read(script.FOLDER / f"pat-a40-tp{size}.json") == script.derive(size)


def test_profiles_with_engines_beside_are_told_apart(tmp_path: Path) -> None:
    names = []
    for beside in (0, 1, 2):
        names.append(str(tmp_path / f"{beside}.json"))
        profiles.write(formula.profile(beside=beside), Path(names[-1]))
    alone, crowds = shipped.load_all(names)
    assert sorted(alone) == [1] and sorted(crowds) == [2, 3] and shipped.load(names) == alone
    with pytest.raises(ProfileError, match="second profile with 1 engines beside"):
        shipped.load_all([names[1], names[1]])
