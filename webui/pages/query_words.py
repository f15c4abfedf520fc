"""Query parameters that a page's form sends as text: what is not chosen comes empty, and is no error."""

from __future__ import annotations


def whole_number(text: str) -> int | None:
    """The number that `text` writes in decimal digits alone, 0 or more; None for anything else."""
    # isdigit() takes every script's digits, and superscripts, which int() refuses.
    return int(text) if text.isascii() and text.isdigit() else None
