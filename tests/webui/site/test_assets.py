"""plotly.js as pages get it: the version that the `plotly` package draws for, with all that the figures use."""

import ast
import re
from importlib import resources
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from rhyme_openrlhf.webui import figures
from rhyme_openrlhf.webui.site.assets import FOLDER, PLOTLY

# Kinds of traces in plotly.js's basic bundle.
BUNDLED = {"scatter", "bar", "pie"}


def test_the_bundle_is_of_the_version_that_the_package_draws_for() -> None:
    shipped = resources.files("plotly").joinpath("package_data/plotly.min.js").read_text()[:200]
    # After an update of the `plotly` package: take the file of the same version from npm's plotly.js-basic-dist-min.
    (wanted,) = re.findall(r"plotly\.js v([\d.]+)", shipped)
    assert f"plotly.js (basic - minified) v{wanted}" in (FOLDER / PLOTLY).read_text()[:200]


def test_the_bundle_draws_every_kind_of_trace_of_the_figures() -> None:
    used = set()
    for file in Path(figures.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "go":
                used.add(node.attr.lower())
    assert used - {"figure", "layout"} <= BUNDLED


def test_browsers_have_these_kinds_of_traces(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link(path=f"/runs/{dashboard.run_uid}"))
    expect(page.locator("[data-figure]").first).to_have_attribute("data-state", "drawn")
    assert set(page.evaluate("Object.keys(Plotly.PlotSchema.get().traces)")) == BUNDLED
