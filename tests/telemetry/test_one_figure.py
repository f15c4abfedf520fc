"""A figure is declared once: one entry makes it a function of counters, a curve of the API, and a label of the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rhyme_openrlhf.api.app")

from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES, FIGURES, EngineCounters
from rhyme_openrlhf.webui.site import text
from tests.api.http_service import api, make_api, numbered, record, store  # noqa: F401 (fixtures)

ENTRY = """
from rhyme_openrlhf.telemetry import metrics
metrics._figure(
    "rejected_share", "Rejected share", "(drafted - accepted) / drafted", "Share of drafted tokens that were rejected"
)
import pytest
raise SystemExit(pytest.main(["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-n", "0", "-k", "curve", FILE]))
"""


def test_each_is_a_curve_with_a_label(api: Any, record: Any) -> None:  # noqa: F811
    api.announce()
    api.send(record())
    answer = api.viewer.get(f"/api/v1/runs/{'a' * 16}/series", params={"names": ",".join(FIGURES)})
    values = {curve["name"]: curve["values"][0] for curve in answer.json()["curves"]}
    # Of two engines, as `record` has them.
    counters = EngineCounters(200, 180, 60, 120, 100, 20, 80, 40, 4.0, 0.5, 8, 10, 6)
    known = {*COUNTER_NAMES, "engine_tokens"} - {"response_tokens"}
    for name, figure in FIGURES.items():
        assert text.label(name) == figure.label != "" and figure.sentence and not figure.sentence.endswith("."), name
        if figure.formula and known.issuperset(figure.columns):
            assert values[name] == pytest.approx(figure(counters)), name
        else:
            assert values[name] is not None, name
    assert "rejected_share" not in FIGURES or values["rejected_share"] == 0.5


@pytest.mark.usefixtures("starts_python")
def test_one_entry_adds_one() -> None:
    program = ENTRY.replace("FILE", repr(str(Path(__file__))))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
