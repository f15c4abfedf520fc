"""The profile that a run plans its drafts by, and the note about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine_errors import EngineCallError
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import Limits, PrefillShape, StepShape
from rhyme_openrlhf.latency.profile import Profile, ProfileError, StepPoint, Subject
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.latency import EmulateSettings, LatencySettings
from rhyme_openrlhf.settings.run import RunSettings
from rhyme_openrlhf.telemetry.events import Event, Measuring, Note
from rhyme_openrlhf.training import engines as engine_profiles
from tests.latency import formula

OTHER = dataclasses.replace(formula.SUBJECT, hardware="another machine")


class FormulaEngine:
    """An engine whose steps follow the formula, and what it was told."""

    def __init__(self, kept: str = "", broken: bool = False) -> None:
        self.kept, self.installed, self._broken = kept, "", broken
        self.awake = False
        self.without: tuple[tuple[StepPoint, ...], str] = ((), "")

    def subject(self) -> Subject:
        return formula.SUBJECT

    def limits(self) -> Limits:
        return Limits(running=64, length=600, kv_cache_tokens=50_000, step_tokens=2048, drafts_each=32)

    def kv_bytes_per_token(self) -> int:
        return 2048

    def padded_rows(self) -> tuple[int, ...]:
        return formula.PADDED

    def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]:
        assert self.awake, "an engine that sleeps cannot decode"
        if self._broken:
            raise EngineCallError("waited 60 s for an engine: decode steps")
        context, drafts = shape.running * shape.context_each, shape.running * shape.drafts_each
        return [(shape.running, context, drafts, formula.formula(shape.running, context, drafts))] * steps

    def prefill(self, shape: PrefillShape) -> float:
        return shape.sequences * shape.length * 1e-5

    def unspeculated(self) -> tuple[tuple[StepPoint, ...], str]:
        return self.without

    def kept_profile(self) -> tuple[str, str]:
        return "kept.json", self.kept

    def keep_profile(self, text: str) -> None:
        self.kept = text

    def install_profile(self, text: str) -> str:
        self.installed = text
        return ""


def install(monkeypatch: pytest.MonkeyPatch, engines: list[FormulaEngine], **settings: Any) -> list[str]:
    """What the run says while its engines get their profile."""
    found = recorded(monkeypatch, engines, **settings)
    return [f"{event.level}: {event.text}" for event in found if isinstance(event, Note)]


def recorded(monkeypatch: pytest.MonkeyPatch, engines: list[FormulaEngine], **settings: Any) -> list[Event]:
    """Return the events that a run records while its engines get their profile."""
    found: list[Event] = []
    services = SimpleNamespace(
        layouts=None,
        settings=RhymeSettings(**settings),
        record=lambda event, source: found.append(event),
    )
    monkeypatch.setattr(engine_profiles, "MeasuredEngine", lambda actor, limit_s: actor)

    @contextmanager
    def awake() -> Iterator[None]:
        for engine in engines:
            engine.awake = True
        try:
            yield
        finally:
            for engine in engines:
                engine.awake = False

    engine_profiles.install_profiles(engines, services, awake)  # type: ignore[arg-type]
    assert not any(engine.awake for engine in engines)
    return found


def written(path: Path, profile: Profile) -> str:
    profiles.write(profile, path)
    return str(path)


def test_without_a_profile_one_is_measured_kept_and_given_to_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [FormulaEngine(), FormulaEngine()]
    (said,) = install(monkeypatch, engines)
    assert said.startswith("info: drafts follow step times that were measured now") and "kept.json" in said
    measured = profiles.parse(engines[0].kept, "kept")
    assert measured.subject == formula.SUBJECT and len(measured.steps) > 20
    assert [engine.installed for engine in engines] == [engines[0].kept] * 2
    # The next run finds it.
    again = FormulaEngine(kept=engines[0].kept)
    assert install(monkeypatch, [again]) == ["info: drafts follow the step times of kept.json"]
    assert again.installed == engines[0].kept


def test_step_times_of_a_busy_machine_are_used_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(FormulaEngine):
        """Every third burst takes twice as long."""

        calls = 0

        def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]:
            self.calls += 1
            slower = 1 + (self.calls % 3 == 0)
            return [(*step[:3], step[3] * slower) for step in super().decode_steps(shape, steps)]

    engine = Busy()
    (said,) = install(monkeypatch, [engine])
    assert said.startswith("warning: drafts follow step times that were measured now") and "not kept" in said
    assert "times of identical steps spread by" in said and engine.installed and not engine.kept
    # One that `rhyme profile` has kept is named.
    kept = FormulaEngine(kept=engine.installed)
    warned, used = install(monkeypatch, [kept])
    assert "kept.json should be measured again" in warned and "of kept.json" in used


def test_measuring_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FormulaEngine()
    measured = [event for event in recorded(monkeypatch, [engine]) if isinstance(event, Measuring)]
    (total,) = {event.total for event in measured}
    assert [event.done for event in measured] == list(range(total + 1))
    assert not any(isinstance(event, Measuring) for event in recorded(monkeypatch, [FormulaEngine(kept=engine.kept)]))


@pytest.mark.parametrize("kept", ["", profiles.to_text(formula.profile())], ids=["measured now", "kept"])
def test_steps_of_an_engine_without_speculation_are_kept_with_the_profile(
    monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    engine = FormulaEngine(kept=kept)
    engine.without = formula.unspeculated(0.8), ""
    said = install(monkeypatch, [engine])
    assert any("against an engine without speculation, measured now at" in one for one in said)
    assert engine.installed == engine.kept
    profile = profiles.parse(engine.kept, "kept")
    assert profile.unspeculated == engine.without[0] and len(profile.steps) > 20


def test_why_there_are_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FormulaEngine(kept=profiles.to_text(formula.profile()))
    engine.without = (), "no memory left"
    said = install(monkeypatch, [engine])
    assert said[-1].startswith("warning: no step times of an engine without speculation")
    assert said[-1].endswith("`rhyme profile` measures both): no memory left")


def test_a_kept_profile_of_something_else_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FormulaEngine(kept=profiles.to_text(formula.profile(subject=OTHER)))
    warned, measured = install(monkeypatch, [engine])
    assert warned.startswith("warning: kept.json is a profile of something else") and "another machine" in warned
    assert "measured now" in measured and profiles.parse(engine.kept, "kept").subject == formula.SUBJECT


def test_a_named_file_is_used_or_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, right = FormulaEngine(), written(tmp_path / "right.json", formula.profile())
    assert install(monkeypatch, [engine], latency=LatencySettings(right)) == [
        f"info: drafts follow the step times of {right}"
    ]
    assert engine.installed == Path(right).read_text() and not engine.kept
    wrong = written(tmp_path / "wrong.json", formula.profile(subject=OTHER))
    with pytest.raises(ProfileError, match="hardware is 'another machine' there and 'test' here"):
        install(monkeypatch, [engine], latency=LatencySettings(wrong))


def test_an_emulated_run_plans_by_what_it_emulates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, other = FormulaEngine(), written(tmp_path / "other.json", formula.profile(subject=OTHER))
    (said,) = install(monkeypatch, [engine], emulate=EmulateSettings(other))
    assert "emulated" in said and engine.installed == Path(other).read_text() and not engine.kept


@pytest.mark.parametrize(
    "settings",
    [
        {"latency": LatencySettings("none")},
        {"histospec": HistoSpecSettings(enable=False)},
        {"run": RunSettings(reproducible=True)},
    ],
    ids=str,
)
def test_runs_that_plan_nothing_get_no_profile(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    engine = FormulaEngine()
    assert install(monkeypatch, [engine], **settings) == [] and not engine.installed and not engine.kept


def test_an_engine_that_cannot_be_measured_leaves_the_fixed_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FormulaEngine(broken=True)
    (said,) = install(monkeypatch, [engine])
    assert said.startswith("warning: no step times, so drafts follow the fixed rules of --histospec.*: waited 60 s")
    assert not engine.installed
