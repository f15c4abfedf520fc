"""Generated reference pages: they say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhyme_openrlhf.api.app import ROUTERS
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, EVENTS_FILE, LENGTHS_FILE, REPORTER_FILE, STOP_REQUEST
from scripts import field_meanings, reference_pages

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


def test_every_field_of_an_event_has_a_meaning_and_every_meaning_a_field() -> None:
    used: set[tuple[str, str]] = set()
    for name, described in [*((kind.kind, kind) for kind in EVENT_CLASSES), ("EngineCounters", EngineCounters)]:
        notes = reference_pages._field_notes(described)
        for field in reference_pages.fields(described):
            assert notes.get(field.name) or field_meanings.meaning(name, field.name), f"{name}: {field.name}"
            if field.name not in notes:
                used.add((name, field.name))
    by_name = {field for kind, field in used if (kind, field) not in field_meanings.OF_KIND}
    assert sorted(set(field_meanings.BY_NAME) - by_name) == [] and sorted(set(field_meanings.OF_KIND) - used) == []


def test_every_route_has_a_row() -> None:
    routes = sum(len(router.routes) for router in ROUTERS)
    rows = [line for line in reference_pages.addresses().splitlines() if line.startswith("| `")]
    # The two routes of health beside them.
    assert len(rows) >= routes + 2


@pytest.mark.parametrize("name", [CONFIG_FILE, EVENTS_FILE, LENGTHS_FILE, REPORTER_FILE, STOP_REQUEST])
def test_every_file_of_a_run_has_a_row(name: str) -> None:
    assert f"| `{name}` |" in reference_pages.files()
