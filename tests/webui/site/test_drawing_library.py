"""plotly.js as pages get it: smaller than it is shipped, and with all that the figures use."""

import ast
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from rhyme_openrlhf.webui.figures import drawing
from rhyme_openrlhf.webui.site.drawing_library import TRACES, TRIED, drawing_library, read_at_once, reduced

SHIPPED = resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
# In the form of plotly.js: a core, three kinds of traces, what they ask for, and one that is handed on.
MODULES = (
    "var lib=(()=>{var W=(e)=>e;"
    'var core=W((a,b)=>{"use strict";b.exports={t:tools()}});'
    'var tools=W((a,b)=>{"use strict";b.exports=1});'
    'var bar=W((a,b)=>{"use strict";b.exports={moduleType:"trace",name:"bar"}});'
    'var globe=W((a,b)=>{"use strict";var w=world();b.exports={moduleType:"trace",name:"globe",f:parts()}});'
    'var world=W((a,b)=>{"use strict";b.exports="}"});function helper(){return size}var size,'
    'parts=Ea(()=>{"use strict";size=tools()});'
    'var handed=W((a,b)=>{"use strict";b.exports=globe()});'
    "var all=W((a,b)=>{var c=core();c.register([bar(),handed()]);b.exports=c});return all();})();/*! a licence */"
)


def test_what_nothing_asks_for_is_left_out() -> None:
    assert reduced(MODULES, {"bar"}) == (
        "var lib=(()=>{var W=(e)=>e;"
        'var core=W((a,b)=>{"use strict";b.exports={t:tools()}});'
        'var tools=W((a,b)=>{"use strict";b.exports=1});'
        'var bar=W((a,b)=>{"use strict";b.exports={moduleType:"trace",name:"bar"}});'
        "var size,parts=Ea(()=>{});"
        "var all=W((a,b)=>{var c=core();c.register([bar()]);b.exports=c});return all();})();/*! a licence */"
    )
    assert reduced(MODULES, {"bar", "globe"}) == MODULES


def test_another_form_is_said() -> None:
    with pytest.raises(ValueError, match="cannot find"):
        reduced("var Plotly={};", TRACES)
    with pytest.raises(ValueError, match="cannot find"):
        read_at_once("var Plotly={};")


def test_its_function_stands_in_parentheses() -> None:
    given = "(function(root, factory) {\n}(typeof self !== 'undefined' ? self : this, () => {\nreturn 1;\n}));"
    assert read_at_once(given).endswith("self : this, (() => {\nreturn 1;\n})));")


def test_every_kind_of_trace_of_the_figures_is_kept() -> None:
    used = set()
    for file in Path(drawing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "go":
                used.add(node.attr.lower())
    assert used - {"figure", "layout"} == TRACES


def test_the_installed_one_is_reduced() -> None:
    # After an update of the `plotly` package: look at every page with the new file, then add its digest to TRIED.
    assert hashlib.sha256(SHIPPED).hexdigest() in TRIED
    assert len(drawing_library()) < len(SHIPPED) / 4


def test_browsers_have_these_kinds_of_traces(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link(path=f"/runs/{dashboard.run_uid}"))
    expect(page.locator("[data-figure]").first).to_have_attribute("data-state", "drawn")
    assert set(page.evaluate("Object.keys(Plotly.PlotSchema.get().traces)")) == TRACES
