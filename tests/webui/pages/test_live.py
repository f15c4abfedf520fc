"""Open pages while things happen: real events, a real Chromium, and a server process that dies and comes back."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from sqlalchemy import delete

from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import BrowserSession

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "data" / "recorded_run.jsonl"
RUN, ATTEMPT = "a" * 16, "b" * 16
# On a busy machine the imports of a service alone take more than a minute.
START_SECONDS = 240
WAIT_SECONDS = 60


class Reporter:
    """Sends the recorded run's events as a run that goes on."""

    def __init__(self, dashboard: Any, steps_before: int = 0) -> None:
        """Add `steps_before` to the number of every step."""
        self._client = dashboard.client("operator")
        self._rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
        for row in self._rows:
            if "step" in row:
                row["step"] += steps_before
        body = {"run": RUN, "name": "goes on", "run_directory": "", "config": {}}
        assert self._client.put(f"/api/v1/ingest/attempts/{ATTEMPT}", json=body).status_code == 200

    def until(self, step: int) -> None:
        """Everything up to this step's end; all of it for a step that it does not have."""
        ends = [i for i, row in enumerate(self._rows) if row["kind"] == "train_step" and row["step"] == step]
        count = ends[0] + 1 if ends else len(self._rows)
        rows, self._rows = self._rows[:count], self._rows[count:]
        answer = self._client.post(f"/api/v1/ingest/attempts/{ATTEMPT}/batches", json={"events": rows})
        assert answer.status_code == 200, answer.text


