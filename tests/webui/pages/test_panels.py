"""Panels in a browser: put together, taken apart, shared by their address and kept for other runs."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect


def test_panels_are_made_changed_shared_and_kept(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link("viewer", f"/runs/{dashboard.run_uid}/panels"))
    # Its text is there before its script is, which a choice needs.
    page.wait_for_url(f"{dashboard.url}/runs/{dashboard.run_uid}/panels")
    expect(page.get_by_text("Choose a first curve below")).to_be_visible()
    page.get_by_label("A new panel").select_option("reward")
    figures = page.locator("[data-figure]")
    expect(figures).to_have_count(1)
    expect(figures.first).to_have_attribute("data-state", "drawn")
    page.get_by_label("Another curve in panel 1").select_option("reward,rollout_reward")
    # The page before it may still be there, with its figure drawn.
    expect(figures.first.locator(".scatterlayer .trace")).to_have_count(2)
    expect(figures.first).to_have_attribute("data-state", "drawn")
    page.get_by_label("A new panel").select_option("length_mean")
    expect(figures).to_have_count(2)
    page.get_by_role("link", name="0.9", exact=True).click()
    expect(page).to_have_url(re.compile(r"smooth=0.9"))
    shared = page.url
    page.get_by_role("link", name="Reward at rollout , take it out").click()
    expect(figures.first).to_have_attribute("data-state", "drawn")
    page.get_by_role("link", name="Remove panel 2").click()
    expect(figures).to_have_count(1)
    # Another page without panels in its address shows the last ones.
    page.goto(dashboard.url + f"/runs/{dashboard.run_uid}/panels")
    expect(figures).to_have_count(1)
    expect(page).to_have_url(re.compile(r"panel=reward$"))
    page.get_by_role("link", name="Remove panel 1").click()
    expect(figures).to_have_count(0)
    page.goto(dashboard.url + f"/runs/{dashboard.run_uid}/panels")
    expect(figures).to_have_count(0)
    page.goto(shared)
    expect(figures).to_have_count(2)
    # A curve that the run does not have is a sentence in the figure's place.
    page.goto(dashboard.url + f"/runs/{dashboard.run_uid}/panels?panel=never+seen")
    expect(figures.first).to_have_attribute("data-state", "empty")
    expect(figures.first.locator("[data-figure-state]")).not_to_be_empty()
