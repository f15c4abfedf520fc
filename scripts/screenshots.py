#!/usr/bin/env python3
"""Take pictures of the dashboard: what the documentation shows, and every page, light and dark, wide and narrow.

    scripts/screenshots.py                                   # all of docs/images/
    scripts/screenshots.py --pages DIR [--only runs,run]     # whole pages only, as PNG, to look at

Starts `rhyme serve` on a store of its own with recorded runs in it, another without runs on a Ray of its own, and a
real Chromium (Debian's package). Pictures are small: 256 colours are enough for pages without photographs, and whole
pages are WebP without loss.
"""

from __future__ import annotations

import argparse
import contextlib
import io
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
# Of the demonstration's recordings, the one whose responses, logs and machines are shown.
DEMO = "drafts-seed-1"
# The one that it is compared with.
OTHER = "no-drafts-seed-1"
# Steps of it that a run has which is still under way.
LIVE_STEPS = 14
# Picture -> address, with names of the demonstration's runs. {live} is the first run under way; {synthetic} has moves,
# layout switches and rank groups.
PAGES: dict[str, str] = {
    "sign-in": "/sign-in",
    "run-live": "/runs/{live}",
    "runs": "/",
    "runs-none-found": "/?status=failed",
    "run": "/runs/{demo}",
    "config": "/runs/{demo}/config",
    "compare": "/compare?run={demo}&run={other}",
    "experiment": "/experiments/{experiment}",
    "compare-choose": "/compare?run={demo}",
    "cluster-none": "/cluster",
    "settings": "/settings",
    "webhooks": "/webhooks",
    "timeline": "/runs/{demo}/timeline",
    "timeline-many": "/runs/{synthetic}/timeline",
    "timeline-heat": "/runs/{synthetic}/timeline?view=heat",
    "timeline-states": "/runs/{synthetic}/timeline?view=states",
    "speculation": "/runs/{demo}/speculation",
    "scheduling": "/runs/{synthetic}/scheduling",
    "scheduling-off": "/runs/{demo}/scheduling",
    "learning": "/runs/{demo}/learning",
    "learning-late": "/runs/{synthetic}/learning",
    "panels": "/runs/{demo}/panels?panel=reward,speculation_rate&panel=policy_loss",
    "samples": "/runs/{demo}/samples",
    "prompts": "/runs/{demo}/prompts",
    "system": "/runs/{demo}/system",
    "logs": "/runs/{demo}/logs",
    "events": "/runs/{demo}/events?kind=train_step&kind=note",
    "not-found": "/runs/0000000000000000",
}
# Of the service that has no runs yet, and a cluster.
FRESH_PAGES: dict[str, str] = {
    "runs-empty": "/",
    "new-run": "/runs/new",
    "new-run-cluster": "/runs/new?template=grpo",
    "cluster": "/cluster",
}
PUBLIC = ("sign-in",)
INDEX_HEAD = """\
# Every page of the dashboard

Whole pages in Chromium, light and dark, 1440 and 390 pixels wide. `scripts/screenshots.py` makes all, this page too.
They show the demonstration's recorded runs, one of them as if it were under way. Moves, layout switches and rank groups
are from a synthetic run. Pages of more than 5,000 pixels are cut there.
"""
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
# Of WebP without loss, 0 to 100: the last tenth of a file takes forty times as long.
EFFORT = 60
# Of a page that is longer, the rest repeats itself.
MOST_HEIGHT = 5000
# Names of this machine's folders become those of no machine, in texts and in the form's fields.
HIDE = """
(pairs) => {
  const hidden = (text) => pairs.reduce((said, [from, to]) => said.replaceAll(from, to), text);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    if (hidden(node.data) !== node.data) node.data = hidden(node.data);
  }
  for (const field of document.querySelectorAll("input[value]")) {
    if (hidden(field.value) !== field.value) field.value = hidden(field.value);
  }
}
"""
# Figures are drawn within it, or the picture shows that they are not.
DRAWN_MS = 20_000
# Nothing more is heard of the run under way: it is not lost until all pictures are taken.
LOST_SECONDS = 3600
# Ray takes its time where others work.
START_SECONDS = 120


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    known = {**PAGES, **FRESH_PAGES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, metavar="DIR", help="whole pages only, as PNG, into DIR")
    parser.add_argument("--only", default=",".join(known), metavar="NAMES", help="of whole pages these, commas between")
    given = parser.parse_args(argv)
    names = given.only.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"--only: there is no page {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    out = given.pages or IMAGES / "pages"
    out.mkdir(parents=True, exist_ok=True)
    suffix = ".png" if given.pages else ".webp"
    filled = {name: PAGES[name] for name in names if name in PAGES}
    fresh = {name: FRESH_PAGES[name] for name in names if name in FRESH_PAGES}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        if filled or not given.pages:
            runs = import_runs(Path(folder))
            with serving(Path(folder), "--no-local", "--launch.lost_after_s", str(LOST_SECONDS)) as link:
                if not given.pages:
                    take_pictures(browser, link, runs)
                addresses = {name: address.format(**runs) for name, address in filled.items()}
                take_pages(browser, link, addresses, Path(folder), out, suffix)
    if not given.pages:
        write_index(out)
    if fresh:
        with tempfile.TemporaryDirectory() as folder, chromium() as browser, serving(Path(folder), "--local") as link:
            take_pages(browser, link, fresh, Path(folder), out, suffix)
    return 0


