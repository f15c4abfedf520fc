"""The writing of figures for people, in the progress display and in the summary alike.

Invariant: a figure that does not exist (None) or is not finite is written as NO_VALUE, never as 0.
"""

from __future__ import annotations

import math
import re

NO_VALUE = "-"
# Control characters but newline and tab, and those that turn the direction of writing.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECONDS_PER_MINUTE = 60
_SECONDS_PER_HOUR = 3600


def number(value: float | None, digits: int) -> str:
    """Return a figure with `digits` decimals and a comma between thousands: 2,310 or 0.43."""
    return NO_VALUE if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def without_controls(text: str) -> str:
    """Return what a run wrote as a terminal may get it: `\\x1b` written out, because it would obey the character.

    Newlines and tabs stay. A carriage return ends a line, as progress bars in a log mean it.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], lines)


def percent(share: float | None) -> str:
    """Return a share of 0 to 1 in whole percent: 64%."""
    return NO_VALUE if share is None or not math.isfinite(share) else f"{share:.0%}"


def clock(seconds: float) -> str:
    """Time since the start: 00:41, or 1:02:03 from an hour on. Clocks of two machines may disagree: never below 0."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, _SECONDS_PER_HOUR)
    minutes, rest = divmod(rest, _SECONDS_PER_MINUTE)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def duration(seconds: float) -> str:
    """Return a length of time in the unit that suits it: 4.2 s, 3 min 12 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return NO_VALUE
    if seconds < _SECONDS_PER_MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _SECONDS_PER_HOUR:
        return f"{whole // _SECONDS_PER_MINUTE} min {whole % _SECONDS_PER_MINUTE:02d} s"
    return f"{whole // _SECONDS_PER_HOUR} h {whole % _SECONDS_PER_HOUR // _SECONDS_PER_MINUTE:02d} min"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 engine, 2 engines."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
