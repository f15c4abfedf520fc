"""The page of webhooks in a real browser: made, tested, and in the log; a viewer sees nothing of it."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from tests.api.webhooks.receivers import receiving


def test_a_webhook_is_made_tested_and_deleted(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link())
    expect(page).to_have_url(f"{dashboard.url}/")
    page.goto(f"{dashboard.url}/settings")
    page.get_by_role("link", name="Messages to Slack or other services").click()
    with receiving() as receiver:
        page.get_by_label("Name").fill("team")
        page.get_by_label("Address").fill(receiver.url)
        page.get_by_label("failed").uncheck()
        page.get_by_role("button", name="Create webhook").click()
        expect(page.locator("[data-issue-problem]")).to_contain_text("events")
        # The browser notes the refusal itself.
        assert "422" in page.console_errors.pop()
        page.get_by_label("failed").check()
        page.get_by_label("stalled", exact=True).check()
        page.get_by_label("Stalled after minutes").fill("7.5")
        page.get_by_role("button", name="Create webhook").click()
        secret = page.locator("[data-issued-token]")
        expect(secret).to_have_text(re.compile("^whsec_"))
        key = secret.text_content() or ""
        hook = page.locator("#webhooks").get_by_role("row").filter(has_text=receiver.url)
        expect(hook).to_contain_text("stalled 7.5")
        hook.get_by_role("link", name="Edit").click()
        expect(page.get_by_role("heading", name="Edit “team”")).to_be_visible()
        expect(page.get_by_label("Stalled after minutes")).to_have_value("7.5")
        page.get_by_label("Stalled after minutes").fill("9")
        page.get_by_label("failed").uncheck()
        page.get_by_role("button", name="Save changes").click()
        expect(page.get_by_role("heading", name="New webhook")).to_be_visible()
        expect(hook).to_contain_text("stalled 9")
        expect(hook).not_to_contain_text("failed")
        hook.get_by_role("button", name="Test").click()
        message = page.get_by_role("row").filter(has_text="This is a test of the webhook “team”")
        expect(message).to_contain_text("delivered")
        assert receiver.verified(key)
        receiver.answer = b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n"
        hook.get_by_role("button", name="Test").click()
        expect(message.first).to_contain_text("failed: it answered 410")
    hook.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("There is no webhook yet.")).to_be_visible()
    expect(message).to_have_count(0)
