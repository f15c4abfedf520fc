"""How the dashboard writes numbers, shares, durations and times; and what curves and states are called.

Pure. Nothing else in `webui/` formats a value: templates use these functions as filters. Lengths of time and digits are
those of `telemetry/wording.py`, so that the page, the terminal and the summary write one value in one way.
Invariant: a value that does not exist (None) or is not finite is written as NO_VALUE, never as 0.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

from rhyme_openrlhf.telemetry import wording

NO_VALUE = "–"
_MINUTE = 60.0
_HOUR = 3600.0
_DAY = 86_400.0
# Beyond it nobody counts days, and the date says more.
_LONGEST_AGO = 30 * _DAY
# Three digits are what people compare; more is in the export.
_SIGNIFICANT = 3
_THOUSAND = 1000.0
_KIB = 1024.0
_SUFFIXES = ("", "k", "M", "G", "T")

# Names of curves (`api/read/curves.py`: columns, figures) and what they are called, with the unit where there is one.
LABELS: dict[str, str] = {
    "acceptance_rate": "Acceptance rate",
    "bubble_fraction": "Bubble fraction",
    "decode_step_ms": "Decode step (ms)",
    "drafted_per_draft": "Tokens per draft",
    "drafting_share": "Share of busy time spent drafting",
    "experience_seconds": "Experience (s)",
    "history_share": "Earlier responses",
    "length_max": "Longest response (tokens)",
    "length_mean": "Mean response (tokens)",
    "length_median": "Median response (tokens)",
    "length_p95": "95th percentile of responses (tokens)",
    "own_share": "The response so far",
    "reward": "Reward",
    "rollout_reward": "Reward at rollout",
    "rollout_seconds": "Rollout (s)",
    "siblings_share": "Siblings of the same rollout",
    "speculation_rate": "Speculation rate",
    "step_seconds": "Step time (s)",
    "sync_seconds": "Weight sync (s)",
    "tokens_per_second": "Throughput (tokens/s)",
    "tokens_per_step": "Tokens per sample and decode step",
    "train_seconds": "Training (s)",
    "truncated": "Truncated responses",
    "truncated_share": "Truncated share of responses",
}


def label(name: str) -> str:
    """What a curve is called; a metric that OpenRLHF named keeps its name."""
    return LABELS.get(name, name)


def is_value(value: float | None) -> bool:
    """Whether there is anything to write."""
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int | None = None) -> str:
    """With `digits` decimals, else with about three digits: 12,345 or 43.1 or 0.0432."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    if digits is None:
        whole = 0 if value == 0 else math.floor(math.log10(abs(value)))
        # Below a thousandth of one, decimals would be all zeros.
        if value != 0 and whole < -_SIGNIFICANT:
            return f"{value:.{_SIGNIFICANT - 1}e}"
        digits = 0 if float(value).is_integer() else max(0, _SIGNIFICANT - 1 - whole)
    return wording.number(value, digits)


def compact(value: float | None) -> str:
    """For narrow places: 12.3k, 4.56M."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    size = abs(value)
    for suffix in _SUFFIXES:
        if size < _THOUSAND or suffix == _SUFFIXES[-1]:
            break
        size /= _THOUSAND
    return f"{number(math.copysign(size, value), None if suffix == '' else (0 if size >= 100 else 1))}{suffix}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of 0 to 1: 57.3%."""
    return NO_VALUE if share is None or not math.isfinite(share) else f"{share * 100:.{digits}f}%"


def change(value: float | None, is_share: bool = False) -> str:
    """A difference with its sign: +0.043, −12; of shares in percentage points: +1.2 pp."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    size = f"{abs(value) * 100:.1f} pp" if is_share else number(abs(value))
    sign = "±" if not any(digit in size for digit in "123456789") else ("+" if value > 0 else "−")
    return f"{sign}{size}"


def ratio(value: float | None) -> str:
    """How many times as much: 1.42×."""
    return NO_VALUE if value is None or not math.isfinite(value) else f"{value:.2f}×"


def duration(seconds: float | None) -> str:
    """A length of time in the unit that suits it: 4.2 s, 3 min 12 s, 2 h 05 min, 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return NO_VALUE
    if seconds < _DAY:
        return wording.duration(max(0.0, seconds))
    days, rest = divmod(seconds, _DAY)
    return f"{days:.0f} d {rest // _HOUR:.0f} h"


def ago(then: float | None, now: float) -> str:
    """How long ago (unix seconds): just now, 5 min ago, 3 h ago, 2 d ago; after a month the date.

    Clocks of two machines may disagree: what seems to come from the future is just now.
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
    """A time in full, in UTC, which is the same for everybody who gets the link: 2026-03-01 12:30:05 UTC."""
    if then is None or not math.isfinite(then):
        return NO_VALUE
    return datetime.fromtimestamp(then, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(then: float) -> str:
    """The time of day of a moment (unix seconds) that is beside others of its day: 12:30:05 UTC."""
    return datetime.fromtimestamp(then, UTC).strftime("%H:%M:%S UTC")


def span(first: int, last: int, noun: str = "step") -> str:
    """One or several of a numbered thing: step 8, steps 8 to 10."""
    return f"{noun} {number(first)}" if first == last else f"{noun}s {number(first)} to {number(last)}"


def iso(then: float) -> str:
    """For `<time datetime>`."""
    return datetime.fromtimestamp(then, UTC).isoformat(timespec="seconds")


def memory(size: float | None) -> str:
    """A size in memory, in units of 1024: 512 B, 1.5 GiB."""
    if size is None or not math.isfinite(size):
        return NO_VALUE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < _KIB:
            return f"{number(size, 0 if unit == 'B' or size >= 100 else 1)} {unit}"
        size /= _KIB
    return f"{number(size, 1)} TiB"


def counted(count: int, noun: str) -> str:
    """A count with its noun: 1 engine, 2 engines."""
    return wording.counted(count, noun)


def share(part: float, whole: float | None) -> float | None:
    """`part` of `whole`, between 0 and 1; None without a whole."""
    return None if not whole else min(1.0, max(0.0, part / whole))
