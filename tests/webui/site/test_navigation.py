"""The main menu and the tabs of a run, followed by a person: every link in Chromium."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from rhyme_openrlhf.webui.site.navigation import MENU, RUN_TABS


def follow(page: Any, dashboard: Any, within: str, titles: list[str]) -> None:
    """Click every link of a navigation. Each must lead to a page of that name."""
    for title in titles:
        page.get_by_role("navigation", name=within).get_by_role("link", name=title, exact=True).click()
        shown = page.get_by_role("navigation", name=within).get_by_role("link", name=title, exact=True)
        expect(shown).to_have_attribute("aria-current", "page")
        expect(page.locator("main")).not_to_be_empty()


def test_every_link_of_the_menu_leads_to_its_page(dashboard: Any, browser_page: Any) -> None:
    browser_page.goto(dashboard.link("operator", "/settings"))
    follow(browser_page, dashboard, "Main", [entry.title for entry in MENU])


def test_every_tab_of_a_run_leads_to_its_page(dashboard: Any, browser_page: Any) -> None:
    browser_page.goto(dashboard.link("viewer", f"/runs/{dashboard.run_uid}"))
    follow(browser_page, dashboard, "Run", [entry.title for entry in RUN_TABS])


def test_a_viewer_has_no_entry_for_operators(dashboard: Any, browser_page: Any) -> None:
    browser_page.goto(dashboard.link("viewer", "/"))
    menu = browser_page.get_by_role("navigation", name="Main").get_by_role("link")
    expect(menu).to_have_text([entry.title for entry in MENU if not entry.operator])
