"""Fixtures of tests that look at a page as people do: in a real Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

# A machine that does other work too draws a page slowly.
LIMIT_MS = 60_000
# Debian's name, and those of other distributions.
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def chromium(starts_browser: None) -> Iterator[Any]:
    """A real browser; playwright downloads none.

    It ends with its module, because playwright's event loop runs in this thread until then, and a test of another
    module could not start its own.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    executable = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        # As root, which containers are, Chromium does not start with its sandbox.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        sync_api.expect.set_options(timeout=LIMIT_MS)
        yield browser
        browser.close()


@pytest.fixture
def browser_page(chromium: Any) -> Iterator[Any]:
    """A page of a fresh browser profile. The test fails when the page has had an error in its console."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.console_errors = errors
    yield page
    context.close()
    assert errors == []
