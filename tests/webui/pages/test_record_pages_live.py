"""Logs as a reader uses them, and hostile text on every page that shows what a run wrote; in a real Chromium."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from rhyme_openrlhf.api.ingest.importer import import_directory

# Runs if any of it becomes more than text.
HOSTILE = "</pre><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>{{ 7*7 }}\x1b[31m"
LINES = 60_000
WAIT_SECONDS = 60


def hostile_run(dashboard: Any, run_directory: Path) -> str:
    """The recorded run with a hostile name, note, responses and logs; its uid."""
    config = {"settings": {"run": {"name": HOSTILE[:150]}}, "arguments": {}}
    (run_directory / "config.json").write_text(json.dumps(config))
    rows = (run_directory / "events.jsonl").read_text().splitlines()
    note = {
        "kind": "note",
        "time": time.time(),
        "source": HOSTILE[:60],
        "sequence": 0,
        "level": "warning",
        "text": HOSTILE,
    }
    (run_directory / "events.jsonl").write_text("\n".join([*rows, json.dumps(note)]) + "\n")
    logs = run_directory / "logs"
    logs.mkdir()
    (logs / "driver.log").write_text("".join(f"line {number} {'x' * 60}\n" for number in range(LINES)))
    (logs / "hostile.log").write_text(f"{HOSTILE}\n" * 3)
    samples = run_directory / "samples"
    samples.mkdir()
    pieces = [["", HOSTILE], ["history", HOSTILE], [HOSTILE, "z"]]
    record = {
        "step": 3, "group": "0" * 32, "prompt": HOSTILE, "pieces": pieces,
        "tokens": 9, "drafted": 4, "accepted": 3, "reward": 0.5, "engines": [0, 1], "weight_versions": [2, 3],
        "finish_reason": HOSTILE, "cut": True,
    }  # fmt: skip
    (samples / "step-000003.jsonl").write_text(json.dumps(record) + "\n")
    uid: str = import_directory(dashboard.service.database, run_directory, time.time()).run_uid
    return uid


def test_logs_and_hostile_text(empty_dashboard: Any, run_directory: Path, browser_page: Any) -> None:
    uid = hostile_run(empty_dashboard, run_directory)
    page, run = browser_page, f"{empty_dashboard.url}/runs/{uid}"
    page.goto(empty_dashboard.link(path=f"/runs/{uid}"))
    expect(page).to_have_url(run)
    for path in ("", "/events?level=warning", "/samples", "/logs?file=hostile.log"):
        page.goto(f"{run}{path}")
        expect(page.locator("h1")).to_contain_text("onerror")
        if path.startswith("/logs"):
            expect(page.locator("[data-log-text]")).to_contain_text("<script>document.title='owned'</script>{{ 7*7 }}")
        elif path:
            expect(page.locator("main")).to_contain_text("<script>document.title='owned'</script>{{ 7*7 }}")
        assert page.locator("main img, main script, h1 img").count() == 0
        assert page.title() != "owned" and "onerror" in page.title()
    logs_are_read_followed_and_searched(page, run, run_directory / "logs" / "driver.log")


def logs_are_read_followed_and_searched(page: Any, run: str, log: Path) -> None:
    page.goto(f"{run}/logs")
    text = page.locator("[data-log-text]")
    expect(text).to_contain_text(f"line {LINES - 1} ")
    expect(text).not_to_contain_text("line 10 ")
    page.get_by_label("Follow").check()
    expect(page.locator("[data-log-state]")).to_have_text("Following")
    with log.open("a") as file:
        file.write("the newest line\n")
    expect(text).to_contain_text("the newest line")
    page.get_by_role("button", name="Start").click()
    expect(text).to_contain_text("line 10 ")
    expect(page.get_by_label("Follow")).not_to_be_checked()
    # Reading on loads on.
    for _ in range(3):
        before = text.evaluate("(place) => place.textContent.length")
        text.evaluate("(place) => { place.scrollTop = place.scrollHeight; }")
        deadline = time.monotonic() + WAIT_SECONDS
        while text.evaluate("(place) => place.textContent.length") <= before:
            assert time.monotonic() < deadline, "nothing was loaded"
            page.wait_for_timeout(50)
    page.get_by_label("Wrap").check()
    expect(text).to_have_class(re.compile("wrapped"))
    search = page.get_by_label("Search this log")
    search.fill("LINE 4321 ")
    search.press("Enter")
    expect(page.locator("[data-log-found]")).to_have_text("1 of 1 lines")
    expect(text).to_contain_text("line 4321 ")
    assert page.evaluate("CSS.highlights.get('found').size") == 1
    assert re.search(r"q=LINE\+4321\+&at=\d+", page.url)
    page.reload()
    expect(text).to_contain_text("line 4321 ")
    expect(page.get_by_label("Search this log")).to_have_value("LINE 4321 ")
    with page.expect_download() as kept:
        page.get_by_role("link", name="Download").click()
    assert Path(kept.value.path()).read_bytes() == log.read_bytes()
