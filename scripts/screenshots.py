#!/usr/bin/env python3
"""Take pictures of every page of the dashboard, light and dark, wide and narrow, into docs/images/.

    scripts/screenshots.py [--out DIR] [--only runs,run] [--events FILE]

Starts `rhyme serve` on a store of its own with a recorded run in it, and a real Chromium (Debian's package). Pictures
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
RECORDED = ROOT / "tests" / "data" / "recorded_run.jsonl"
# Of the demonstration's recordings, the one whose responses, logs and machines are shown.
DEMO = "sorting-and-arithmetic"
# Name of the picture -> address; {uid} is the recorded run, {demo} that of the demonstration.
PAGES: dict[str, str] = {
    "sign-in": "/sign-in",
    "runs": "/",
    "run": "/runs/{uid}",
    "config": "/runs/{uid}/config",
    "new-run": "/runs/new",
    "compare": "/compare?run={uid}",
    "cluster": "/cluster",
    "settings": "/settings",
    "timeline": "/runs/{uid}/timeline",
    "speculation": "/runs/{uid}/speculation",
    "scheduling": "/runs/{uid}/scheduling",
    "learning": "/runs/{uid}/learning",
    "samples": "/runs/{demo}/samples",
    "system": "/runs/{demo}/system",
    "logs": "/runs/{demo}/logs",
    "events": "/runs/{demo}/events?kind=train_step&kind=note",
}
PUBLIC = ("sign-in",)
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
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    parser.add_argument("--only", default=",".join(PAGES), metavar="NAMES", help="pages, separated by commas")
    parser.add_argument("--events", type=Path, default=RECORDED, metavar="FILE", help="the recorded run's events.jsonl")
    given = parser.parse_args(argv)
    names = given.only.split(",")
    if unknown := set(names) - set(PAGES):
        parser.error(f"--only: there is no page {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = import_runs(Path(folder), given.events)
        with serving(Path(folder)) as link:
            take(link, runs, names, given.out)
    return 0


def import_runs(folder: Path, events: Path) -> dict[str, str]:
    """Put the recorded run and the demonstration's into the store of `folder`; gives uids by their names in `PAGES`."""
    from rhyme_openrlhf import embedded
    from rhyme_openrlhf.api.database import Database
    from rhyme_openrlhf.api.importer import import_directory
    from rhyme_openrlhf.telemetry.recording import unpack

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
    found["demo"] = import_directory(database, recorded[DEMO], now).run_uid
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


def take(link: str, runs: dict[str, str], names: list[str], out: Path) -> None:
    """All pictures of these pages."""
    from playwright.sync_api import sync_playwright

    base, _, _ = link.partition("/#")
    with sync_playwright() as playwright:
        # As root, which containers are, Chromium does not start with its sandbox.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for theme in THEMES:
            for size, (width, height) in SIZES.items():
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
                )
                page = context.new_page()
                for name in sorted(names, key=lambda name: name not in PUBLIC):
                    if name not in PUBLIC and not context.cookies():
                        page.goto(link)
                        page.wait_for_url(f"{base}/")
                    page.goto(base + PAGES[name].format(**runs))
                    shoot(page, out / f"{name}-{theme}-{size}.png")
                context.close()
        browser.close()


def shoot(page: Any, file: Path) -> None:
    """A picture of the whole page, when its figures are drawn."""
    page.wait_for_load_state("load")
    for figure in page.locator("[data-figure]").all():
        figure.scroll_into_view_if_needed()
        figure.locator("xpath=self::*[@data-state]").wait_for(timeout=DRAWN_MS)
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=str(file), full_page=True)
    picture = Image.open(file).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    print(f"{file}  {picture.width} x {picture.height}, {file.stat().st_size // 1024} KB", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