def import_runs(folder: Path) -> dict[str, str]:
    """Put the runs into the store of `folder`; gives uids, and an experiment's id, by their names in `PAGES`."""
    from rhyme_openrlhf import embedded
    from rhyme_openrlhf.api.demo.demonstration import IN_EXPERIMENT, SYNTHETIC, compare
    from rhyme_openrlhf.api.demo.recording import unpack
    from rhyme_openrlhf.api.demo.synthetic_run import write_run_directory
    from rhyme_openrlhf.api.ingest.importer import import_directory
    from rhyme_openrlhf.api.store.database import Database

    (folder / "runs").mkdir(parents=True)
    database = Database(f"sqlite:///{folder / 'rhyme.sqlite'}")
    database.upgrade()
    now = time.time()
    recorded = {path.name: path for path in unpack(embedded.RECORDING, folder / "runs")}
    synthetic = folder / "runs" / "synthetic"
    write_run_directory(synthetic, SYNTHETIC)
    found = {}
    found["synthetic"] = import_directory(database, synthetic.resolve(), now).run_uid
    uids = {
        name: import_directory(database, recorded[name].resolve(), now).run_uid
        for name in sorted(recorded, reverse=True)
    }
    found["demo"], found["other"] = uids[DEMO], uids[OTHER]
    compared = [uid for name, uid in uids.items() if IN_EXPERIMENT.fullmatch(name)]
    found["experiment"] = str(compare(database, compared, now))
    found["live"] = report_run(database, recorded[DEMO], now)
    database.dispose()
    return found


def report_run(database: Any, recorded: Path, now: float) -> str:
    """Report the first steps of a recorded run as of a run under way; return its uid."""
    from rhyme_openrlhf.api.demo.recording import moved, read_rows
    from rhyme_openrlhf.api.ingest.announce import Announcement, announce
    from rhyme_openrlhf.api.ingest.store_batch import ingest
    from rhyme_openrlhf.api.ingest.validation import prepare

    run, attempt, name = "a" * 16, "b" * 16, f"{DEMO}-again"
    rows = read_rows(recorded)
    last = next(i for i, row in enumerate(rows) if row["kind"] == "train_step" and row["step"] == LIVE_STEPS)
    rows = [moved(row, now - rows[last]["time"]) for row in rows[: last + 1]]
    config = json.loads((recorded / "config.json").read_text())
    config["settings"]["run"]["name"] = name
    with database.writing() as session:
        announce(session, Announcement(attempt, run, name, str(recorded), config), now)
        ingest(session, attempt, prepare(rows), now, alive=True)
    return run


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """`rhyme serve` over the store of `folder`; gives a link that signs in as often as it is followed."""
    from rhyme_openrlhf.client import exchange

    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "serve", "--serve.port", "0", *options]
    command += ["--serve.data_dir", str(folder), "--serve.roots", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"(http://\S+)/#code=(\S+)", line):
                break
        else:
            raise SystemExit("screenshots: the service did not start: see above")
        yield f"{found[1]}/#token={exchange(found[1], found[2], 'screenshots').token}"
    finally:
        server.terminate()
        server.communicate(timeout=START_SECONDS)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, which containers are, Chromium does not start with its sandbox.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, theme: str, size: tuple[int, int]) -> Any:
    """Yield a page of a new profile."""
    width, height = size
    viewport = {"width": width, "height": height}
    return browser.new_context(viewport=viewport, color_scheme=theme, reduced_motion="reduce").new_page()


