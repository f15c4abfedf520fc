"""A first visit in a real browser, from the printed link to a figure."""

import re
from typing import Any

from playwright.sync_api import expect


def test_the_link_leads_to_the_runs_a_run_and_its_figure(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link())
    expect(page).to_have_url(f"{dashboard.url}/")
    page.get_by_role("link", name="demo").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("demo")
    figure = page.locator("[data-figure]").first
    expect(figure).to_have_attribute("data-state", "drawn")
    # The mean, and the two edges of its spread.
    assert figure.locator(".scatterlayer .trace path.js-line").count() == 3
    described = figure.locator("[data-figure-plot]")
    expect(described).to_have_attribute("aria-label", re.compile("^Mean reward of each step's samples. First 0.260"))


def test_a_figure_without_data_says_so_in_one_sentence(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link())
    page.get_by_role("link", name="demo").click()
    page.get_by_role("link", name="Scheduling").click()
    state = page.locator("[data-figure][data-state='empty'] [data-figure-state]").filter(has_text="--move.enable")
    expect(state).to_contain_text("Samples can move with --move.enable or --reallocation.enable.")
    # The names of options are in its lines: as children of the box each would have one of its own.
    expect(state.locator("> *")).to_have_count(1)
    expect(state.locator("span.whole")).to_have_count(2)
