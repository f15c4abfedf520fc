"""The display of a running run: as lines in a log, as bars on a terminal."""

import io
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rhyme_openrlhf.telemetry import wording
from rhyme_openrlhf.telemetry.events import (
    POLICY,
    Evaluation,
    Event,
    Note,
    ProcessReady,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    SystemSample,
    TrainStep,
    WeightsPublished,
)
from rhyme_openrlhf.telemetry.progress import PROGRESS_INTERVAL_S, BarsDisplay, LinesDisplay, NoDisplay, make_display

from .conftest import RUN


def at(time: float, event: Event) -> Recorded:
    return Recorded(event, time, "driver", 0)


def lines_of(events: Sequence[Recorded]) -> list[str]:
    stream = io.StringIO()
    with make_display("lines", stream) as display:
        for recorded in events:
            display.show(recorded)
    return stream.getvalue().splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def frames_of(events: Sequence[Recorded], width: int = 80) -> str:
    """Everything the bars drew, one redraw after the other, as text."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, record=True)
    with BarsDisplay(console) as display:
        for recorded in events:
            display.show(recorded)
    return console.export_text()


SYSTEM = SystemSample("node", 0.5, 1.0, 1, 2, None, None, None, [], [], [], {}, {})


def starting(*timed: tuple[float, Event]) -> list[Recorded]:
    """A run of two engines that starts, then these events."""
    return [at(0, RUN), *(at(time, event) for time, event in timed)]


def test_lines_say_what_a_starting_run_waits_for() -> None:
    events = starting(
        (5, SYSTEM),
        (16, SYSTEM),
        (20, SYSTEM),
        (25, ProcessReady("engine 1")),
        (31, ProcessReady(POLICY)),
        (47, SYSTEM),
        (50, ProcessReady("engine 0")),
        (51, RolloutStarted(1, 1, 12, 96)),
        (90, SYSTEM),
    )
    assert lines_of(events)[1:] == [
        "[00:16] starting: policy model loading, 0 of 2 engines ready",
        "[00:25] starting: policy model loading, 1 of 2 engines ready",
        "[00:31] starting: policy model ready, 1 of 2 engines ready",
        "[00:47] starting: policy model ready, 1 of 2 engines ready",
        "[00:50] starting: all engines and the policy model ready, first rollout next",
        "[00:51] step 1/4 (epoch 1/2)  generating 96 samples of 12 prompts",
    ]


def test_bars_say_what_a_starting_run_waits_for() -> None:
    assert "starting: Ray and the driver" in frames_of([])
    events = starting((25, ProcessReady("engine 1")), (31, ProcessReady(POLICY)))
    assert "starting: policy model loading, 1 of 2 engines ready" in frames_of(events[:-1])
    assert "starting: policy model ready, 1 of 2 engines ready" in frames_of(events)


def test_lines_of_a_whole_run(finished_run: list[Recorded]) -> None:
    assert lines_of(finished_run) == [
        "[00:00] starting 2 engines ...",
        "[00:04] run demo: 2 epochs of 2 steps, 12 prompts x 8 samples a step, 2 engines (tensor parallel 1)",
        "[00:05] step 1/4 (epoch 1/2)  generating 96 samples of 12 prompts",
        "[00:16] step 1/4  samples 61/96 · 800 tok/s",
        "[00:20] step 1/4 (epoch 1/2)  reward 0.25  rollout 12.0 s, 800 tok/s, 1.0 tokens/step  "
        "train 2.5 s, publish 0.5 s",
        "[00:20] step 2/4 (epoch 1/2)  generating 96 samples of 12 prompts",
        "[00:31] step 2/4  samples 61/96 · 800 tok/s",
        "[00:35] step 2/4 (epoch 1/2)  reward 0.35  rollout 12.0 s, 800 tok/s, 1.0 tokens/step  "
        "train 2.5 s, publish 0.5 s",
        "[00:35] evaluation after step 2/4: pass1 0.5",
        "[00:36] step 3/4 (epoch 2/2)  generating 96 samples of 12 prompts",
        "[00:47] step 3/4  samples 61/96 · 800 tok/s · acceptance 70% · speculation 16%",
        "[00:51] step 3/4 (epoch 2/2)  reward 0.40  rollout 12.0 s, 800 tok/s, 1.2 tokens/step, acceptance 70%, "
        "speculation 15%  train 2.5 s, publish 0.5 s",
        "[00:51] warning: history worker 0 is late",
        "[00:52] step 4/4 (epoch 2/2)  generating 96 samples of 12 prompts",
        "[01:03] step 4/4  samples 61/96 · 800 tok/s · acceptance 80% · speculation 18%",
        "[01:07] step 4/4 (epoch 2/2)  reward 0.60  rollout 12.0 s, 800 tok/s, 1.2 tokens/step, acceptance 80%, "
        "speculation 17%  train 2.5 s, publish 0.5 s",
        "[01:08] checkpoint of step 4/4 saved: checkpoints/step-4",
        "[01:10] run succeeded after 1 min 06 s",
    ]


def test_lines_are_plain_even_on_a_terminal(finished_run: list[Recorded]) -> None:
    stream = Terminal()
    with LinesDisplay(stream) as display:
        for recorded in [*finished_run, at(0.0, Note("info", "loading 1%\rloading 2%\r\ndone"))]:
            display.show(recorded)
    assert not re.search(r"[\r\x1b]", stream.getvalue())
    assert stream.getvalue().endswith("loading 1% loading 2% done\n")


@given(st.lists(st.floats(0, 5), max_size=100))
def test_progress_lines_keep_their_distance(gaps: list[float]) -> None:
    now = 0.0
    events = [at(now, RolloutStarted(1, 1, 1, 8))]
    for gap in gaps:
        now += gap
        events.append(at(now, RolloutProgress(1, 1, 8, 100, 1.0, 0, 0)))
    progress = [line for line in lines_of(events) if "samples 1/8" in line]
    assert len(progress) <= now / PROGRESS_INTERVAL_S
    assert bool(progress) == (now >= PROGRESS_INTERVAL_S)


def test_a_run_is_shown_from_its_middle_on_as_far_as_known() -> None:
    assert lines_of(
        [
            at(0.0, RolloutProgress(7, 1, 8, 100, 0.0, 0, 0)),
            at(1.0, TrainStep(7, 2, {}, {})),
            at(2.0, TrainStep(8, 2, {"rollout": 1.0}, {"reward": 0.5})),
        ]
    ) == ["[00:00] step 7  samples 1/8 · - tok/s", "[00:01] step 7 (epoch 2)", "[00:02] step 8 (epoch 2)  reward 0.50"]


def test_many_scores_and_a_reason_fit_into_lines() -> None:
    scores = Evaluation(1, {f"task{i}": i / 8 for i in range(8)})
    assert lines_of([at(0.0, scores), at(1.0, RunFinished("failed", "engine 0 died", 1.0))]) == [
        "[00:00] evaluation after step 1: task0 0, task1 0.125, task2 0.25, task3 0.375, task4 0.5, task5 0.625, "
        "and 2 more",
        "[00:01] run failed after 1.0 s: engine 0 died",
    ]


def test_a_log_that_is_ascii_is_no_error() -> None:
    raw = io.BytesIO()
    with make_display("lines", io.TextIOWrapper(raw, encoding="ascii")) as display:
        display.show(at(0.0, RolloutProgress(1, 1, 8, 100, 1.0, 0, 0)))
        assert raw.getvalue() == b"[00:00] step 1  samples 1/8 ? 100 tok/s\n"


def test_bars_of_a_run_in_its_second_epoch(finished_run: list[Recorded]) -> None:
    third = next(i for i, r in enumerate(finished_run) if isinstance(r.event, RolloutStarted) and r.event.step == 3)
    frames = frames_of(finished_run[: third + 3])
    assert re.search(r"samples 61/96 · 800 tok/s · acceptance 70% · speculation 16% +━+", frames)
    # Every bar ends with its elapsed time. What is left at the end is the run's bar alone.
    before, last = re.split(r"\d:\d\d:\d\d", frames.rstrip())[-3:-1]
    assert re.match(r"epoch 2/2 · step 3/4 · reward 0\.35 \(first 0\.25\) · version 2 +━+", last)
    assert "samples 61/96" in before


def test_bars_fit_into_80_columns() -> None:
    events = [
        at(0.0, RolloutStarted(123, 10, 8, 96)),
        at(1.0, RolloutProgress(123, 61, 96, 32_140, 10.0, 100, 71)),
    ]
    assert "speculation 0% ━" in frames_of(events)


def test_messages_stay_above_the_bars() -> None:
    frames = frames_of(
        [at(0.0, Note("warning", "no [bold]history[/bold] yet")), at(1.0, Evaluation(2, {"pass1": 0.5}))]
    )
    assert "warning: no [bold]history[/bold] yet\n" in frames
    assert "evaluation after step 2: pass1 0.5\n" in frames


def test_the_step_bar_of_an_asynchronous_run_follows_the_newest_rollout() -> None:
    frames = frames_of(
        [
            at(0.0, RolloutStarted(1, 1, 1, 8)),
            at(1.0, RolloutFinished(1, 1, 1.0, 8, 80, None, 10.0, 10.0, 10.0, 10, 0)),
            at(2.0, RolloutStarted(2, 1, 1, 8)),
            at(3.0, TrainStep(1, 1, {}, {"reward": 0.5})),
            at(3.5, RolloutProgress(1, 7, 8, 70, 1.0, 0, 0)),  # late, of the step before
            at(4.0, RolloutProgress(2, 3, 8, 30, 1.0, 0, 0)),
            at(5.0, WeightsPublished(1, 0.1, 10, 1)),
        ]
    )
    assert "training on step 1" in frames
    assert "samples 3/8 · 30 tok/s" in frames
    assert "samples 7/8" not in frames
    assert "epoch 1 · step 2 · reward 0.50 (first 0.50) · version 1" in frames.splitlines()[-1]


def test_the_mode_picks_the_display(monkeypatch: pytest.MonkeyPatch, finished_run: list[Recorded]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display("auto", io.StringIO()), LinesDisplay)
    assert isinstance(make_display("auto", Terminal()), BarsDisplay)
    assert isinstance(make_display("bars", io.StringIO()), BarsDisplay)
    assert isinstance(make_display("lines", Terminal()), LinesDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display("auto", Terminal()), LinesDisplay)
    with pytest.raises(ValueError, match="auto, bars, lines, off"):
        make_display("loud", io.StringIO())


def test_off_prints_nothing(finished_run: list[Recorded]) -> None:
    stream = Terminal()
    with make_display("off", stream) as display:
        assert isinstance(display, NoDisplay)
        for recorded in finished_run:
            display.show(recorded)
    assert stream.getvalue() == ""


def test_figures_are_written_for_people() -> None:
    assert (wording.number(2310.4, 0), wording.number(None, 2), wording.number(float("nan"), 2)) == ("2,310", "-", "-")
    assert (wording.percent(0.644), wording.percent(None), wording.percent(float("inf"))) == ("64%", "-", "-")
    assert [wording.clock(s) for s in (-1.0, 41.9, 3599, 3723)] == ["00:00", "00:41", "59:59", "1:02:03"]
    assert [wording.duration(s) for s in (4.21, 192, 7500)] == ["4.2 s", "3 min 12 s", "2 h 05 min"]
    assert [wording.duration(s) for s in (59.97, 3599.7, float("nan"))] == ["60.0 s", "1 h 00 min", "-"]
    assert (wording.counted(1, "engine"), wording.counted(1000, "sample")) == ("1 engine", "1,000 samples")
