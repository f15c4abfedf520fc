"""A way through the timeline: from the overview's bars to a step, and on with the keyboard."""

from typing import Any

from playwright.sync_api import expect


def test_a_click_on_a_bar_shows_its_step_and_the_arrow_keys_go_on(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link(path=f"/runs/{dashboard.run_uid}"))
    bars = page.locator('[data-figure*="/bubbles"]')
    bars.scroll_into_view_if_needed()
    expect(bars).to_have_attribute("data-state", "drawn")
    bars.locator(".barlayer .point").nth(4).click(force=True)
    page.wait_for_url(f"{dashboard.url}/runs/{dashboard.run_uid}/timeline?step=5")
    lanes = page.locator('[data-figure*="/timeline"]')
    expect(lanes).to_have_attribute("data-state", "drawn")
    assert lanes.locator(".barlayer .point").count() > 20
    expect(page.locator(".step-now")).to_have_text("Steps 3 to 5 of 10")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".step-now")).to_have_text("Steps 6 to 8 of 10")
    page.go_back()
    expect(page.locator(".step-now")).to_have_text("Steps 3 to 5 of 10")
    page.locator("select[name=steps]").select_option("1")
    expect(page.locator(".step-now")).to_have_text("Step 5 of 10")
