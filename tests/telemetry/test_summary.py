"""The summary of a run, whole or killed at any moment."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from rhyme_openrlhf.telemetry.event_log import EventLog, read_events
from rhyme_openrlhf.telemetry.events import (
    DraftGain,
    EngineInterval,
    EngineStep,
    Note,
    Recorded,
    RolloutFinished,
    RunFinished,
    RunStarted,
    TrainStep,
)
from rhyme_openrlhf.telemetry.summary import UNFINISHED, RunState, render, summarize


def test_figures_of_a_finished_run(finished_run: list[Recorded]) -> None:
    summary = summarize(finished_run)
    assert (summary.name, summary.status, summary.steps, summary.steps_planned) == ("demo", "succeeded", 4, 4)
    assert (summary.seconds, summary.rollout_seconds) == (66.0, 48.0)
    assert (summary.response_tokens, summary.mean_response_length) == (4 * 9_600, 100.0)
    assert summary.tokens_per_second == 800.0
    assert summary.speculation_rate == pytest.approx(3_000 / 38_400)
    assert summary.acceptance_rate == pytest.approx(3_000 / 4_000)
    decoded = 4 * (9_600 - 96)
    assert summary.tokens_per_step == pytest.approx(decoded / (decoded - 3_000))
    assert summary.decode_step_ms == pytest.approx(100.0)
    assert (summary.weight_versions, summary.last_checkpoint) == (4, "checkpoints/step-4")


def test_figures_by_epoch(finished_run: list[Recorded]) -> None:
    first, second = summarize(finished_run).epochs
    assert (first.epoch, first.steps, second.epoch, second.steps) == (1, 2, 2, 2)
    assert (first.reward, second.reward) == (pytest.approx(0.3), pytest.approx(0.5))
    assert (first.tokens_per_step, first.speculation_rate) == (1.0, 0.0)
    assert second.tokens_per_step == pytest.approx(2 * 9_504 / (2 * 9_504 - 3_000))
    assert second.speculation_rate == pytest.approx(3_000 / 19_200)
    summary = summarize(finished_run)
    assert (summary.reward_first_epoch, summary.reward_last_epoch) == (first.reward, second.reward)


def test_bubbles_count_only_inside_the_rollout_stage(finished_run: list[Recorded]) -> None:
    # Per step of 2 x 12 s: 1 s of the 2 s weight load and the 2 s tail; the wait for the trainer comes after the stage.
    summary = summarize(finished_run)
    assert summary.bubble_seconds == {"sync": pytest.approx(4.0), "tail": pytest.approx(8.0)}
    assert summary.bubble_fraction == pytest.approx(12 / 96)


def test_a_run_that_folds_its_events_keeps_none_of_steps_that_have_ended(finished_run: list[Recorded]) -> None:
    """A day of 512 engines has millions; the summary at the end must need neither their memory nor their time."""
    state = RunState()
    for recorded in finished_run:
        state.apply(recorded)
    assert not state.intervals
    assert state.summary() == summarize(finished_run)


def test_intervals_that_come_after_the_end_of_their_step_count_as_those_before(finished_run: list[Recorded]) -> None:
    late = sorted(finished_run, key=lambda recorded: isinstance(recorded.event, EngineInterval))
    found, expected = summarize(late), summarize(finished_run)
    assert found.bubble_seconds == pytest.approx(expected.bubble_seconds)
    assert found.bubble_fraction == pytest.approx(expected.bubble_fraction)


def test_without_intervals_bubbles_are_unknown_not_none_at_all(finished_run: list[Recorded]) -> None:
    summary = summarize(r for r in finished_run if not isinstance(r.event, EngineInterval))
    assert summary.bubble_fraction is None
    assert "bubbles -\n" in render(summary, "runs/demo")


def test_rewards_that_the_trainer_computes_later_and_lost_ones(finished_run: list[Recorded]) -> None:
    rewards = {1: 0.1, 2: 0.3, 3: float("nan"), 4: 0.7}

    def later(recorded: Recorded) -> Recorded:
        event = recorded.event
        if isinstance(event, RolloutFinished):
            return replace(recorded, event=structs.replace(event, reward_mean=None))
        if isinstance(event, TrainStep):
            return replace(recorded, event=structs.replace(event, metrics={"reward": rewards[event.step]}))
        return recorded

    first, second = summarize(map(later, finished_run)).epochs
    assert (first.reward, second.reward) == (pytest.approx(0.2), pytest.approx(0.7))


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([0.7, 0.9], "  drafts       0.80 times the tokens/s without (95 %: 0.70 to 0.90). Engines without speculation "
         "would have 1.27 times the tokens per second: give the next run --no-histospec.enable.\n"),
        ([0.9, 1.1], "  drafts       no difference shown: 0.90 to 1.10 times the tokens/s without (95 %)\n"),
        ([1.5, 2.5], "  drafts       2.00 times the tokens/s without (95 %: 1.90 to 2.10)\n"),
    ],
)  # fmt: skip
def test_the_last_gain_of_every_engine_and_what_to_do_about_it(
    finished_run: list[Recorded], ratios: list[float], said: str
) -> None:
    gains = [
        replace(finished_run[-1], event=DraftGain(step, engine, ratio + step - 2, ratio - 0.1, ratio + 0.1, 40, True))
        for step in (1, 2)
        for engine, ratio in enumerate(ratios)
    ]
    found = summarize([*finished_run, *gains])
    assert said in render(found, "runs/demo")
    assert found.to_dict()["draft_gain"]["ratio"] == pytest.approx(sum(ratios) / 2)
    assert summarize(finished_run).draft_gain is None and "\n  drafts" not in render(summarize(finished_run), "d")


def test_earlier_runs_are_told_with_what_they_gave(finished_run: list[Recorded]) -> None:
    def more(recorded: Recorded) -> Recorded:
        event = recorded.event
        if isinstance(event, EngineStep):
            epoch_1 = event.step <= 2
            counters = replace(event.counters, response_tokens=100, accepted=80, accepted_earlier=60 if epoch_1 else 20)
            return replace(recorded, event=structs.replace(event, counters=counters))
        return recorded

    found = summarize(map(more, finished_run))
    assert (found.earlier_share, [epoch.earlier_share for epoch in found.epochs]) == (0.4, [0.6, 0.2])
    said = "\n  earlier runs 40% of the response tokens were drafted from their responses, 60% in epoch 1\n"
    assert said in render(found, "runs/demo")
    assert "earlier runs" not in render(summarize(finished_run), "runs/demo")


def test_no_events_give_a_summary_of_nothing() -> None:
    summary = summarize([])
    assert (summary.status, summary.steps, summary.seconds, summary.epochs) == (UNFINISHED, 0, 0.0, ())
    assert render(summary, "runs/demo").startswith("Run (unnamed) unfinished: 0 steps in 0.0 s")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_killed_run_has_a_summary_at_every_moment(finished_run: list[Recorded], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(finished_run) - 1))
    part = finished_run[:length]
    summary = summarize(part)
    assert summary.status == UNFINISHED
    assert summary.steps == sum(isinstance(r.event, TrainStep) for r in part)
    assert summary.seconds == (part[-1].time - part[0].time if part else 0.0)
    assert summary.bubble_fraction is None or 0 <= summary.bubble_fraction <= 1
    json.dumps(summary.to_dict(), allow_nan=False)
    assert 10 <= len(render(summary, "runs/demo").splitlines()) <= 16


def test_a_torn_record_on_disk_has_a_summary(tmp_path: Path, finished_run: list[Recorded]) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for recorded in finished_run:
            log.write(recorded.event, recorded.source, recorded.time)
    assert summarize(read_events(path)) == summarize(finished_run)
    path.write_bytes(path.read_bytes()[:-10])
    assert summarize(read_events(path)) == summarize(finished_run[:-1])


def test_each_warning_is_there_once_and_nothing_else_is(finished_run: list[Recorded]) -> None:
    last = finished_run[-1]
    notes = [
        replace(last, event=Note(level, text))  # type: ignore[arg-type]
        for level, text in [("warning", "step 1 taught nothing"), ("info", "x"), ("warning", "step 1 taught nothing")]
    ]
    before = summarize(finished_run).warnings
    assert before == ("history worker 0\nis late",)
    found = summarize([*finished_run, *notes])
    assert found.to_dict()["warnings"] == (*before, "step 1 taught nothing")


def test_dictionary_is_json_with_the_epochs(finished_run: list[Recorded]) -> None:
    values = json.loads(json.dumps(summarize(finished_run).to_dict(), allow_nan=False))
    assert values["status"] == "succeeded"
    assert [epoch["epoch"] for epoch in values["epochs"]] == [1, 2]


def test_text_at_the_end_of_a_run(finished_run: list[Recorded]) -> None:
    assert render(summarize(finished_run), "runs/demo") == (
        """\
