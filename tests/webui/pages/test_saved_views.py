"""Saved views on the page of runs: saved, opened, renamed and deleted in a real browser."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect


def test_a_view_is_saved_opened_renamed_and_deleted(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link())
    expect(page).to_have_url(f"{dashboard.url}/")
    page.goto(f"{dashboard.url}/?filter=reward+%3E+0&sort=name&direction=asc&values=metric.reward&columns=status")
    views = page.locator("#views")
    views.locator("summary").first.click()
    page.get_by_label("Save what is shown as").fill("good & <bold>")
    page.get_by_label("For everyone").check()
    page.get_by_role("button", name="Save view").click()
    expect(views.locator("ul")).to_have_count(1)
    (view,) = dashboard.signed_in("viewer").get("/api/v1/views").json()["items"]
    assert (view["name"], view["filter"], view["sort"], view["direction"]) == (
        "good & <bold>",
        "reward > 0",
        "name",
        "asc",
    )
    assert (view["values"], view["columns"], view["shared"]) == (["metric.reward"], ["status"], True)
    # From the plain list to the view.
    page.goto(f"{dashboard.url}/")
    views.locator("summary").first.click()
    link = page.get_by_role("link", name="good & <bold>")
    expect(link).not_to_have_attribute("aria-current", "true")
    link.click()
    expect(page.get_by_role("columnheader", name="reward")).to_be_visible()
    expect(page.get_by_role("textbox", name="Condition")).to_have_value("reward > 0")
    views.locator("summary").first.click()
    expect(link).to_have_attribute("aria-current", "true")
    views.get_by_text("Rename", exact=True).first.click()
    page.get_by_label("New name of").fill("better")
    views.get_by_role("button", name="Rename").click()
    # The page comes anew, with the menu closed: a click before that would close the old one's.
    expect(views).not_to_have_attribute("open", "")
    views.locator("summary").first.click()
    expect(page.get_by_role("link", name="better")).to_be_visible()
    views.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(views).not_to_have_attribute("open", "")
    views.locator("summary").first.click()
    expect(views.get_by_text("A view is this page’s filter")).to_be_visible()


def test_a_viewer_saves_views_for_itself_alone(dashboard: Any) -> None:
    operator, viewer = dashboard.signed_in(), dashboard.signed_in("viewer")
    for client, name, shared in ((operator, "for all", True), (operator, "secret", False), (viewer, "own", False)):
        answer = client.post("/api/v1/views", json={"name": name, "shared": shared})
        assert answer.status_code == 201, answer.text
    page = viewer.get("/").text
    assert "for all" in page and "secret" not in page and "For everyone" not in page
    # A view for everyone has no buttons for a viewer; the viewer's own has two.
    assert page.count('data-action="DELETE /api/v1/views/') == page.count('data-action="PATCH /api/v1/views/') == 1
