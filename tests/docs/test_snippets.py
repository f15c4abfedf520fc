"""Figures and statements of status stand once: other pages include them, and copies are as their source."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import snippets

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# A gain, as a table or a sentence writes it: 1.45x, 2.1 times as fast.
GAIN = re.compile(r"(?<![\w.#-])(\d+\.\d+)(?:x\b| times\b)")
# What a newcomer reads. These pages have no measured gain of their own: they include it from where it stands.
FOR_NEWCOMERS = sorted(
    [ROOT / "README.md", DOCS / "index.md", DOCS / "limits.md", DOCS / "glossary.md"]
    + [page for folder in ("start", "guides", "operate", "learn") for page in (DOCS / folder).glob("*.md")]
)
# A statement of what ran on a GPU. It stands in docs/gpu.md and docs/limits.md; other pages link there.
STATUS = re.compile(r"\b(?:run|ran|measured|tested|tried)\b(?: \w+){0,3} on (?:a |any |real )?GPUs?\b(?!\?)")
STATED = ("gpu.md", "gpu-findings.md", "limits.md", "results.md")
HEADLINES = snippets.marked(DOCS / "results.md", "headlines")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", snippets.PAGES, ids=named)
def test_copies_are_as_their_source(page: Path) -> None:
    assert page.read_text() == snippets.filled(page), "python scripts/snippets.py --write"


@pytest.mark.parametrize("page", FOR_NEWCOMERS, ids=named)
def test_a_page_for_newcomers_has_no_gain_of_its_own(page: Path) -> None:
    assert GAIN.findall(snippets.without_copies(page.read_text())) == []


@pytest.mark.parametrize("page", [page for page in snippets.PAGES if page.name not in STATED], ids=named)
def test_what_ran_on_a_gpu_is_said_once(page: Path) -> None:
    own = re.sub(r"\[[^\]]*\]\([^)]*\)", "", " ".join(snippets.without_copies(page.read_text()).split()))
    assert [found.group() for found in STATUS.finditer(own)] == [], "link to docs/limits.md#on-gpus instead"


def test_each_gain_of_the_first_table_stands_in_a_table_of_results() -> None:
    below = (DOCS / "results.md").read_text().replace(HEADLINES, "") + (DOCS / "gpu.md").read_text()
    gains = GAIN.findall(HEADLINES)
    assert len(gains) >= 10
    assert [gain for gain in gains if not re.search(rf"(?<![\d.]){re.escape(gain)}(?![\d])", below)] == []


def test_a_copy_that_has_drifted_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    source, page = tmp_path / "docs" / "a.md", tmp_path / "README.md"
    source.parent.mkdir()
    source.write_text("<!-- gain: begin -->\n1.5x, [how](b.md#c) and [here](#d)\n<!-- gain: end -->\n")
    mark = "include docs/a.md#gain"
    page.write_text(f"own 2.0x\n<!-- {mark}: begin -->\n1.4x\n<!-- {mark}: end -->\n")
    copied = "1.5x, [how](docs/b.md#c) and [here](docs/a.md#d)"
    wanted = f"own 2.0x\n<!-- {mark}: begin -->\n{copied}\n<!-- {mark}: end -->\n"
    assert snippets.filled(page) == wanted
    assert GAIN.findall(snippets.without_copies(wanted)) == ["2.0"]
    page.write_text(f"<!-- {mark}s: begin -->\n<!-- {mark}s: end -->\n")
    with pytest.raises(ValueError, match="has no part between <!-- gains: begin -->"):
        snippets.filled(page)
