"""An event is declared once: its class alone makes the JSON form, the check, the kinds of the API and the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rhyme_openrlhf.api.app")

from rhyme_openrlhf.telemetry import events

ROOT = Path(__file__).parents[2]
CLASS = '''class CacheCleared(Event, frozen=True):
    """An engine emptied its prefix cache."""

    progress: ClassVar[bool] = False
    step: Int32
    engine: Int32


'''
PROGRAM = """
import importlib.util, json, sys
import rhyme_openrlhf.telemetry
spec = importlib.util.spec_from_file_location("rhyme_openrlhf.telemetry.events", sys.argv[1])
events = rhyme_openrlhf.telemetry.events = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(events)
sys.path.insert(0, "scripts")
import reference_pages
from rhyme_openrlhf.telemetry import event_json
from rhyme_openrlhf.api.ingest.validation import BadEventError, prepare
from rhyme_openrlhf.api.read.events import EVENT_KINDS
event = events.CacheCleared(3, 1)
row = event_json.to_json(event, 1.0, "engine-1", 0)
assert event_json.parse(json.loads(json.dumps(row))).event == event
assert prepare([row])[0].event == event
assert "cache_cleared" in EVENT_KINDS
assert "An engine emptied its prefix cache." in reference_pages.events()
try:
    prepare([{**row, "step": "three"}])
except BadEventError as error:
    print(error)
"""


@pytest.mark.usefixtures("starts_python")
def test_one_class_adds_one(tmp_path: Path) -> None:
    before, found, behind = Path(events.__file__).read_text().partition("EVENT_CLASSES: ")
    assert found
    (tmp_path / "events.py").write_text(before + CLASS + found + behind)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "events.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "event 'cache_cleared', field 'step': expected `int`, got `str`" in done.stdout
