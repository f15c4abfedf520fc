"""Formats of numbers, shares, durations and times, line breaks in long names, and labels of curves.

Pure. Nothing else in `webui/` formats a value: templates use these functions as filters. Durations and digits come from
`telemetry/wording.py`, so the page, the terminal and the summary write a value in the same way.

Invariants: a value that is None or not finite is written as NO_VALUE, never as 0. Markup is escaped, and copying it
from the page gives the original text.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from rhyme_openrlhf.telemetry import wording
from rhyme_openrlhf.telemetry.metrics import FIGURES

NO_VALUE = "–"
_MINUTE = 60.0
_HOUR = 3600.0
_DAY = 86_400.0
# Above this age, the date is clearer than a number of days.
_LONGEST_AGO = 30 * _DAY
# Significant digits; the export has all digits.
_SIGNIFICANT = 3
_THOUSAND = 1000.0
_KIB = 1024.0
_JOINTS = re.compile(r"(?<=[_/.])")
# An option of a command, without its value after "=".
_OPTION = re.compile(r"(?<!\S)--?[A-Za-z][\w.-]*")
# A part of a sentence in backticks.
_CODE = re.compile(r"`([^`\n]+)`")
_SUFFIXES = ("", "k", "M", "G", "T")

# Labels of curves, with the unit if there is one: columns of a step, and the figures of `telemetry/metrics.py`.
LABELS: dict[str, str] = {name: figure.label for name, figure in FIGURES.items()} | {
    "experience_seconds": "Experience (s)",
    "length_max": "Longest response (tokens)",
    "length_mean": "Mean response (tokens)",
    "length_median": "Median response (tokens)",
    "length_p95": "95th percentile of responses (tokens)",
    "reward": "Reward",
    "rollout_reward": "Reward at rollout",
    "rollout_seconds": "Rollout (s)",
    "sync_seconds": "Weight sync (s)",
    "train_seconds": "Training (s)",
    "truncated": "Truncated responses",
}


def label(name: str) -> str:
    """Return the label of a curve; metrics that OpenRLHF named keep their name."""
    return LABELS.get(name, name)


def written(value: Any) -> str:
    """Return an option's value as a user types it: lists separated by spaces, "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, (list, tuple)):
        return " ".join(written(item) for item in value)
    return str(value)


def number(value: float | None, digits: int | None = None) -> str:
    """Format with `digits` decimals, else with about three digits: 12,345 or 43.1 or 0.0432."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    if digits is None:
        whole = 0 if value == 0 else math.floor(math.log10(abs(value)))
        # Below a thousandth, all decimals would be zeros.
        if value != 0 and whole < -_SIGNIFICANT:
            return f"{value:.{_SIGNIFICANT - 1}e}"
        digits = 0 if float(value).is_integer() else max(0, _SIGNIFICANT - 1 - whole)
    return wording.number(value, digits)


def compact(value: float | None) -> str:
    """Format for narrow places: 12.3k, 4.56M."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    size = abs(value)
    for suffix in _SUFFIXES:
        if size < _THOUSAND or suffix == _SUFFIXES[-1]:
            break
        size /= _THOUSAND
    return f"{number(math.copysign(size, value), None if suffix == '' else (0 if size >= 100 else 1))}{suffix}"


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share from 0 to 1: 57.3%."""
    return NO_VALUE if share is None or not math.isfinite(share) else f"{share * 100:.{digits}f}%"


def change(value: float | None, is_share: bool = False) -> str:
    """Format a difference with its sign: +0.043, −12; a difference of shares in percentage points: +1.2 points."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    size = f"{abs(value) * 100:.1f} points" if is_share else number(abs(value))
    sign = "±" if not any(digit in size for digit in "123456789") else ("+" if value > 0 else "−")
    return f"{sign}{size}"


def ratio(value: float | None) -> str:
    """Format a ratio: 1.42×."""
    return NO_VALUE if value is None or not math.isfinite(value) else f"{value:.2f}×"


def duration(seconds: float | None) -> str:
    """Format a duration in a suitable unit: 4.2 s, 3 min 12 s, 2 h 05 min, 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return NO_VALUE
    if seconds < _DAY:
        return wording.duration(max(0.0, seconds))
    days, rest = divmod(seconds, _DAY)
    return f"{days:.0f} d {rest // _HOUR:.0f} h"


def ago(then: float | None, now: float) -> str:
    """Format the time since `then` (unix seconds): just now, 5 min ago, 3 h ago, 2 d ago; after a month the date.

    Clocks of two machines may differ, so a moment in the future is written as "just now".
    """
    if then is None or not math.isfinite(then):
        return NO_VALUE
    seconds = now - then
    if seconds < _MINUTE:
        return "just now"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f} min ago"
    if seconds < _DAY:
        return f"{seconds // _HOUR:.0f} h ago"
    if seconds < _LONGEST_AGO:
        return f"{seconds // _DAY:.0f} d ago"
    return moment(then)[:10]


def moment(then: float | None) -> str:
    """Format a moment in UTC, the same for every reader: 2026-03-01 12:30:05 UTC."""
    if then is None or not math.isfinite(then):
        return NO_VALUE
    return datetime.fromtimestamp(then, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(then: float) -> str:
    """Format the time of day of a moment (unix seconds) whose day is shown beside it: 12:30:05 UTC."""
    return datetime.fromtimestamp(then, UTC).strftime("%H:%M:%S UTC")


def span(first: int, last: int, noun: str = "step") -> str:
    """Format one or several numbered things: step 8, steps 8 to 10."""
    return f"{noun} {number(first)}" if first == last else f"{noun}s {number(first)} to {number(last)}"


def iso(then: float) -> str:
    """Format for `<time datetime>`."""
    return datetime.fromtimestamp(then, UTC).isoformat(timespec="seconds")


def memory(size: float | None) -> str:
    """Format a size in memory in units of 1024: 512 B, 1.5 GiB."""
    if size is None or not math.isfinite(size):
        return NO_VALUE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < _KIB:
            return f"{number(size, 0 if unit == 'B' or size >= 100 else 1)} {unit}"
        size /= _KIB
    return f"{number(size, 1)} TiB"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: 1 engine, 2 engines."""
    return wording.counted(count, noun)


def share(part: float, whole: float | None) -> float | None:
    """Return `part` of `whole`, limited to 0 to 1, or None if `whole` is 0 or None."""
    return None if not whole else min(1.0, max(0.0, part / whole))


def breakable(name: str) -> Markup:
    """Return a metric's name that may break only after an underscore, a dot or a slash."""
    return Markup("<wbr>").join(_JOINTS.split(name))


def coded(sentence: str) -> Markup:
    """Return a sentence whose parts in backticks are shown as code."""
    parts = _CODE.split(sentence)
    return Markup().join(
        Markup("<code>{}</code>").format(one) if at % 2 else escape(one) for at, one in enumerate(parts)
    )


def short_path(name: str) -> str:
    """Return what tells a model or a folder apart: all of a name on the hub, the last two parts of a path."""
    return "/".join(name.split("/")[-2:]) if name.startswith("/") else name


def whole_options(command: str) -> Markup:
    """Return a command whose option names never break; browsers would break them after hyphens."""
    found, at = Markup(), 0
    for option in _OPTION.finditer(command):
        found += escape(command[at : option.start()]) + Markup('<span class="whole">{}</span>').format(option[0])
        at = option.end()
    return found + escape(command[at:])