def second_page(chromium: Any) -> Any:
    """A page of another browser profile."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.set_default_timeout(60_000)
    return context.new_page()


def set_hidden(page: Any, hidden: bool) -> None:
    """What the browser tells a page that is in a background tab."""
    page.evaluate(
        """(hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def eventually(page: Any, condition: str) -> None:
    """Playwright's own wait evaluates text within the page, which its security policy refuses."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def figure_has(steps: int) -> str:
    """The condition that the first figure shows this number of steps."""
    return f"document.querySelector('[data-figure-plot]').data?.[0]?.x.length === {steps}"


def test_two_browsers_watch_a_run(dashboard: Any, chromium: Any, browser_page: Any) -> None:
    reporter = Reporter(dashboard)
    reporter.until(3)
    page, other = browser_page, second_page(chromium)
    page.goto(dashboard.link(path=f"/runs/{RUN}"))
    other.goto(dashboard.link("viewer", f"/runs/{RUN}"))
    for one in (page, other):
        expect(one).to_have_url(f"{dashboard.url}/runs/{RUN}")
        expect(one.locator(".progress-text").first).to_have_text("3 / 10")
        expect(one.locator("[data-figure]").first).to_have_attribute("data-state", "drawn")
    expect(other.get_by_role("button", name="Stop", exact=True)).to_have_count(0)

    # Zoomed before an update: the reader keeps what they look at.
    page.evaluate("Plotly.relayout(document.querySelector('[data-figure-plot]'), {'xaxis.range': [2, 3]})")
    other.get_by_role("button", name="Pause").click()
    expect(other.locator("[data-connection]")).to_have_text("Paused")
    asked: list[str] = []
    other.on("request", lambda request: asked.append(request.url))
    reporter.until(6)
    expect(page.locator(".progress-text").first).to_have_text("6 / 10")
    eventually(page, figure_has(6))
    assert page.evaluate("document.querySelector('[data-figure-plot]').layout.xaxis.range") == [2, 3]
    assert asked == [] and other.evaluate(figure_has(3))
    other.get_by_role("button", name="Resume updates").click()
    expect(other.locator(".progress-text").first).to_have_text("6 / 10")

    set_hidden(other, True)
    asked.clear()
    reporter.until(-1)
    expect(page.locator(".progress-text").first).to_have_text("10 / 10")
    assert asked == []
    set_hidden(other, False)
    expect(other.locator(".progress-text").first).to_have_text("10 / 10")
    expect(other.locator(".badge").first).to_contain_text("succeeded")
    for one in (page, other):
        eventually(one, figure_has(10))
    assert other.locator("#run-tiles").inner_text() == page.locator("#run-tiles").inner_text()

    theme_and_files(page)
    sessions_end(dashboard, page, other)
    other.context.close()


def test_a_figure_of_many_steps_has_the_newest_step_and_ends_with_the_last(dashboard: Any, browser_page: Any) -> None:
    before = 10_000
    reporter, page = Reporter(dashboard, before), browser_page
    reporter.until(before + 2)
    page.goto(dashboard.link(path=f"/runs/{RUN}"))
    progress = page.locator(".progress-text").first
    expect(progress).to_have_text("10,002 / 10")
    expect(page.locator("[data-connection]")).to_have_text("Live")
    expect(page.locator("[data-figure]").first).to_have_attribute("data-state", "drawn")
    reporter.until(before + 6)
    # Four steps of 10,006 are less than a pixel.
    eventually(page, figure_has(6))
    reporter.until(before + 7)
    reporter.until(-1)
    expect(page.locator(".badge").first).to_contain_text("succeeded")
    eventually(page, figure_has(10))


def test_a_figure_rests_after_it_was_drawn_and_longer_when_drawing_took_long(dashboard: Any, browser_page: Any) -> None:
    reporter, page = Reporter(dashboard), browser_page
    reporter.until(2)
    page.clock.install()
    page.goto(dashboard.link(path=f"/runs/{RUN}"))
    expect(page.locator("[data-connection]")).to_have_text("Live")
    pass_time_until(page, figure_has(2))
    page.evaluate(NOTE_WHEN_ASKED)
    for step in (3, 4, 5, 6):
        reporter.until(step)
        # The rest of the page is updated each second, also while the figure rests.
        pass_time_until(page, f"document.querySelector('.progress-text').textContent.trim() === '{step} / 10'")
        if step == 4:
            # After a drawing that took long, the figure could rest until the last step.
            pass_time_until(page, figure_has(4))
    pass_time_until(page, figure_has(6))
    page.clock.run_for(5000)
    asked = page.evaluate("window.asked")
    assert len(asked) > 1 and all(after - before >= 2000 for before, after in pairwise(asked))

    page.evaluate(DRAWING_TAKES_1_S)
    for step in (7, 8):
        reporter.until(step)
        pass_time_until(page, figure_has(step))
    page.clock.run_for(15_000)
    asked = page.evaluate("window.asked")[len(asked) :]
    assert len(asked) == 2 and asked[1] - asked[0] >= 10_000


# The moments at which the figure of the reward is asked for, by the page's clock.
NOTE_WHEN_ASKED = """
() => {
  window.asked = [];
  const done = window.fetch;
  window.fetch = (address, ...more) => {
    if (String(address).includes("/figures/reward")) window.asked.push(Date.now());
    return done(address, ...more);
  };
}
"""
# By the page's clock, which stands still meanwhile.
DRAWING_TAKES_1_S = """
() => {
  let spent = 0;
  const now = performance.now.bind(performance);
  performance.now = () => now() + spent;
  for (const way of ["react", "animate"]) {
    const done = Plotly[way];
    Plotly[way] = (...given) => { spent += 1000; return done(...given); };
  }
}
"""


def pass_time_until(page: Any, condition: str) -> None:
    """By the page's clock, in small parts, so that the server can respond between them however slow the machine is."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.clock.run_for(100)
        page.wait_for_timeout(20)


def theme_and_files(page: Any) -> None:
    color = "document.querySelector('[data-figure-plot]')._fullLayout.font.color"
    page.get_by_role("button", name="Theme: auto").click()
    light = page.evaluate(color)
    page.get_by_role("button", name="Theme: light").click()
    eventually(page, f"{color} !== {json.dumps(light)}")
    assert page.evaluate("document.querySelector('[data-figure-plot]').layout.xaxis.range") == [2, 3]

    with page.expect_download() as kept:
        page.get_by_role("button", name="CSV").first.click()
    rows = list(csv.reader(io.StringIO(Path(kept.value.path()).read_text())))
    assert rows[0] == ["series", "Step", "Mean reward"]
    # The mean itself, and the two edges of its spread.
    assert Counter(row[0] for row in rows[1:]) == {"Reward": 10, "Mean + deviation": 10, "Mean - deviation": 10}
    assert kept.value.suggested_filename == f"{RUN}-reward.csv"
    with page.expect_download() as kept:
        page.get_by_role("button", name="PNG").first.click()
    picture = Path(kept.value.path()).read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(picture[16:20], "big") == 2400


def sessions_end(dashboard: Any, page: Any, other: Any) -> None:
    page.locator("summary", has_text="operator").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(f"{dashboard.url}/sign-in")
    expect(page.get_by_label("Token")).to_be_visible()
    page.goto("about:blank")
    # The page asks whether one is signed in already, and the browser notes the answer.
    page.console_errors[:] = [error for error in page.console_errors if "status of 401" not in error]
    # Everybody's session ends on the server: the open page finds out, and leads back after signing in.
    other.goto(f"{dashboard.url}/?text=goes&sort=name")
    expect(other.locator("[data-connection]")).to_have_text("Live")
    with dashboard.service.database.writing() as session:
        session.execute(delete(BrowserSession))
    # Not through the service: what that revokes is forgotten at once.
    dashboard.service.callers.forget()
    other.evaluate("document.dispatchEvent(new CustomEvent('rhyme:stale'))")
    expect(other).to_have_url(f"{dashboard.url}/sign-in?next=%2F%3Ftext%3Dgoes%26sort%3Dname")
    other.get_by_label("Token").fill(dashboard.tokens["viewer"])
    other.keyboard.press("Enter")
    expect(other).to_have_url(f"{dashboard.url}/?text=goes&sort=name")
    expect(other.get_by_label("Search runs")).to_have_value("goes")


def test_a_refused_request_in_the_background_does_not_lead_back_from_signing_out(
    dashboard: Any, browser_page: Any
) -> None:
    """The session is over before the button knows, as on a busy machine: the page's own requests hear so first."""
    page = browser_page
    page.goto(dashboard.link(path=f"/runs/{dashboard.run_uid}"))
    expect(page.locator("[data-connection]")).to_have_text("Live")
    held: list[Any] = []
    page.route("**/api/v1/session", lambda route: held.append(route) if is_sign_out(route) else route.continue_())
    page.locator("summary", has_text="operator").click()
    page.get_by_role("button", name="Sign out").click()
    deadline = time.monotonic() + WAIT_SECONDS
    while not held:
        assert time.monotonic() < deadline, "nobody asked to sign out"
        page.wait_for_timeout(20)
    answer = held[0].fetch()
    with page.expect_response(lambda response: response.status == 401):
        page.evaluate("document.dispatchEvent(new CustomEvent('rhyme:stale'))")
    # What the page makes of that refusal, it makes now.
    page.wait_for_timeout(300)
    held[0].fulfill(response=answer)
    expect(page).to_have_url(f"{dashboard.url}/sign-in")
    page.console_errors[:] = [error for error in page.console_errors if "status of 401" not in error]


def is_sign_out(route: Any) -> bool:
    return bool(route.request.method == "DELETE")


def test_a_link_signs_in_once_and_says_so(dashboard: Any, browser_page: Any, chromium: Any) -> None:
    with dashboard.service.database.writing() as session:
        code = credentials.issue_code(session, time.time(), 60)
    link = f"{dashboard.url}/runs/{dashboard.run_uid}#code={code}"
    browser_page.goto(link)
    expect(browser_page).to_have_url(f"{dashboard.url}/runs/{dashboard.run_uid}")
    # A signed-in user continues, also with a used link.
    browser_page.goto(f"{dashboard.url}/sign-in#code={code}")
    expect(browser_page).to_have_url(f"{dashboard.url}/")
    browser_page.console_errors[:] = [error for error in browser_page.console_errors if "status of 401" not in error]
    other = chromium.new_context().new_page()
    other.goto(link)
    expect(other.get_by_role("alert")).to_contain_text("used up or too old: `rhyme serve --new-link` prints")
    with dashboard.service.database.writing() as session:
        code = credentials.issue_code(session, time.time(), 60)
    # What a person has is the whole line.
    other.get_by_label("Token or link").fill(f"{dashboard.url}/#code={code}")
    other.keyboard.press("Enter")
    expect(other).to_have_url(f"{dashboard.url}/runs/{dashboard.run_uid}")
    other.context.close()


def test_what_the_pointer_is_pressed_on_is_not_replaced(dashboard: Any, browser_page: Any) -> None:
    reporter = Reporter(dashboard)
    reporter.until(2)
    page = browser_page
    page.goto(dashboard.link(path=f"/runs/{RUN}/events"))
    page.get_by_role("link", name="train_step", exact=True).hover()
    page.mouse.down()
    reporter.until(4)
    expect(page.locator("[data-piece][data-stale]").first).to_be_attached()
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"kind=train_step"))


