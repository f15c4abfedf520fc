"""Events that only the control plane shows change nothing of what the terminal and the summary say."""

from __future__ import annotations

import io

from rich.console import Console

from rhyme_openrlhf.telemetry.events import EngineSample, LayoutSwitched, RankStability, Recorded, SampleMoved
from rhyme_openrlhf.telemetry.progress import BarsDisplay, LinesDisplay
from rhyme_openrlhf.telemetry.summary import summarize

NEW = (
    EngineSample(1, 0, 5, 1.0, 100, 20, 10),
    SampleMoved(1, "p0/1", 0, 1, "outlier_inter", "recompute", "moved", 0.2, 300),
    LayoutSwitched(1, "node-0", 1, 2, 12, 1.5),
    RankStability(2, 0.8, 12),
)


def with_new_kinds(run: list[Recorded]) -> list[Recorded]:
    """New kinds behind every event of the run but before its last, whose time is the run's length."""
    mixed = []
    for recorded in run:
        mixed += [Recorded(event, recorded.time, "rollout", 0) for event in NEW if recorded is not run[0]]
        mixed.append(recorded)
    return mixed


def test_the_summary_stays(finished_run: list[Recorded]) -> None:
    assert summarize(with_new_kinds(finished_run)) == summarize(finished_run)


def test_the_lines_stay(finished_run: list[Recorded]) -> None:
    def shown(run: list[Recorded]) -> str:
        stream = io.StringIO()
        with LinesDisplay(stream) as display:
            for recorded in run:
                display.show(recorded)
        return stream.getvalue()

    assert shown(with_new_kinds(finished_run)) == shown(finished_run)


def test_the_bars_go_on(finished_run: list[Recorded]) -> None:
    stream = io.StringIO()
    with BarsDisplay(Console(file=stream, force_terminal=True)) as display:
        for recorded in with_new_kinds(finished_run):
            display.show(recorded)
    assert "run succeeded" in stream.getvalue()
