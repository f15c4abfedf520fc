"""A real run on a real Ray, started from the web form, watched and stopped in a real Chromium."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from playwright.sync_api import expect

from tests.e2e.plane import RUN_TIMEOUT_S, Plane

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

LONG_MS = RUN_TIMEOUT_S * 1000
# More than it comes to: the page stops it.
EPISODES = "50"


def started_from_the_form(page: Any, base: str, command: str) -> str:
    """Paste a command, start what the form says; gives the run's uid."""
    page.goto(f"{base}/runs/new")
    page.get_by_text("Paste a command").click()
    page.locator("#pasted").fill(command)
    page.get_by_role("button", name="Fill the form from it").click()
    expect(page.locator("#f-name")).to_have_value("from-the-form")
    page.get_by_role("button", name="Start run").click()
    expect(page).to_have_url(re.compile(r"/runs/[0-9a-f]{16}$"))
    return str(page.url.rpartition("/")[2])


def badge(page: Any) -> Any:
    return page.locator(".run-title .badge")


def step_of(page: Any) -> int:
    """The step that the header shows."""
    return int(page.locator("#run-header .progress-text").inner_text().partition("/")[0])


def stop(page: Any) -> None:
    page.get_by_role("button", name="Stop").click()
    page.locator("[data-confirm-yes]").click()
    expect(badge(page)).to_have_text("stopped", timeout=LONG_MS)


def test_a_run_is_started_from_the_form_watched_and_stopped_there(
    plane: Plane, browser_page: Any, small_options: list[str], small_prompts: Path
) -> None:
    page, base = browser_page, plane.link.partition("/#")[0]
    page.goto(plane.link)
    expect(page).to_have_url(f"{base}/")
    options = [*small_options, "--data.prompt_dataset", str(small_prompts), "--vllm.num_engines", "1"]
    demo = ["rhyme", "demo", *options, "--train.num_episodes", EPISODES, "--run.name", "from-the-form"]
    uid = started_from_the_form(page, base, shlex.join(demo))

    # All of it without loading the page again.
    page.evaluate("window.untouched = true")
    progress = page.locator("#run-header .progress-text")
    expect(progress).to_have_text(re.compile(r"^[1-9]"), timeout=LONG_MS)
    expect(badge(page)).to_have_text("running")
    expect(page.locator("[data-figure*='/figures/reward'][data-state='drawn']")).to_be_visible()
    expect(progress).to_have_text(re.compile(r"^([2-9]|[1-9][0-9]+)"), timeout=LONG_MS)
    stop(page)
    assert page.evaluate("window.untouched")
    first = plane.show(uid)
    assert (first["status"], first["message"], first["step"]) == ("stopped", "stopped on request", step_of(page))

    # It can go on, and be the start of another one.
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.get_by_role("link", name="Clone").click()
    expect(page.locator("#f-name")).to_have_value(re.compile("from-the-form"))
    expect(page.locator("[id='f-vllm.num_engines']")).to_have_value("1")
