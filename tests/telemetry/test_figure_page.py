"""Figures as one page: in real Chromium, in the reader's colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from rhyme_openrlhf.telemetry.figure_page import page

COLOURS = """() => {
  const layout = document.querySelector(".plotly-graph-div").layout;
  const of = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [layout.paper_bgcolor === of("--page"), layout.font.color === of("--text"), layout.paper_bgcolor];
}"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    figures = [go.Figure(go.Bar(x=["a"], y=[1])), go.Figure(go.Scatter(x=[1, 2], y=[1, 2]))]
    path = tmp_path / "page.html"
    path.write_text(page("<of> figures", "A & B", "<p>said</p>", figures), encoding="utf-8")
    return path


def test_the_script_is_in_the_page_once_and_words_are_escaped(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert "<script src" not in text and text.count("plotly.js v") == 1
    assert "<title>&lt;of&gt; figures</title>" in text and "<h1>A &amp; B</h1>" in text


def test_figures_have_the_colours_of_the_readers_system(chromium: Any, written: Path) -> None:
    context = chromium.new_context(color_scheme="dark", offline=True)
    opened = context.new_page()
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.goto(written.as_uri())
    opened.wait_for_selector(".plotly-graph-div .main-svg")
    dark = opened.evaluate(COLOURS)
    opened.emulate_media(color_scheme="light")
    opened.wait_for_function(f"before => ({COLOURS})()[2] !== before", arg=dark[2])
    light = opened.evaluate(COLOURS)
    context.close()
    assert dark[:2] == light[:2] == [True, True] and not faults
