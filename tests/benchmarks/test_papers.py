"""The page of the papers' figures is of today's code, and has a row for each figure and table."""

from __future__ import annotations

import re
from pathlib import Path

import papers
import pytest
from papers import PAGE, sources, stamp
from papers_inputs import end_to_end


def test_the_page_is_of_todays_code() -> None:
    assert f"<!-- {stamp()} -->" in PAGE.read_text(), (
        "docs/papers.md is older than the code that makes its tables: run python benchmarks/papers.py --write"
    )


def test_the_stamp_follows_decisions_and_not_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = sources()
    names = {path.name for path in everything}
    assert {"papers.py", "run.py", "reallocation.py", "outliers.py", "tp_switch.py", "step_model.py"} <= names
    original = next(path for path in everything if path.name == "outliers.py")
    copy = tmp_path / "outliers.py"
    text = original.read_text()

    def of(path: Path) -> str:
        # Among a few of them, because each is read for itself.
        monkeypatch.setattr(papers, "sources", lambda: [*everything[:2], path, *everything[-2:]])
        return stamp()

    def stamped(changed: str) -> str:
        copy.write_text(changed)
        return of(copy)

    before = of(original)
    assert stamped(text) == before
    assert stamped(f"# a comment\n{text}") == before
    assert stamped(text.replace('"""', '"""Other words. ', 1)) == before
    assert stamped(re.sub(r"ALPHA = [\d.]+", "ALPHA = 0.25", text)) != before


def test_every_figure_and_table_has_a_row() -> None:
    named: dict[str, set[int]] = {}
    for line in PAGE.read_text().splitlines():
        if found := re.match(r"\| (RhymeRL|RLHFSpec|PAT) ([^|]*)\|", line):
            figures = re.sub(r"(tables?|section) [\d., ]+", "", found[2])
            named.setdefault(found[1], set()).update(int(one) for one in re.findall(r"\d+", figures))
    assert named["RhymeRL"] >= set(range(1, 20))
    assert named["RLHFSpec"] >= set(range(1, 15)) and named["PAT"] >= set(range(1, 15))


def test_a_gain_of_a_part_is_less_of_the_whole() -> None:
    assert end_to_end(2.0, 1.0) == 2.0 and end_to_end(2.0, 0.5) == 1 / 0.75 and end_to_end(3.0, 0.0) == 1.0
