"""Tables: what is not there is a dash, and nothing that others wrote is markup or moves a cursor."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from rhyme_openrlhf.cli.runs import tables

NOW = 1_760_000_900.0
RUN: dict[str, Any] = {
    "uid": "0f3a5b7c9d1e2f40",
    "name": "math-7b",
    "status": "running",
    "message": "",
    "tags": ["baseline", "a"],
    "created_at": NOW - 100,
    "started_at": NOW - 90,
    "finished_at": None,
    "origin": "launched",
    "step": 42,
    "steps_total": 500,
    "reward": 0.6123,
    "tokens_per_second": 5210.4,
    "speculation_rate": 0.57,
    "bubble_fraction": None,
    "dropped_events": 3,
    "command": ["rhyme", "train"],
    "attempts": [{"number": 1, "status": "running", "resumes": False, "queued_at": NOW - 99, "run_directory": "/r/1"}],
}


def rendered(content: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=240, highlight=False).print(content)
    return stream.getvalue()


def test_the_table_of_runs() -> None:
    head, line = rendered(tables.runs_table([RUN], NOW)).splitlines()
    assert " ".join(head.split()) == "run name status step reward tokens/s speculation bubbles age tags"
    wanted = "0f3a5b7c9d1e2f40 math-7b running 42/500 0.612 5,210 57% - 1 min 40 s baseline, a"
    assert " ".join(line.split()) == wanted


def test_one_run() -> None:
    shown = rendered(tables.run_table(RUN, NOW))
    for part in ("0f3a5b7c9d1e2f40", "3 events never arrived", "attempt 1", "running, queued 1 min 39 s ago, /r/1"):
        assert part in shown
    assert "notes" not in shown and "waits for" not in shown
    told = {**RUN, "verdict": {"level": "look", "text": "Step 42 of 500, generating. 1 warning.", "reasons": []}}
    assert rendered(tables.run_table(told, NOW)).splitlines()[2].split()[:3] == ["verdict", "look:", "Step"]
    queued = rendered(tables.run_table({**RUN, "status": "queued"}, NOW, "it needs 4 GPUs")).splitlines()
    (at,) = (
        number for number, line in enumerate(queued) if line.split() == ["waits", "for", "it", "needs", "4", "GPUs"]
    )
    assert queued[at - 1].split() == ["status", "queued"]


def test_a_run_of_another_version_is_shown_as_far_as_it_is_known() -> None:
    assert "new-status" in rendered(tables.runs_table([{"uid": "x", "status": "new-status"}], NOW))
    rendered(tables.run_table({}, NOW))


@given(st.text())
def test_no_text_of_others_is_markup_or_moves_a_cursor(text: str) -> None:
    shown = rendered(tables.runs_table([{**RUN, "name": f"[red]{text}[/nonsense]", "tags": [text]}], NOW))
    assert "[red]" in shown.replace("\n", "")
    assert all(c.isprintable() or c == "\n" for c in shown)
    rendered(tables.run_table({**RUN, "notes": text, "message": text, "command": [text]}, NOW))


def test_a_comparison() -> None:
    def one(name: str, reward: float | None, ratio: float | None) -> dict[str, Any]:
        return {"run": {"name": name, "uid": "ab" * 8}, "figures": {"reward": reward}, "ratios": {"reward": ratio}}

    comparison = {"runs": [one("first", 0.5, 1.0), one("second", 0.75, 1.5), one("third", None, None)]}
    head, line = rendered(tables.comparison_table(comparison)).splitlines()
    assert "first (abababab)" in head and "third (abababab)" in head
    assert line.split() == ["reward", "0.5", "0.75", "(x1.50)", "-"]


def test_differences() -> None:
    row = {"name": "settings.histospec.enable", "a": True, "b": None, "in_a": True, "in_b": False}
    other = {"name": "command", "a": ["x" * 100], "b": "[bold]", "in_a": True, "in_b": True}
    shown = rendered(tables.differences_table({"differences": [row, other]}, ["one", "two"]))
    assert "settings.histospec.enable" in shown and "true" in shown
    assert "…" in shown and "[bold]" in shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(5, "5.0 s"), (3600 * 5, "5 h 00 min"), (86400 * 3 + 3600 * 4, "3 d 4 h"), (-5, "0.0 s")]
)
def test_ages(seconds: float, shown: str) -> None:
    assert tables.age(NOW - seconds, NOW) == shown


def test_a_run_says_what_it_does_now() -> None:
    phases = [{"text": "training on step 1, for 2.0 s"}, {"text": "generating step 2\x1b[31m", "of_a_newer_server": 1}]
    lines = rendered(tables.run_table({**RUN, "phases": phases}, NOW)).splitlines()
    assert [line.split(maxsplit=1)[1].strip() for line in lines if line.startswith("now")] == [
        "training on step 1, for 2.0 s",
        "generating step 2 [31m",
    ]
    # An older server sends none.
    assert not any(line.startswith("now") for line in rendered(tables.run_table(RUN, NOW)).splitlines())
