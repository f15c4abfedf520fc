"""A real run on a real Ray in real browsers: started from the web form, watched, stopped, resumed, cloned, compared."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from playwright.sync_api import expect

from tests.e2e.plane import RUN_TIMEOUT_S, Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LONG_MS = RUN_TIMEOUT_S * 1000
# More than it comes to: the page stops it.
EPISODES = "50"


def started_from_the_form(page: Any, base: str, command: str) -> str:
    """Paste a command, start what the form says; gives the run's uid."""
    page.goto(f"{base}/runs/new")
    page.get_by_text("Paste a command").click()
    page.locator("#pasted").fill(command)
    page.get_by_role("button", name="Fill the form").click()
    expect(page.locator("#f-name")).to_have_value("from-the-form")
    page.get_by_role("button", name="Start run").click()
    expect(page).to_have_url(re.compile(r"/runs/[0-9a-f]{16}$"))
    return str(page.url.rpartition("/")[2])


def badge(page: Any) -> Any:
    return page.locator(".run-title .badge")


def step_of(page: Any) -> int:
    """The step that the header shows."""
    found = re.match(r"\d+", page.locator("#run-header .progress-text").inner_text())
    return int(found[0]) if found else 0


def stop(page: Any) -> None:
    page.get_by_role("button", name="Stop").click()
    page.locator("[data-confirm-yes]").click()
    expect(badge(page)).to_have_text("stopped", timeout=LONG_MS)


def second_page(chromium: Any, plane: Plane, uid: str) -> Any:
    """The run's page in another browser profile, signed in."""
    page = chromium.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce").new_page()
    page.goto(plane.link.replace("/#", f"/runs/{uid}#"))
    expect(page).to_have_url(re.compile(f"/runs/{uid}$"))
    return page


def reaches(page: Any, step: int) -> None:
    """Waits until the header shows this step or a later one, without loading the page again."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while step_of(page) < step:
        assert time.monotonic() < deadline, f"step {step} was not shown within {RUN_TIMEOUT_S} s"
        page.wait_for_timeout(500)


def test_a_run_is_started_watched_stopped_resumed_cloned_and_compared_in_two_browsers(
    plane: Plane, chromium: Any, browser_page: Any, small_options: list[str], small_prompts: Path
) -> None:
    page, base = browser_page, plane.link.partition("/#")[0]
    page.goto(plane.link)
    expect(page).to_have_url(f"{base}/")
    options = [*small_options, "--data.prompt_dataset", str(small_prompts), "--vllm.num_engines", "1"]
    demo = ["rhyme", "demo", *options, "--train.num_episodes", EPISODES, "--run.name", "from-the-form"]
    uid = started_from_the_form(page, base, shlex.join(demo))
    other = second_page(chromium, plane, uid)

    # All of it without loading a page again.
    for one in (page, other):
        one.evaluate("window.untouched = true")
    expect(page.locator("#run-header .progress-text")).to_have_text(re.compile(r"^[1-9]"), timeout=LONG_MS)
    for one in (page, other):
        expect(badge(one)).to_have_text("running")
        expect(one.locator("[data-figure*='/figures/reward'][data-state='drawn']")).to_be_visible()

    # The server goes and comes back while the run goes on; the pages find their way back to both.
    plane.end()
    for one in (page, other):
        expect(one.locator("[data-connection]")).to_have_attribute("data-state", "away")
    before = step_of(page)
    plane.start_again()
    for one in (page, other):
        expect(one.locator("[data-connection]")).to_have_text("Live", timeout=60_000)
        reaches(one, before + 2)
        expect(badge(one)).to_have_text("running")
    stop(page)
    expect(badge(other)).to_have_text("stopped")
    assert page.evaluate("window.untouched") and other.evaluate("window.untouched")
    first = plane.show(uid)
    assert (first["status"], first["message"], first["step"]) == ("stopped", "stopped on request", step_of(page))

    # It goes on from where it stopped; the one browser starts that, both see it.
    page.get_by_role("button", name="Resume").click()
    reaches(other, first["step"] + 1)
    stop(other)
    expect(badge(page)).to_have_text("stopped")
    resumed = plane.show(uid)
    assert len(resumed["attempts"]) == 2 and resumed["step"] > first["step"]

    # And it is the start of another one, with which it is compared.
    page.get_by_role("link", name="Clone").click()
    expect(page.locator("#f-name")).to_have_value(re.compile("from-the-form"))
    expect(page.locator("[id='f-vllm.num_engines']")).to_have_value("1")
    page.locator("#f-name").fill("the-clone")
    window = page.locator("[id='f-histospec.window_max']")
    window.evaluate("input => { input.closest('details').open = true; }")
    window.fill("8")
    page.get_by_role("button", name="Start run").click()
    expect(page).to_have_url(re.compile(r"/runs/(?!new)[0-9a-f]{16}$"))
    clone = page.url.rpartition("/")[2]
    reaches(page, 2)
    stop(page)
    page.goto(f"{base}/")
    for one in (uid, clone):
        page.locator(f"#pick-{one}").check()
    page.get_by_role("button", name="Compare").click()
    expect(page).to_have_url(re.compile(r"/compare\?run="))
    expect(page.locator(".compared tbody tr")).to_have_count(2)
    expect(page.locator(".differences").filter(has_text="histospec.window_max")).to_contain_text("328")
    expect(page.locator("[data-figure][data-state='drawn']").first).to_be_visible()
    other.context.close()
    page.goto("about:blank")
    # What a browser writes when nobody answers.
    page.console_errors[:] = [error for error in page.console_errors if "Failed to load resource" not in error]
