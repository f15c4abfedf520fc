"""Profiles that come along, what is wrong with a file, and decode steps one and thousands at a time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import ProfileError, StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.engine_kinds import StepTimes
from tests.latency import formula
from tests.simulation.kinds import TIMES

SCRIPT = Path(__file__).parents[2] / "scripts" / "derive_profiles.py"


@pytest.mark.parametrize(
    ("size", "running", "milliseconds"), [(2, 1, 15.37), (2, 32, 24.41), (8, 1, 9.64), (8, 128, 30.87)]
)
def test_figure_4_is_met(size: int, running: int, milliseconds: float) -> None:
    profile = engine_kinds.load(["pat-a40"])[size]
    assert profile.origin == "derived"
    assert StepModel(profile).seconds(running, 0, 0) * 1000 == pytest.approx(milliseconds, rel=1e-3)


def test_section_5_4_is_met() -> None:
    found = engine_kinds.load(["pat-a40"])
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
    alone, crowds = engine_kinds.load_all(names)
    assert sorted(alone) == [1] and sorted(crowds) == [2, 3] and engine_kinds.load(names) == alone
    with pytest.raises(ProfileError, match="second profile with 1 engines beside"):
        engine_kinds.load_all([names[1], names[1]])


step = st.tuples(st.integers(1, 100), st.floats(0, 40_000), st.integers(0, 300))


@settings(deadline=None)
@given(step, st.integers(0, 200), st.floats(0.5, 300))
def test_a_total_is_the_sum_of_its_steps(case: tuple[int, float, int], steps: int, growth: float) -> None:
    running, context, drafts = case
    each = [TIMES.seconds(running, context + i * growth, drafts) for i in range(steps)]
    assert TIMES.total(running, context, drafts, steps, growth) == pytest.approx(sum(each), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(step, st.integers(0, 200), st.floats(0.5, 300), st.floats(0, 5))
def test_steps_until_a_time_are_the_fewest(
    case: tuple[int, float, int], most: int, growth: float, seconds: float
) -> None:
    running, context, drafts = case
    found = TIMES.steps_until(running, context, drafts, most, growth, seconds)
    assert found == most or TIMES.total(running, context, drafts, found, growth) >= seconds
    assert found == 0 or TIMES.total(running, context, drafts, found - 1, growth) < seconds


def test_steps_until_a_time_behind_a_sharp_bend_are_found_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's method would creep there, one step at a time."""
    cheap = tuple(
        StepPoint(1, context, 0, seconds, 0.0, 9) for context, seconds in ((1, 1e-6), (9000, 1e-6), (9001, 1.0))
    )
    times = StepTimes(formula.profile(steps=cheap))
    asked = 0
    whole = engine_kinds._Course.total

    def counted(*case: Any) -> float:
        nonlocal asked
        asked += 1
        return whole(*case)

    for seconds in (1e-5, 8e-3, 0.5, 100.0):
        with monkeypatch.context() as patch:
            patch.setattr(engine_kinds._Course, "total", counted)
            found = times.steps_until(1, 0.0, 0, 20_000, 1.0, seconds)
        assert times.total(1, 0.0, 0, found, 1.0) >= seconds > times.total(1, 0.0, 0, found - 1, 1.0)
    assert 4 < asked < 4 * 30


@settings(deadline=None)
@given(step)
def test_between_and_at_the_profiled_contexts_the_model_itself_answers(case: tuple[int, float, int]) -> None:
    running, context, drafts = case
    whole = int(context)
    assert TIMES.seconds(running, whole, drafts) == pytest.approx(TIMES.model.seconds(running, whole, drafts), rel=1e-6)
