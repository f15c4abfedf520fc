"""The choice of points to measure, and the order in which they are visited."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency import measure as measuring
from rhyme_openrlhf.latency.measure import (
    BESIDE_STEPS,
    QUICKLY,
    THOROUGH,
    WARM_UP,
    Limits,
    MeasureError,
    Plan,
    PrefillShape,
    StepShape,
    measure,
    prefill_shapes,
    step_shapes,
    undelayed,
    with_unspeculated,
)
from rhyme_openrlhf.latency.predictor import SpeculationOverhead
from rhyme_openrlhf.latency.profile import StepPoint, Subject
from rhyme_openrlhf.latency.step_model import StepModel, assess
from tests.latency import formula

limits = st.builds(
    Limits,
    running=st.integers(1, 1024),
    length=st.integers(256, 131_072),
    kv_cache_tokens=st.integers(1000, 1 << 21),
    step_tokens=st.integers(512, 16_384),
    drafts_each=st.integers(0, 128),
    verified_rows=st.none() | st.integers(2, 2048),
)


@given(limits, st.integers(5, 60))
def test_every_point_fits_to_its_last_step(room: Limits, steps: int) -> None:
    shapes = step_shapes(room, steps)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        longest = shape.context_each + steps * (1 + shape.drafts_each)
        assert longest < room.length
        assert shape.running * longest < room.kv_cache_tokens
        assert shape.running * (1 + shape.drafts_each) < room.step_tokens
        assert shape.running <= room.running
        assert shape.drafts_each <= room.drafts_each
        rows = shape.running * (1 + shape.drafts_each)
        assert not shape.drafts_each or room.verified_rows is None or rows <= room.verified_rows


@given(limits)
def test_every_prefill_fits(room: Limits) -> None:
    for shape in prefill_shapes(room):
        assert shape.length < room.length
        assert shape.sequences * shape.length < room.kv_cache_tokens


def test_what_fills_the_kv_cache_exactly_is_measured() -> None:
    """One token is generated beside each prefill."""
    (shape,) = [shape for shape in prefill_shapes(Limits(1, 4096, 129, 2048, 0)) if shape.length == 128]
    assert shape.sequences == 1
    assert all(shape.length < 128 for shape in prefill_shapes(Limits(1, 4096, 128, 2048, 0)))


def test_each_number_of_samples_has_a_plain_step_and_short_contexts_are_denser() -> None:
    shapes = step_shapes(Limits(64, 8192, 100_000, 2048, 32), 12)
    for running in (1, 2, 4, 8, 16, 32, 64):
        plain = [shape.context_each for shape in shapes if shape.running == running and not shape.drafts_each]
        assert plain and sum(context < 512 for context in plain) >= min(3, len(plain))


def test_what_a_drafter_proposes_for_every_sample_is_measured() -> None:
    for tokens, measured in ((4, {0, 1, 4}), (8, {0, 1, 3, 8}), (12, {0, 1, 3, 7, 12}), (32, {0, 1, 3, 7, 15, 31})):
        assert {shape.drafts_each for shape in step_shapes(Limits(8, 8192, 100_000, 2048, tokens), 12)} == measured


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


def test_points_that_other_work_delayed_are_left_out() -> None:
    points = [
        StepPoint(running, context, drafts, seconds, 0.0, 8)
        for running, context, drafts, seconds in (
            (16, 4143, 112, 0.0129), (16, 4133, 240, 0.2975), (64, 16705, 0, 0.1449), (64, 16759, 64, 0.0221),
            (64, 16762, 192, 0.0272), (64, 16762, 448, 0.0383), (128, 34018, 960, 0.0243),
        )
    ]  # fmt: skip
    assert undelayed(points) == [points[0], *points[3:]]