def sign_in(page: Any, link: str) -> str:
    """Returns the service's address."""
    base, _, _ = link.partition("/#")
    page.goto(link)
    page.wait_for_url(f"{base}/")
    return base


def take_pictures(browser: Any, link: str, runs: dict[str, str]) -> None:
    """Take the pictures of README.md and docs/dashboard.md, light and dark."""
    for theme in THEMES:
        page = opened(browser, theme, PICTURE_SIZE)
        base = sign_in(page, link)
        for name, (address, place) in PICTURES.items():
            page.goto(base + address.format(**runs))
            draw_all(page)
            page.locator(place).first.evaluate("place => place.scrollIntoView({ behavior: 'instant' })")
            keep(page, IMAGES / f"{name}-{theme}.png")
        page.context.close()


def take_pages(browser: Any, link: str, addresses: dict[str, str], folder: Path, out: Path, suffix: str) -> None:
    """Whole pages of the service whose data lies in `folder`, in all themes and sizes."""
    base, _, _ = link.partition("/#")
    for theme in THEMES:
        for size, window in SIZES.items():
            page = opened(browser, theme, window)
            for name in sorted(addresses, key=lambda name: name not in PUBLIC):
                if name not in PUBLIC and not page.context.cookies():
                    sign_in(page, link)
                page.goto(base + addresses[name])
                draw_all(page)
                page.evaluate(HIDE, [[str(ROOT), "/opt/rhyme"], [str(folder), "/home/user/rhyme"]])
                page.evaluate("window.scrollTo(0, 0)")
                keep(page, out / f"{name}-{theme}-{size}{suffix}", whole=True)
            page.context.close()


def write_index(out: Path) -> None:
    """Write a page with links to all pictures of whole pages."""
    forms = [f"{theme}-{size}" for theme in THEMES for size in SIZES]
    lines = [INDEX_HEAD, f"| page | {' | '.join(form.replace('-', ', ') for form in forms)} |"]
    lines.append("|---" * (1 + len(forms)) + "|")
    for name in (*PAGES, *FRESH_PAGES):
        pictures = [f"[{form}]({name}-{form}.webp)" for form in forms]
        lines.append(f"| {name.replace('-', ' ')} | {' | '.join(pictures)} |")
    (out / "README.md").write_text("\n".join(lines) + "\n")


def draw_all(page: Any) -> None:
    """Wait until the figures are drawn; each is drawn when it comes into sight."""
    page.wait_for_load_state("load")
    # The page of a cluster comes before Ray's answer.
    page.get_by_text("Loading the state of Ray").wait_for(state="hidden", timeout=DRAWN_MS)
    for figure in page.locator("[data-figure]").all():
        figure.scroll_into_view_if_needed()
        figure.locator("xpath=self::*[@data-state]").wait_for(timeout=DRAWN_MS)


def keep(page: Any, file: Path, whole: bool = False) -> None:
    """Write a picture of what is in sight, or of the whole page."""
    clip = None
    if whole:
        width, height = page.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, MOST_HEIGHT)}
    picture = Image.open(io.BytesIO(page.screenshot(full_page=whole, clip=clip))).convert("RGB")
    picture = picture.quantize(COLORS, dither=Image.Dither.NONE)
    if file.suffix == ".webp":
        picture.convert("RGB").save(file, lossless=True, quality=EFFORT, method=4)
    else:
        picture.save(file, optimize=True)
    print(f"{file}  {picture.width} x {picture.height}, {file.stat().st_size // 1024} KB", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