Run demo succeeded: 4 of 4 steps in 1 min 06 s (48.0 s of it rollout)
  reward       0.300 -> 0.500 (first -> last epoch)
  rollout      800 tokens/s, 100.0 tokens per response, bubbles 12% (tail 8%, sync 4%)
  speculation  rate 8%, acceptance 75%, 1.09 tokens/step, 100.0 ms per decode step
  weights      4 versions published

  epoch  steps  reward  tokens/s  tokens/step  speculation  ms/decode  length
      1      2   0.300       800         1.00           0%      100.0   100.0
      2      2   0.500       800         1.19          16%      100.0   100.0

Files in runs/demo:
  config.json   every setting of this run
  events.jsonl  everything it reported, one event a line
  summary.json  these figures
  logs/         what each process printed
  checkpoints/  last: checkpoints/step-4
"""
    )


def test_text_of_a_failed_run_of_unknown_length_says_why(finished_run: list[Recorded]) -> None:
    started = next(r for r in finished_run if isinstance(r.event, RunStarted))
    assert isinstance(started.event, RunStarted)
    events = [
        replace(started, event=structs.replace(started.event, steps_per_epoch=None)),
        Recorded(RunFinished("failed", "engine 0 died:\nout of memory", 5.0), started.time + 5, "driver", 1),
    ]
    assert render(summarize(events), "runs/demo").splitlines()[:2] == [
        "Run demo failed: 0 steps in 5.0 s (0.0 s of it rollout)",
        "  engine 0 died: out of memory",
    ]


def test_text_of_many_epochs_stays_on_a_screen() -> None:
    events = [Recorded(TrainStep(i, i, {}, {}), float(i), "trainer", i) for i in range(1, 101)]
    lines = render(summarize(events), "runs/demo").splitlines()
    shown = [line.split()[0] for line in lines[lines.index("") + 2 : lines.index("", lines.index("") + 1)]]
    assert shown == ["1", "2", "3", "...", "97", "98", "99", "100"]
