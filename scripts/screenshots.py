#!/usr/bin/env python3
"""Take pictures of the dashboard's pages: those of the documentation, or every page in every form to look at.

    scripts/screenshots.py                                   # what README.md and docs/dashboard.md show: docs/images/
    scripts/screenshots.py --all DIR [--only runs,run]       # whole pages, light and dark, wide and narrow

Starts `rhyme serve` on a store of its own with recorded runs in it, and a real Chromium (Debian's package). Pictures
are small: 256 colours are enough for pages without photographs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RECORDED = ROOT / "tests" / "data" / "recorded_run.jsonl"
# Of the demonstration's recordings, the one whose responses, logs and machines are shown.
DEMO = "sorting-and-arithmetic"
# The one that it is compared with.
OTHER = "without-speculation"
# Name of the picture -> address; {uid} is the tests' recorded run, {demo} and {other} those of the demonstration,
# {synthetic} one of synthetic events, which has moves, layout switches and rank groups.
PAGES: dict[str, str] = {
    "sign-in": "/sign-in",
    "runs": "/",
    "run": "/runs/{demo}",
    "config": "/runs/{demo}/config",
    "new-run": "/runs/new",
    "compare": "/compare?run={demo}&run={other}",
    "compare-choose": "/compare?run={demo}",
    "cluster": "/cluster",
    "settings": "/settings",
    "timeline": "/runs/{demo}/timeline",
    "timeline-many": "/runs/{synthetic}/timeline",
    "speculation": "/runs/{demo}/speculation",
    "scheduling": "/runs/{synthetic}/scheduling",
    "scheduling-off": "/runs/{demo}/scheduling",
    "learning": "/runs/{demo}/learning",
    "samples": "/runs/{demo}/samples",
    "system": "/runs/{demo}/system",
    "logs": "/runs/{demo}/logs",
    "events": "/runs/{demo}/events?kind=train_step&kind=note",
}
PUBLIC = ("sign-in",)
# What the documentation shows, of the demonstration's real run: name -> address, and where a reader would scroll to.
PICTURES: dict[str, tuple[str, str]] = {
    "run": ("/runs/{demo}", "body"),
    "timeline": ("/runs/{demo}/timeline", ".tabs"),
    "samples": ("/runs/{demo}/samples?step=12&sort=accepted&direction=desc", ".tabs"),
}
# A laptop's window, as much of a page as one sees.
PICTURE_SIZE = (1280, 800)
# A laptop's and a telephone's window.
SIZES = {"1440": (1440, 900), "390": (390, 844)}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
COLORS = 256
# Figures are drawn within it, or the picture shows that they are not.
DRAWN_MS = 20_000
START_SECONDS = 60


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="DIR", help="every page, in every form, into DIR")
    parser.add_argument("--only", default=",".join(PAGES), metavar="NAMES", help="with --all: pages, commas between")
    parser.add_argument("--events", type=Path, default=RECORDED, metavar="FILE", help="the recorded run's events.jsonl")
    given = parser.parse_args(argv)
    names = given.only.split(",")
    if unknown := set(names) - set(PAGES):
        parser.error(f"--only: there is no page {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    out = given.all or IMAGES
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = import_runs(Path(folder), given.events)
        with serving(Path(folder)) as link, chromium() as browser:
            if given.all:
                take_all(browser, link, runs, names, out)
            else:
                take_pictures(browser, link, runs, out)
    return 0


def import_runs(folder: Path, events: Path) -> dict[str, str]:
    """Put the recorded run and the demonstration's into the store of `folder`; gives uids by their names in `PAGES`."""
    from rhyme_openrlhf import embedded
    from rhyme_openrlhf.api.database import Database
    from rhyme_openrlhf.api.demonstration import SYNTHETIC
    from rhyme_openrlhf.api.importer import import_directory
    from rhyme_openrlhf.telemetry.recording import unpack
    from rhyme_openrlhf.telemetry.synthetic_run import write_run_directory

    directory = folder / "runs" / "20261121-demo"
    directory.mkdir(parents=True)
    shutil.copy(events, directory / "events.jsonl")
    (directory / "config.json").write_text(json.dumps({"settings": {"run": {"name": "demo"}}, "arguments": {}}))
    database = Database(f"sqlite:///{folder / 'rhyme.sqlite'}")
    database.upgrade()
    now = time.time()
    found = {"uid": import_directory(database, directory, now).run_uid}
    (folder / "demo").mkdir()
    recorded = {path.name: path for path in unpack(embedded.RECORDING, folder / "demo")}
    for name, directory in (("other", recorded[OTHER]), ("demo", recorded[DEMO])):
        found[name] = import_directory(database, directory, now).run_uid
    write_run_directory(folder / "synthetic", SYNTHETIC)
    found["synthetic"] = import_directory(database, folder / "synthetic", now).run_uid
    database.dispose()
    return found


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`rhyme serve` over the store of `folder`; gives the sign-in link."""
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "serve", "--no-local", "--serve.port", "0"]
    command += ["--serve.data_dir", str(folder), "--serve.roots", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://\S+#token=\S+", line):
                break
        else:
            raise SystemExit("screenshots: the service did not start: see above")
        yield found.group()
    finally:
        server.terminate()
        server.wait(START_SECONDS)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, which containers are, Chromium does not start with its sandbox.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, theme: str, size: tuple[int, int]) -> Any:
    """A page of a new profile."""
    width, height = size
    viewport = {"width": width, "height": height}
    return browser.new_context(viewport=viewport, color_scheme=theme, reduced_motion="reduce").new_page()


def sign_in(page: Any, link: str) -> str:
    """Returns the service's address."""
    base, _, _ = link.partition("/#")
    page.goto(link)
    page.wait_for_url(f"{base}/")
    return base


def take_pictures(browser: Any, link: str, runs: dict[str, str], out: Path) -> None:
    """The documentation's, light and dark."""
    for theme in THEMES:
        page = opened(browser, theme, PICTURE_SIZE)
        base = sign_in(page, link)
        for name, (address, place) in PICTURES.items():
            page.goto(base + address.format(**runs))
            draw_all(page)
            page.locator(place).first.evaluate("place => place.scrollIntoView({ behavior: 'instant' })")
            keep(page, out / f"{name}-{theme}.png")
        page.context.close()


def take_all(browser: Any, link: str, runs: dict[str, str], names: list[str], out: Path) -> None:
    """Whole pages in all themes and sizes."""
    base, _, _ = link.partition("/#")
    for theme in THEMES:
        for size, window in SIZES.items():
            page = opened(browser, theme, window)
            for name in sorted(names, key=lambda name: name not in PUBLIC):
                if name not in PUBLIC and not page.context.cookies():
                    sign_in(page, link)
                page.goto(base + PAGES[name].format(**runs))
                draw_all(page)
                page.evaluate("window.scrollTo(0, 0)")
                keep(page, out / f"{name}-{theme}-{size}.png", full_page=True)
            page.context.close()


def draw_all(page: Any) -> None:
    """Until the figures are drawn, each of which is when it comes into sight."""
    page.wait_for_load_state("load")
    for figure in page.locator("[data-figure]").all():
        figure.scroll_into_view_if_needed()
        figure.locator("xpath=self::*[@data-state]").wait_for(timeout=DRAWN_MS)


def keep(page: Any, file: Path, full_page: bool = False) -> None:
    """Write a picture."""
    page.screenshot(path=str(file), full_page=full_page)
    picture = Image.open(file).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    print(f"{file}  {picture.width} x {picture.height}, {file.stat().st_size // 1024} KB", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
