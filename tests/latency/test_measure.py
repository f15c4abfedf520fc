"""Walking the grid: on an engine whose times follow a formula, interrupted and gone on with."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rhyme_openrlhf.latency import measure as measuring
from rhyme_openrlhf.latency.grid import Limits, PrefillShape, StepShape
from rhyme_openrlhf.latency.measure import (
    BESIDE_STEPS,
    QUICKLY,
    THOROUGH,
    WARM_UP,
    MeasureError,
    Plan,
    measure,
    with_unspeculated,
)
from rhyme_openrlhf.latency.predictor import SpeculationOverhead
from rhyme_openrlhf.latency.profile import Subject
from rhyme_openrlhf.latency.quality import assess
from rhyme_openrlhf.latency.step_model import StepModel
from tests.latency import formula

LIMITS = Limits(running=8, length=600, kv_cache_tokens=5000, step_tokens=512, drafts_each=32)


def plan(**changes: object) -> Plan:
    values: dict[str, object] = {
        "subject": formula.SUBJECT,
        "limits": LIMITS,
        "versions": {"vllm": "0.29.0"},
        "padded_rows": formula.PADDED,
        "kv_bytes_per_token": 2048,
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


class FormulaEngine:
    """Times by formula; `dies_after`: points until it is killed."""

    def __init__(self, dies_after: int = 10_000, steps: int = THOROUGH.steps) -> None:
        self.asked: list[object] = []
        self._dies_after = dies_after
        self._steps = steps

    def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]:
        self._ask(shape)
        drafts = shape.running * shape.drafts_each
        contexts = [shape.running * (shape.context_each + step) for step in range(min(steps, self._steps))]
        return [(shape.running, t, drafts, formula.formula(shape.running, t, drafts)) for t in contexts]

    def prefill(self, shape: PrefillShape) -> float:
        self._ask(shape)
        return shape.sequences * shape.length * 1e-5

    def kv_bandwidth(self) -> tuple[float, str]:
        return 2e9, ""

    def weight_load(self) -> tuple[float, str]:
        return 0.05, ""

    def _ask(self, shape: object) -> None:
        if len(self.asked) == self._dies_after:
            raise MeasureError("killed")
        self.asked.append(shape)


def test_the_profile_answers_as_the_engine_does(tmp_path: Path) -> None:
    profile = measure(plan(), FormulaEngine(), tmp_path / "points", lambda words: None)
    model = StepModel(profile)
    for shape in (StepShape(3, 100, 0), StepShape(5, 200, 0), StepShape(4, 100, 4)):
        context, drafts = shape.running * shape.context_each, shape.running * shape.drafts_each
        wanted = formula.formula(shape.running, context, drafts)
        assert model.seconds(shape.running, context, drafts) == pytest.approx(wanted, rel=0.02)
    quality = assess(profile)
    assert quality.points > 10
    assert quality.held_out_error is not None and quality.held_out_error < 0.01


def test_an_interrupted_walk_goes_on_where_it_was(tmp_path: Path) -> None:
    journal = tmp_path / "points"
    first = FormulaEngine(dies_after=10)
    with pytest.raises(MeasureError, match="killed"):
        measure(plan(), first, journal, lambda words: None)
    second, whole = FormulaEngine(), FormulaEngine()
    resumed = measure(plan(), second, journal, lambda words: None)
    assert resumed == measure(plan(), whole, tmp_path / "others", lambda words: None)
    # The first nine points (the tenth question was the warm-up) are not asked for again.
    assert second.asked == [WARM_UP, *whole.asked[10:]]


def test_a_torn_last_line_is_measured_again(tmp_path: Path) -> None:
    journal = tmp_path / "points"
    measure(plan(), FormulaEngine(), journal, lambda words: None)
    journal.write_text(journal.read_text()[:-7])
    again = FormulaEngine()
    measure(plan(), again, journal, lambda words: None)
    assert again.asked[0] == WARM_UP and set(again.asked[1:]) == {plan().prefills()[-1]}


@pytest.mark.parametrize("changes", [{"versions": {"vllm": "0.30.0"}}, {"limits": Limits(8, 600, 4000, 512, 32)}])
def test_a_journal_of_something_else_is_not_used(tmp_path: Path, changes: dict[str, object]) -> None:
    journal = tmp_path / "points"
    measure(plan(), FormulaEngine(), journal, lambda words: None)
    again = FormulaEngine()
    measure(plan(**changes), again, journal, lambda words: None)
    assert len(again.asked) > len(plan(**changes).steps())
    assert json.loads(journal.read_text().splitlines()[0])["subject"]["hardware"] == "test"


def test_a_point_that_does_not_come_about_is_left_out_and_named(tmp_path: Path) -> None:
    class Cramped(FormulaEngine):
        def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]:
            found = super().decode_steps(shape, steps)
            return [] if shape == StepShape(8, 64, 15) else found

    profile = measure(plan(), Cramped(), tmp_path / "points", lambda words: None)
    assert len(profile.steps) == len(plan().steps()) - 1
    assert any("8 samples x 64 tokens, 15 drafts each" in note for note in profile.notes)
    # And is not asked for again.
    again = FormulaEngine()
    assert measure(plan(), again, tmp_path / "points", lambda words: None) == profile and not again.asked


def test_an_engine_without_one_whole_step_gives_no_profile(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="is the KV cache large enough"):
        measure(plan(), FormulaEngine(steps=1), tmp_path / "points", lambda words: None)


def test_carrying_is_measured_and_what_cannot_be_is_named() -> None:
    class Odd(FormulaEngine):
        def kv_bandwidth(self) -> tuple[float, str]:
            return 0.0, "KV blocks of this shape cannot be moved"

    profile = measure(plan(), FormulaEngine())
    assert (profile.kv_bytes_per_second, profile.weight_load_seconds) == (2e9, 0.05)
    odd = measure(plan(), Odd())
    assert (odd.kv_bytes_per_second, odd.weight_load_seconds) == (0.0, 0.05)
    assert "KV transfer was not measured: KV blocks of this shape cannot be moved" in odd.notes
    quick = measure(plan(walk=QUICKLY), FormulaEngine())
    assert quick.kv_bytes_per_second == quick.weight_load_seconds == 0
    assert "KV transfer and weight load were not measured" in quick.notes


def test_every_point_is_announced(tmp_path: Path) -> None:
    told: list[str] = []
    measure(plan(), FormulaEngine(), tmp_path / "points", told.append)
    assert len(told) == plan().bursts() == 1 + 3 * (len(plan().steps()) + len(plan().prefills())) + 2


def test_a_quick_walk_ends_in_time_and_has_seen_every_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = plan(walk=QUICKLY)
    whole = measure(quick, FormulaEngine())
    assert StepModel(whole).seconds(3, 300, 9) == pytest.approx(formula.formula(3, 300, 9), rel=0.3)
    assert {point.sequences for point in whole.prefills} == {1}
    # A second a burst, and time for less than half of the first round.
    clock = itertools.count()
    monkeypatch.setattr(measuring.time, "monotonic", lambda: float(next(clock)))
    shapes = quick.steps()
    limit_s = 0.4 * len(shapes)
    hurried = measure(plan(walk=dataclasses.replace(QUICKLY, limit_s=limit_s)), FormulaEngine())
    assert len(hurried.steps) < len(shapes) / 2
    assert {point.running for point in hurried.steps} == {shape.running for shape in shapes}
    with pytest.raises(MeasureError):
        measure(plan(walk=dataclasses.replace(QUICKLY, limit_s=0.0)), FormulaEngine())


def test_how_many_engines_were_beside_is_in_the_profile_and_in_the_journal(tmp_path: Path) -> None:
    journal = tmp_path / "p.points"
    with pytest.raises(MeasureError, match="killed"):
        measure(plan(), FormulaEngine(dies_after=20), journal)
    anew, beside = FormulaEngine(), FormulaEngine()
    profile = measure(plan(beside=2), beside, journal)
    assert measure(plan(), FormulaEngine()).beside == 0 and profile.beside == 2
    # What was measured alone before is no part of it.
    assert measure(plan(beside=2), anew) == profile and len(beside.asked) == len(anew.asked)


def test_with_engines_beside_there_is_room_for_the_steps_that_these_make() -> None:
    engine = FormulaEngine()
    measure(plan(beside=1), engine)
    shapes = [shape for shape in engine.asked if isinstance(shape, StepShape)]
    steps = BESIDE_STEPS * THOROUGH.steps
    assert shapes[0] == WARM_UP
    assert all(s.context_each + (steps + 2) * (1 + s.drafts_each) < LIMITS.length for s in shapes[1:])
    assert {s.running for s in shapes} == {1, 2, 4, 8}


class Unspeculated(FormulaEngine):
    """An engine that does not speculate, a quarter faster."""

    def __init__(self, drafts_each: int = 0) -> None:
        super().__init__()
        self._limits = dataclasses.replace(LIMITS, length=2000, drafts_each=drafts_each)

    def subject(self) -> Subject:
        return formula.SUBJECT

    def limits(self) -> Limits:
        return self._limits

    def padded_rows(self) -> tuple[int, ...]:
        return ()

    def kv_bytes_per_token(self) -> int:
        return 2048

    def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]:
        found = super().decode_steps(shape, steps)
        return [(running, context, 0, 0.8 * seconds) for running, context, _, seconds in found]


def test_an_engine_without_speculation_adds_its_steps(tmp_path: Path) -> None:
    profile, said = measure(plan(), FormulaEngine()), []
    whole = with_unspeculated(profile, Unspeculated(), tmp_path / "points", said.append)
    assert dataclasses.replace(whole, unspeculated=()) == profile
    assert {point.running for point in whole.unspeculated} == {1, 4, 8}
    assert all(point.drafts == 0 and point.steps == 18 for point in whole.unspeculated)
    assert SpeculationOverhead(whole).factor(4, 1000) == pytest.approx(1 / 0.8, rel=0.01)
    assert all(words.startswith("without speculation: ") for words in said)
    with pytest.raises(MeasureError, match="is not the one of the profile without speculation"):
        with_unspeculated(profile, Unspeculated(drafts_each=4))
