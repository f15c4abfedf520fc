"""Runs the checks one after the other, and shows what they found: progress, table, JSON.

Invariants: a check that fails or breaks never stops the next one. Every requested check has its row. The JSON is strict
(a figure that is not finite is a string).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rhyme_openrlhf.engine_errors import first_line
from rhyme_openrlhf.telemetry.run_directory import strict
from rhyme_openrlhf.telemetry.wording import clock, duration
from rhyme_openrlhf.verify.outcome import CheckSkipped, Outcome, Row

COLOURS = {"ok": "green", "informative": "cyan", "skipped": "yellow", "failed": "red"}


class Progress:
    """One line for each phase, with the time since the start."""

    def __init__(self, print_line: Callable[[str], None] | None = None) -> None:
        # Flushed: a pipe or a log is watched too.
        self._print = print_line or partial(print, flush=True)
        self._started = time.monotonic()
        self._check = ""

    def enter(self, check: str) -> None:
        """Begin a check: the following lines are about it."""
        self._check = check

    def say(self, text: str) -> None:
        """Show one phase."""
        self._print(f"[{clock(time.monotonic() - self._started)}] {self._check}: {text}")


def run_checks(
    checks: Mapping[str, Callable[[], Outcome]],
    progress: Progress,
    stop: Callable[[str], str] = lambda name: "",
    note: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Row]:
    """Run each check; `stop(name)` may give a reason to skip it, and `note` is told each outcome when it is there."""
    rows = []
    for name, check in checks.items():
        progress.enter(name)
        started = time.monotonic()
        outcome = skipped(name, reason) if (reason := stop(name)) else attempt(name, check)
        note(outcome)
        rows.append(Row(name, outcome, time.monotonic() - started))
        why = f": {outcome.why}" if outcome.result in ("failed", "skipped") else ""
        progress.say(f"{outcome.result} after {duration(rows[-1].seconds)}{why}")
    return rows


def skipped(name: str, reason: str) -> Outcome:
    """Return the outcome of a check that was not run."""
    return Outcome(name, "skipped", reason)


def attempt(name: str, check: Callable[[], Outcome]) -> Outcome:
    """Run one check. What a broken machine or library raises is a failure of this check, no end of the others."""
    try:
        return check()
    except CheckSkipped as reason:
        return skipped(name, str(reason))
    # What vLLM, Ray, torch and the operating system raise; a bug of ours mostly raises something else and is shown.
    except (RuntimeError, ValueError, OSError, AssertionError, ImportError) as error:
        return Outcome(name, "failed", f"{type(error).__name__}: {first_line(error)}")


def failed(rows: Sequence[Row]) -> bool:
    """Return whether any check failed."""
    return any(row.outcome.result == "failed" for row in rows)


def as_json(rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything measured; `about` describes the measurement: command, versions, devices."""
    checks = [
        {
            "check": row.check,
            "what": row.outcome.what,
            "result": row.outcome.result,
            "why": row.outcome.why,
            "seconds": round(row.seconds, 2),
            "figures": row.outcome.figures,
        }
        for row in rows
    ]
    return strict({**about, "passed": not failed(rows), "checks": checks})


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the table's lines: check, result, time, and what was found, with a line for each finding."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        outcome = row.outcome
        first, *rest = [outcome.what, *([outcome.why] if outcome.why else []), *outcome.lines]
        lines.append((row.check, outcome.result, duration(row.seconds), first))
        lines += [("", "", "", line) for line in rest]
    return lines
