"""axe-core finds nothing serious on any page, light and dark. npm fetches it at test time, or the test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.api.demo.synthetic_run import SyntheticRun, write_run_directory
from rhyme_openrlhf.api.ingest.importer import import_directory

AXE = "4.10.3"
FETCH_SECONDS = 60
PUBLIC = ("/docs", "/sign-in")
# All of them: {uid} is a recorded run, {moving} a synthetic one that has moves, layout switches and rank groups,
# {experiment} has both.
PAGES = (
    "/",
    "/?status=failed",
    "/runs/{uid}",
    "/runs/{uid}/timeline",
    "/runs/{uid}/timeline?view=heat",
    "/runs/{uid}/speculation",
    "/runs/{uid}/scheduling",
    "/runs/{moving}/scheduling",
    "/runs/{uid}/learning",
    "/runs/{uid}/panels?panel=reward,rollout_reward",
    "/runs/{uid}/samples",
    "/runs/{uid}/prompts",
    "/runs/{uid}/system",
    "/runs/{uid}/logs",
    "/runs/{uid}/config",
    "/runs/{uid}/events",
    "/runs/0000000000000000",
    "/runs/new",
    "/compare?run={uid}",
    "/compare?run={uid}&run={moving}",
    "/experiments/{experiment}",
    "/cluster",
    "/settings",
    "/webhooks",
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
    # Below the page's head, which stays, nothing is hidden by it.
    page.evaluate("window.scrollTo(0, 0)")
    page.evaluate(axe)
    found = page.evaluate("(rules) => axe.run(document, { runOnly: rules, resultTypes: ['violations'] })", list(RULES))
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:160]} {node['failureSummary'][:300]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def test_no_page_has_a_serious_fault(demo_dashboard: Any, chromium: Any, axe: str, tmp_path: Path) -> None:
    write_run_directory(tmp_path / "moving", SyntheticRun(steps=9, engines=16, steps_per_epoch=3))
    moving = import_directory(demo_dashboard.service.database, tmp_path / "moving", time.time()).run_uid
    client = demo_dashboard.signed_in()
    experiment = client.post("/api/v1/experiments", json={"name": "both"}).json()["id"]
    for uid in (demo_dashboard.run_uid, moving):
        assert client.patch(f"/api/v1/runs/{uid}", json={"experiment": "both"}).status_code == 200
    names = {"uid": demo_dashboard.run_uid, "moving": moving, "experiment": experiment}
    found: dict[str, list[str]] = {}
    for theme in ("light", "dark"):
        context = chromium.new_context(
            color_scheme=theme, reduced_motion="reduce", viewport={"width": 1280, "height": 900}
        )
        context.set_default_timeout(60_000)
        page = context.new_page()
        for path in PUBLIC:
            page.goto(demo_dashboard.url + path)
            found[f"{path} {theme}"] = faults(page, axe)
        page.goto(demo_dashboard.link())
        page.wait_for_url(f"{demo_dashboard.url}/")
        for path in PAGES:
            page.goto(demo_dashboard.url + path.format(**names))
            for figure in page.locator("[data-figure]").all():
                figure.scroll_into_view_if_needed()
                figure.locator("xpath=self::*[@data-state]").wait_for()
            found[f"{path} {theme}"] = faults(page, axe)
        context.close()
    serious = [f"{path}: {line}" for path, lines in found.items() for line in lines]
    assert not serious, "\n".join(serious)