def test_filters_stay_and_dialogs_answer_the_keyboard(dashboard: Any, browser_page: Any) -> None:
    reporter = Reporter(dashboard)
    reporter.until(2)
    page = browser_page
    page.goto(dashboard.link())
    search = page.get_by_label("Search runs")
    search.fill("goes")
    search.press("Enter")
    expect(page).to_have_url(re.compile(r"text=goes"))
    assert "tag=" not in page.url
    expect(page.get_by_role("link", name="demo")).to_have_count(0)
    filtered = page.url
    page.reload()
    expect(page.get_by_label("Search runs")).to_have_value("goes")
    page.get_by_role("link", name="goes on").click()
    expect(page).to_have_url(f"{dashboard.url}/runs/{RUN}")
    page.get_by_role("link", name="Events").click()
    page.get_by_role("link", name="train_step", exact=True).click()
    expect(page).to_have_url(re.compile(r"kind=train_step"))
    expect(page.locator(".events tbody tr")).to_have_count(2)
    page.locator(".events summary").first.click()
    # A live tail: new rows come on top, what is open stays open.
    reporter.until(4)
    expect(page.locator(".events tbody tr")).to_have_count(4)
    expect(page.locator(".events details[open]")).to_have_count(1)
    page.go_back()
    page.go_back()
    stop = page.get_by_role("button", name="Stop", exact=True).first
    stop.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator(".toast")).to_have_count(0)
    expect(stop).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_contain_text("The run will stop after its current step")
    expect(page.locator(".badge").first).to_contain_text("stopping")
    page.go_back()
    expect(page).to_have_url(filtered)
    expect(page.get_by_label("Search runs")).to_have_value("goes")


