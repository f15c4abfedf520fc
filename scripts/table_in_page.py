"""Puts a table that a script made between two marks of a documentation page."""

from __future__ import annotations

from pathlib import Path


def put(page: Path, name: str, table: str) -> None:
    """Replace what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Raises ValueError without them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}")
