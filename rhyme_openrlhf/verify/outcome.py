"""A check's result. Pure: shared by the checks, the report and the record.

Invariant: an outcome is "ok" only when something was measured and judged; "informative" outcomes were measured, but
nothing promises a value; a check that could not run is "skipped" and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Result = Literal["ok", "informative", "skipped", "failed"]


class VerifyError(RuntimeError):
    """A check could not be carried out; the message is one sentence for the user."""


class CheckSkipped(VerifyError):
    """A check says nothing about this model, these prompts or this machine; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """One row of the report.

    `what` was checked; `why` explains a result other than "ok"; `lines` are the measured figures as a person reads
    them, `figures` all of them as plain JSON values. `proves` names what this outcome proves when it is "ok", and
    disproves when it failed (verify/record.py::FEATURES).
    """

    what: str
    result: Result
    why: str = ""
    lines: Sequence[str] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    proves: str = ""


@dataclass(frozen=True)
class Row:
    """An outcome with the check's name and the seconds it took."""

    check: str
    outcome: Outcome
    seconds: float