@contextmanager
def server_process(data: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`rhyme serve`, killed at the end as a crash would end it."""
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "serve", "--no-local"]
    command += [f"--serve.port={port}", f"--serve.data_dir={data}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < deadline, "the service did not start"
            time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.timeout(900)
def test_a_page_recovers_when_the_server_comes_back(
    tmp_path: Path, run_directory: Path, browser_page: Any, starts_service: None
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    database = Database(f"sqlite:///{data / 'rhyme.sqlite'}")
    database.upgrade()
    uid = import_directory(database, run_directory, time.time()).run_uid
    with database.writing() as session:
        token = credentials.issue_token(session, "operator", "operator", time.time()).secret
    database.dispose()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    page = browser_page
    connection = page.locator("[data-connection]")
    with server_process(data, port):
        page.goto(f"http://127.0.0.1:{port}/runs/{uid}#token={token}")
        expect(connection).to_have_text("Live")
        expect(page.locator("[data-figure]").first).to_have_attribute("data-state", "drawn")
        # One answer gets lost while the stream stays open: the page says so, and comes back by itself.
        page.route("**/parts/tiles", lambda route: route.abort())
        page.evaluate("document.dispatchEvent(new CustomEvent('rhyme:stale'))")
        page.wait_for_event("requestfailed")
        page.unroute("**/parts/tiles")
        expect(connection).to_have_text("Live")
    expect(connection).to_have_attribute("data-state", "away")
    expect(page.locator("h1")).to_contain_text("demo")
    with server_process(data, port):
        expect(connection).to_have_text("Live", timeout=60_000)
        headers = {"Authorization": f"Bearer {token}"}
        address = f"http://127.0.0.1:{port}/api/v1/runs/{uid}"
        httpx.patch(address, json={"name": "renamed"}, headers=headers, timeout=WAIT_SECONDS)
        expect(page.locator("h1")).to_contain_text("renamed")
        page.goto("about:blank")
    # What a browser writes when nobody answers.
    page.console_errors[:] = [error for error in page.console_errors if "Failed to load resource" not in error]
