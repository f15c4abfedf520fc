"""axe-core finds nothing serious on any page, light and dark. npm fetches it at test time, or the test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

AXE = "4.10.3"
FETCH_SECONDS = 60
PUBLIC = "/sign-in"
# Pages of other modules join here; {uid} is the recorded run.
PAGES = (
    "/",
    "/?status=failed",
    "/runs/{uid}",
    "/runs/{uid}/samples",
    "/runs/{uid}/system",
    "/runs/{uid}/logs",
    "/runs/{uid}/events",
    "/runs/0000000000000000",
)
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


@pytest.fixture(scope="session")
def axe() -> str:
    """The script, kept between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rhyme-openrlhf-tests"
    script = cache / f"axe-{AXE}.min.js"
    if not script.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed: axe-core cannot be fetched")
        cache.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", f"axe-core@{AXE}", "--silent", "--pack-destination", str(cache)]
        try:
            done = subprocess.run(command, cwd=cache, capture_output=True, text=True, timeout=FETCH_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the package registry did not answer within {FETCH_SECONDS} s: axe-core cannot be fetched")
        archive = cache / f"axe-core-{AXE}.tgz"
        if done.returncode != 0 or not archive.is_file():
            pytest.skip(f"npm could not fetch axe-core: {done.stderr.strip()[-300:]}")
        with tarfile.open(archive) as tar:
            content = tar.extractfile("package/axe.min.js")
            assert content is not None
            script.write_bytes(content.read())
        archive.unlink()
    return script.read_text()


def faults(page: Any, axe: str) -> list[str]:
    """What is serious or critical: rule, element, why."""
    page.evaluate(axe)
    found = page.evaluate("(rules) => axe.run(document, { runOnly: rules, resultTypes: ['violations'] })", list(RULES))
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:160]} {node['failureSummary'][:300]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def test_no_page_has_a_serious_fault(demo_dashboard: Any, chromium: Any, axe: str) -> None:
    found: dict[str, list[str]] = {}
    for theme in ("light", "dark"):
        context = chromium.new_context(
            color_scheme=theme, reduced_motion="reduce", viewport={"width": 1280, "height": 900}
        )
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.goto(demo_dashboard.url + PUBLIC)
        found[f"{PUBLIC} {theme}"] = faults(page, axe)
        page.goto(demo_dashboard.link())
        page.wait_for_url(f"{demo_dashboard.url}/")
        for path in PAGES:
            page.goto(demo_dashboard.url + path.replace("{uid}", demo_dashboard.run_uid))
            for figure in page.locator("[data-figure]").all():
                figure.scroll_into_view_if_needed()
                figure.locator("xpath=self::*[@data-state]").wait_for()
            found[f"{path} {theme}"] = faults(page, axe)
        context.close()
    assert {path: lines for path, lines in found.items() if lines} == {}
