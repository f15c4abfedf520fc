"""Generated reference pages: they say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhyme_openrlhf.api.app import ROUTERS
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, EVENTS_FILE, LENGTHS_FILE, REPORTER_FILE, STOP_REQUEST
from scripts import reference_pages

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    page = reference_pages.PAGES[name]()
    assert (DOCS / name).read_text() == page, "python scripts/reference_pages.py --write"


def test_every_kind_of_event_has_a_section() -> None:
    page = reference_pages.events()
    assert [kind.kind for kind in EVENT_CLASSES if f"\n## {kind.kind}\n" not in page] == []
    # Names of the Python module stand for nothing in the JSON.
    assert [kind.__name__ for kind in EVENT_CLASSES if f"{kind.__name__}." in page] == []


def test_every_route_has_a_row() -> None:
    routes = sum(len(router.routes) for router in ROUTERS)
    rows = [line for line in reference_pages.addresses().splitlines() if line.startswith("| `")]
    # The two routes of health beside them.
    assert len(rows) >= routes + 2


@pytest.mark.parametrize("name", [CONFIG_FILE, EVENTS_FILE, LENGTHS_FILE, REPORTER_FILE, STOP_REQUEST])
def test_every_file_of_a_run_has_a_row(name: str) -> None:
    assert f"| `{name}` |" in reference_pages.files()
