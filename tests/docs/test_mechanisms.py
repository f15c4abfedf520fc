"""The page of the papers' mechanisms: each section of a paper's design has rows, and each row names what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mechanisms.md"
# The sections that describe a mechanism; 5.1 and 6.1 of RhymeRL are observations, 4.1 of PAT is an overview.
SECTIONS = {
    "RhymeRL": {"4.2", "5.2", "5.3", "5.4", "6.2", "6.3", "6.4"},
    "RLHFSpec": {"5.1", "5.2", "5.3", "6.1", "6.2"},
    "PAT": {"4.2", "4.3", "4.4"},
}
WORDS = ("exact", "equivalent", "different", "not built")
WITH_REASON = re.compile(r"(different|not built)[^:;]*: \S")


def rows() -> list[tuple[str, list[str]]]:
    found, paper = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            paper = line[3:]
        elif re.match(r"\| \d", line):
            found.append((paper, [cell.strip() for cell in line.strip("|").split("|")]))
    return found


def test_each_section_has_a_row() -> None:
    named = {paper: {cells[0] for other, cells in rows() if other == paper} for paper in SECTIONS}
    assert named == SECTIONS


@pytest.mark.parametrize(
    ("paper", "cells"), rows(), ids=lambda value: value if isinstance(value, str) else value[1][:40]
)
def test_a_row_has_a_verdict_and_what_it_names_is_there(paper: str, cells: list[str]) -> None:
    section, mechanism, verdict, where, test = cells
    assert verdict.startswith(WORDS), (section, mechanism)
    for word in ("different", "not built"):
        if word in verdict:
            assert WITH_REASON.search(verdict), f"{paper} {section}, {mechanism}: say why"
    for path in (where, test):
        assert (ROOT / path.strip("`")).is_file(), path
