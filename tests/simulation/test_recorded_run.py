"""A run directory, simulated again: as it was, as it was forecast, and under its own conditions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.cli import simulate as command
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.simulation.recorded_run import Busy, compare, conditions_of, known_before, read_run, replay
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import AS_PROFILED, Cluster, Conditions, Features
from rhyme_openrlhf.simulation.workload import Shape, WorkloadError, drawn
from tests.latency import formula
from tests.simulation.recorded import CLUSTER, FEATURES, PROFILE, RATES, SHAPE, placed, record


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    workload = placed(drawn(SHAPE, 4, 6, 4, 2, seed=3))
    record(tmp_path / "run", workload, Run(workload, CLUSTER, FEATURES, {1: PROFILE}, RATES).go())
    return tmp_path / "run"


def test_the_same_run_again_takes_the_same_time(recorded: Path) -> None:
    run = read_run(recorded, Cluster(running=64), Features())
    assert (run.features, run.rates) == (FEATURES, tuple(RATES))
    assert run.cluster.trainer_tokens_per_second == pytest.approx(CLUSTER.trainer_tokens_per_second)
    assert dataclasses.replace(run.cluster, trainer_tokens_per_second=5000.0) == CLUSTER
    compared = compare(run, Run(run.workload, run.cluster, run.features, {1: PROFILE}, run.rates).go())
    assert [one.step for one in compared] == [7, 8, 9, 10]
    assert [one.simulated for one in compared] == pytest.approx([one.real for one in compared])
    # Half of the engines idle for a quarter of the stage.
    assert [one.bubbles for one in compared] == pytest.approx([0.125] * 4)


def test_a_slower_machine_shows(recorded: Path) -> None:
    run = read_run(recorded, Cluster(running=64), Features())
    slower = dataclasses.replace(
        PROFILE,
        steps=tuple(dataclasses.replace(p, seconds=1.5 * p.seconds) for p in PROFILE.steps),
        prefills=tuple(dataclasses.replace(p, seconds=1.5 * p.seconds) for p in PROFILE.prefills),
    )
    compared = compare(run, Run(run.workload, run.cluster, run.features, {1: slower}, run.rates).go())
    assert [one.error for one in compared] == pytest.approx([0.5] * 4)


def test_what_a_slower_machine_took_is_learnt_from_the_steps_before(recorded: Path) -> None:
    run = read_run(recorded, Cluster(running=64), Features())
    quicker = dataclasses.replace(
        PROFILE,
        steps=tuple(dataclasses.replace(p, seconds=p.seconds / 1.5) for p in PROFILE.steps),
        prefills=tuple(dataclasses.replace(p, seconds=p.seconds / 1.5) for p in PROFILE.prefills),
    )
    found = replay(run, {1: quicker}, {})
    assert [one.slowness for one in found.conditions] == pytest.approx([1.5] * 4)
    errors = {way: [one.error for one in compared] for way, compared in found.compared.items()}
    assert errors["by the profile"] == pytest.approx([-1 / 3] * 4)
    assert errors["forecast"] == pytest.approx([-1 / 3, 0, 0, 0], abs=1e-6)
    assert errors["own speed"] == pytest.approx([0] * 4, abs=1e-6)
    assert [line.split()[0] for line in found.lines()[1:5]] == ["7", "8", "9", "10"]


def test_on_the_command_line_with_a_feature_more(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    (tmp_path / "p.json").write_text(profiles.to_text(PROFILE))
    asked = ["--profile", str(tmp_path / "p.json"), "--from-run", str(recorded), "--running", "64"]
    assert command.main([*asked, "--features", "async"]) == 0
    printed = capsys.readouterr().out
    assert "a recorded run" in printed and "as it was" in printed and "async" in printed
    assert "by the profile: 4 of 4 rollout stages are simulated within 10% of their real time" in printed


@pytest.mark.parametrize("missing", ["lengths.jsonl", "stages", "training", "a line's end"])
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    recorded: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    events = recorded / "events.jsonl"
    kept = {"stages": "rollout_finished", "training": "train_step"}
    if missing == "a line's end":
        lengths = recorded / "lengths.jsonl"
        lengths.write_text(lengths.read_text()[:-9])
    elif missing in kept:
        events.write_text("".join(line for line in events.open() if kept[missing] not in line))
    else:
        (recorded / missing).unlink()
    with pytest.raises(WorkloadError):
        read_run(recorded, Cluster(), Features())
    assert command.main(["--profile", "pat-a40", "--from-run", str(recorded)]) == 2
    assert capsys.readouterr().err.startswith("rhyme simulate: error: ")


def test_measured_drafts_need_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--profile", "pat-a40", "--tp", "2", "--steps", "2", "--features", "measured-speculation"]
    assert command.main(argv) == 2
    assert "--from-run" in capsys.readouterr().err


FREE_LOADS = formula.profile(weight_load_seconds=0.0)
LOAD = drawn(Shape("test", "drawn", median=100.0, sigma=0.8, longest=1000, prompt_tokens=40), 3, 6, 4, 3, seed=3)
QUICK_SYNC = Cluster(devices=2, running=64, trainer_tokens_per_second=5000.0)

conditions = st.builds(Conditions, st.floats(0.2, 5), st.floats(0, 2))


def test_slowness_is_busy_time_by_that_of_the_profile() -> None:
    busy = [Busy(3.0, 0.1), Busy(0.0, 0.0), Busy(2.0, 0.2)]
    assert conditions_of(busy, [2.0, 1.0, 0.0]) == (Conditions(1.5, 0.1), AS_PROFILED, Conditions(1.0, 0.2))


@given(st.lists(conditions, min_size=1, max_size=8), conditions, st.data())
def test_a_forecast_knows_nothing_of_its_own_step_or_later_ones(
    steps: list[Conditions], other: Conditions, data: st.DataObject
) -> None:
    known = known_before(steps)
    assert len(known) == len(steps) and known[0] == AS_PROFILED
    place = data.draw(st.integers(0, len(steps) - 1))
    changed = known_before([*steps[:place], *[other] * (len(steps) - place)])
    assert changed[: place + 1] == known[: place + 1]


def test_a_forecast_is_right_where_nothing_changes_but_what_the_first_stage_waits_for() -> None:
    known = known_before([Conditions(1.3, 0.9), *[Conditions(1.3, 0.1)] * 3])
    assert [one.slowness for one in known] == pytest.approx([1.0, 1.3, 1.3, 1.3])
    assert [one.around for one in known] == [0.0, 0.0, 0.1, 0.1]


@pytest.mark.parametrize("trainer", ["sync", "async"])
def test_a_stage_takes_as_many_times_as_long_and_what_is_around_it_longer(trainer: str) -> None:
    features = Features(trainer=trainer)  # type: ignore[arg-type]
    plain = Run(LOAD, QUICK_SYNC, features, {1: FREE_LOADS}).go()
    own = [Conditions(1.0, 0.0), Conditions(2.0, 0.0), Conditions(0.5, 0.25)]
    slowed = Run(LOAD, QUICK_SYNC, features, {1: FREE_LOADS}, conditions=own).go()
    for before, after, one in zip(plain.steps, slowed.steps, own, strict=True):
        assert after.busy == pytest.approx(one.slowness * before.busy)
        stage = one.slowness * (before.completed - before.generating) + one.around
        assert after.completed - after.generating == pytest.approx(stage)
    # Every device is somewhere all the time, on its way to its first sample too.
    assert sum(slowed.accounts.seconds.values()) == pytest.approx(2 * max(step.completed for step in slowed.steps))
    assert slowed.accounts.seconds["rollout"] == pytest.approx(sum(step.busy for step in slowed.steps) + 2 * 0.25)


def test_layouts_that_are_switched_to_are_as_slow() -> None:
    subject = dataclasses.replace(formula.SUBJECT, tensor_parallel_size=2)
    quick = tuple(dataclasses.replace(point, seconds=point.seconds / 3) for point in FREE_LOADS.steps)
    profiles = {1: FREE_LOADS, 2: dataclasses.replace(FREE_LOADS, subject=subject, steps=quick)}
    features = Features("sync", switching="history")
    plain = Run(LOAD, QUICK_SYNC, features, profiles).go()
    slowed = Run(LOAD, QUICK_SYNC, features, profiles, conditions=[Conditions(2.0)] * 3).go()
    assert plain.switches and slowed.switches
    busy = [sum(step.busy for step in result.steps) for result in (plain, slowed)]
    assert busy[1] > 1.8 * busy[0]


def test_the_command_advises(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles.write(PROFILE, tmp_path / "p.json")
    argv = ["--profile", str(tmp_path / "p.json"), "--from-run", str(recorded), "--advise"]
    assert command.main(argv) == 0
    printed = capsys.readouterr().out
    assert "recommended (simulated):" in printed and "rollout engines" in printed and "x per device" in printed
    assert "assumed: the 4 recorded steps" in printed and "settings to use (simulated" in printed
    assert command.main([*argv, "--features", "pipeline"]) == 2
    assert "--advise chooses features itself" in capsys.readouterr().err
