"""A broken check never stops the others; table and JSON hold every row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from rhyme_openrlhf.cli.console import aligned
from rhyme_openrlhf.verify.outcome import CheckSkipped, Outcome, Row, VerifyError
from rhyme_openrlhf.verify.report import Progress, as_json, failed, run_checks, table


def raising(error: Exception) -> Callable[[], Outcome]:
    def check() -> Outcome:
        raise error

    return check


@pytest.mark.parametrize("error", [VerifyError("gone"), OSError(28, "full"), ValueError("x\ny"), AssertionError()])
def test_what_a_broken_machine_raises_is_a_failure_of_one_check(error: Exception) -> None:
    lines: list[str] = []
    checks = {"bad": raising(error), "good": lambda: Outcome("it works", "ok")}
    rows = run_checks(checks, Progress(lines.append))
    assert [(row.check, row.outcome.result) for row in rows] == [("bad", "failed"), ("good", "ok")]
    assert failed(rows) and type(error).__name__ in rows[0].outcome.why
    assert len(lines) == 2 and "] bad: failed after 0." in lines[0]


def test_a_bug_is_shown_as_one() -> None:
    with pytest.raises(KeyError):
        run_checks({"bad": raising(KeyError("bug"))}, Progress(lambda line: None))


def test_skipped_is_not_failed_and_says_why() -> None:
    rows = run_checks({"images": raising(CheckSkipped("prompts with images"))}, Progress(lambda line: None))
    assert rows[0].outcome.result == "skipped" and rows[0].outcome.why == "prompts with images" and not failed(rows)
    rows = run_checks({"any": raising(KeyError())}, Progress(lambda line: None), lambda name: f"no stack for {name}")
    assert rows[0].outcome.why == "no stack for any"


def test_text_has_every_line_in_its_column() -> None:
    rows = [
        Row("installs", Outcome("components", "ok", lines=("28 looked at",)), 1.0),
        Row("speed", Outcome("speed", "informative", "upper bound", ("2.0 times",)), 61.0),
    ]
    lines = aligned(table(rows)).splitlines()
    assert len(lines) == 5
    column = lines[0].index("components")
    assert lines[1] == " " * column + "28 looked at" and lines[2].index("speed", 9) == column
    assert "1 min 01 s" in lines[2]


def test_json_is_strict_and_complete() -> None:
    rows = [Row("weights", Outcome("what", "failed", "why", figures={"worst": math.nan, "all": (1, 2.5)}), 1.234)]
    found = json.loads(json.dumps(as_json(rows, {"device": "CPU"}), allow_nan=False))
    assert found["passed"] is False and found["device"] == "CPU"
    assert found["checks"][0]["figures"] == {"worst": "nan", "all": [1, 2.5]}
    assert found["checks"][0]["seconds"] == 1.23
