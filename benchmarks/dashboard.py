"""Load time of a large run's page, and the browser's cost of a live update. Measured on this machine.

    python benchmarks/dashboard.py --out dashboard.json
    python benchmarks/dashboard.py --steps 500 --updates 50           # smaller
    python benchmarks/dashboard.py --store DIR                        # keep the runs in DIR, or use those there

By default the run has 5,000 steps of 64 engines, which takes minutes to make. A run of synthetic events
(api/demo/synthetic_run.py) is stored as if it had been reported, without its last steps. `rhyme serve` shows it to a
real Chromium.

Loads: the run's page from the start of the navigation to the first figure drawn, in turns with an empty browser cache
(new profile) and with a filled one.

Sweep: an experiment of `--sweep` runs beside it, five seeds for each of its groups, with the settings that a recorded
run has. Measured are the table of its runs, and the parallel coordinates of its page, from the start of the navigation
until they are drawn.

Updates: the missing steps are reported one after the other. Each makes the page fetch and draw what changed. The page's
clock is then wound forward by 12 seconds, so that an hour's 300 updates fit into minutes. An update's cost is all
main-thread time (the browser's own TaskDuration) of these 12 seconds. The cost of 12 seconds without news, which is
mostly winding the clock forward, is given beside it. Two clocks measure it: processor time, and the time between a
task's begin and end. The second includes the service's work, because both run on the same cores. Memory is what is left
after a garbage collection.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.demo.recording import unpack
from rhyme_openrlhf.api.demo.synthetic_run import SyntheticRun, synthetic_events
from rhyme_openrlhf.api.ingest.announce import Announcement, announce
from rhyme_openrlhf.api.ingest.store_batch import ingest
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Experiment
from rhyme_openrlhf.telemetry.event_json import to_json
from rhyme_openrlhf.telemetry.events import TrainStep
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE

ROOT = Path(__file__).parents[1]
RUN, ATTEMPT = "5" * 16, "6" * 16
# What the reporter sends at most (telemetry/reporter.py).
BATCH_EVENTS = 2000
START_SECONDS = 120
WAIT_MS = 60_000
# The page fetches at most once a second (static/js/live.js).
REFRESH_MS = 1000
# Between two reported steps, on the page's clock.
STEP_S = 12
# Real time that the service has to answer in each of these seconds.
ANSWER_MS = 25
# Updates between two looks at memory.
MEMORY_EVERY = 25
# Updates after which all that updates run has been compiled.
SETTLED = 100
# Times between two steps without a step, before the first one.
IDLE_STEPS = 10
TARGET_LOAD_S = 1.5
TARGET_UPDATE_MS = 50.0
# The recording whose settings the sweep's runs have, and the options in which their groups differ.
RECORDED = "drafts-seed-1"
SWEEP, SWEEP_STEPS, SWEEP_ENGINES, SEEDS = "sweep", 60, 2, 5
RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
WINDOWS = (4, 8, 16, 32, 64)
# A figure is fetched when it is in sight, so the reader goes to it at once.
SCROLLED = """
document.addEventListener("DOMContentLoaded", () =>
  document.querySelector("[data-name=experiment-parallel]")?.scrollIntoView({ behavior: "instant" }));
"""
# Of a page without figures: the time of the first picture after everything has loaded.
PAINTED = """
new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(performance.now()))))
"""
# Put into the page before its own scripts. It counts figures, updates of the page and long tasks (above 50 ms, as
# browsers define them), and notes when the first figure was drawn.
DRAWN = """
window.draws = window.refreshes = 0;
window.longTasks = [];
document.addEventListener("rhyme:drawn", () => {
  window.drawn ??= performance.now();
  window.draws += 1;
});
document.addEventListener("rhyme:refreshed", () => { window.refreshes += 1; });
new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((one) => one.duration)))
  .observe({ type: "longtask" });
"""
SHOWN = """
([refreshes, shown]) =>
  window.refreshes > refreshes && document.querySelector(".progress-text").textContent.startsWith(shown)
"""


@dataclass(frozen=True)
class Store:
    """A service's data directory with the large run and the sweep in it.

    `later`: one JSON line a step that is still to come. `experiment`: the sweep's id.
    """

    folder: Path
    token: str
    later: list[list[dict[str, Any]]]
    experiment: int


def make_store(folder: Path, steps: int, engines: int, later: int) -> None:
    """Report all but the last `later` steps; write those to later.jsonl, and the operator's token beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    database = Database(f"sqlite:///{folder / 'rhyme.sqlite'}")
    database.upgrade()
    run = SyntheticRun(steps=steps + later, engines=engines)
    config = {"settings": {"run": {"name": run.name}}, "arguments": {}}
    with database.writing() as session:
        token = credentials.issue_token(session, "benchmark", "operator", time.time()).secret
        announce(session, Announcement(ATTEMPT, RUN, run.name, "", config), time.time())
    rows = _rows(run)
    done = 0
    pending: list[dict[str, Any]] = []
    begun = time.monotonic()
    for row in rows:
        pending.append(row)
        if row["kind"] == TrainStep.kind:
            done = row["step"]
        if len(pending) >= BATCH_EVENTS or (done == steps and row["kind"] == TrainStep.kind):
            with database.writing() as session:
                ingest(session, ATTEMPT, prepare(pending), time.time(), alive=True)
            pending = []
            if done == steps:
                break
    print(f"{done:,} steps of {engines} engines stored in {time.monotonic() - begun:.0f} s", flush=True)
    database.dispose()
    with (folder / "later.jsonl").open("w") as file:
        for row in rows:
            pending.append(row)
            if row["kind"] == TrainStep.kind:
                file.write(json.dumps(pending) + "\n")
                pending = []
    (folder / "token").write_text(token)


def make_sweep(folder: Path, runs: int) -> None:
    """Store an experiment of finished runs with a recorded run's settings; write its id to sweep.txt."""
    with tempfile.TemporaryDirectory() as recordings:
        recorded = next(path for path in unpack(embedded.RECORDING, Path(recordings)) if path.name == RECORDED)
        text = (recorded / CONFIG_FILE).read_text()
    database = Database(f"sqlite:///{folder / 'rhyme.sqlite'}")
    with database.writing() as session:
        experiment = Experiment(name=SWEEP, description="", created_at=time.time())
        session.add(experiment)
        session.flush()
        (folder / "sweep.txt").write_text(str(experiment.id))
    begun = time.monotonic()
    choices = product(RATES, WINDOWS, range(1, SEEDS + 1))
    for number, (rate, window, seed) in enumerate(islice(choices, runs), start=1):
        run, name = SyntheticRun(SWEEP_STEPS, SWEEP_ENGINES, seed=number), f"{SWEEP}-{number:03d}"
        config = json.loads(text)
        config["settings"]["run"]["name"], config["settings"]["histospec"]["window_max"] = name, window
        config["arguments"]["actor"]["adam"]["lr"], config["arguments"]["train"]["seed"] = rate, seed
        uid, attempt = f"{number:016x}", f"{number:015x}a"
        with database.writing() as session:
            made = announce(session, Announcement(attempt, uid, name, "", config), time.time())
            made.run.experiment_id = int((folder / "sweep.txt").read_text())
            ingest(session, attempt, prepare(list(_rows(run))), time.time(), alive=False)
    print(f"{runs} runs of {SWEEP_STEPS} steps stored in {time.monotonic() - begun:.0f} s", flush=True)
    database.dispose()


def _rows(run: SyntheticRun) -> Iterator[dict[str, Any]]:
    for one in synthetic_events(run):
        yield to_json(one.event, one.time, one.source, one.sequence)


def open_store(folder: Path, steps: int, engines: int, later: int, sweep: int) -> Store:
    """Open the store in `folder`; make what is missing in it."""
    if not (folder / "token").is_file():
        make_store(folder, steps, engines, later)
    if not (folder / "sweep.txt").is_file():
        make_sweep(folder, sweep)
    rows = [json.loads(line) for line in (folder / "later.jsonl").read_text().splitlines()]
    return Store(folder, (folder / "token").read_text(), rows, int((folder / "sweep.txt").read_text()))


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`rhyme serve` on the store; gives its address."""
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "serve", "--no-local", "--serve.port", "0"]
    command += ["--serve.data_dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"rhyme serve: (http://\S+)", line):
                break
        else:
            raise SystemExit("dashboard: the service did not start")
        yield found.group(1)
    finally:
        server.terminate()
        server.communicate(timeout=START_SECONDS)


def sign_in(context: Any, url: str, token: str) -> Any:
    """Return a signed-in page of this profile."""
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{url}/#token={token}")
    page.wait_for_url(f"{url}/")
    return page


def measure_loads(browser: Any, url: str, token: str, repeats: int) -> dict[str, list[float]]:
    """Seconds to the first figure, with an empty and with a full cache, in turns."""
    found: dict[str, list[float]] = {"new profile": [], "with the browser's cache": []}
    for _ in range(repeats):
        for name in found:
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            page = sign_in(context, url, token)
            page.add_init_script(DRAWN)
            if name != "new profile":
                _load(page, url)
                page.goto("about:blank")
            found[name].append(_load(page, url))
            context.close()
    return found


def measure_sweep(browser: Any, url: str, store: Store, repeats: int) -> dict[str, list[float]]:
    """Seconds until the table of the sweep's runs and the parallel coordinates are drawn, by new profiles in turns."""
    pages = {"table of runs": f"/?experiment={SWEEP}", "parallel coordinates": f"/experiments/{store.experiment}"}
    found: dict[str, list[float]] = {name: [] for name in pages}
    for _ in range(repeats):
        for name, path in pages.items():
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            page = sign_in(context, url, store.token)
            page.add_init_script(DRAWN + SCROLLED)
            if "experiments" in path:
                found[name].append(_load(page, url, path))
            else:
                page.goto(url + path)
                found[name].append(float(page.evaluate(PAINTED)) / 1000)
            context.close()
    return found


def _load(page: Any, url: str, path: str = f"/runs/{RUN}") -> float:
    """Return the seconds to the first figure drawn."""
    page.goto(url + path)
    _wait(page, "window.drawn !== undefined")
    return float(page.evaluate("window.drawn")) / 1000


def _wait(page: Any, condition: str) -> None:
    """Wait until it holds; Playwright's own wait evaluates text within the page, which its security policy refuses."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            raise SystemExit(f"dashboard: {condition} did not come true within {WAIT_MS / 1000:.0f} s")
        time.sleep(0.02)


def measure_updates(browser: Any, url: str, store: Store, updates: int) -> dict[str, Any]:
    """Main-thread milliseconds of an update, and memory after every `MEMORY_EVERY` of them."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = sign_in(context, url, store.token)
    page.clock.install()
    page.add_init_script(DRAWN)
    _load(page, url)
    _wait(page, "document.querySelector('[data-connection]').dataset.state === 'live'")
    devtools = context.new_cdp_session(page)
    devtools.send("HeapProfiler.enable")
    clocks = {"processor": context.new_cdp_session(page), "wall": context.new_cdp_session(page)}
    clocks["processor"].send("Performance.enable", {"timeDomain": "threadTicks"})
    clocks["wall"].send("Performance.enable")
    begun = _main_thread_ms(clocks)
    for _ in range(IDLE_STEPS):
        _pass(page)
    idle = {name: (now - begun[name]) / IDLE_STEPS for name, now in _main_thread_ms(clocks).items()}
    costs: dict[str, list[float]] = {name: [] for name in clocks}
    drawn: list[int] = []
    page.evaluate("window.longTasks.length = 0")
    memory: list[dict[str, float]] = [_memory(devtools, clocks["wall"], 0)]
    for number, rows in enumerate(islice(store.later, updates), start=1):
        draws, refreshes = page.evaluate("[window.draws, window.refreshes]")
        begun = _main_thread_ms(clocks)
        _report(url, store.token, rows)
        _pass(page)
        shown = f"{rows[-1]['step']:,} / "
        for _ in range(WAIT_MS // REFRESH_MS):
            if page.evaluate(SHOWN, [refreshes, shown]):
                break
            page.clock.run_for(REFRESH_MS)
            page.wait_for_timeout(ANSWER_MS)
        else:
            raise SystemExit(f"dashboard: update {number} was not shown")
        for name, now in _main_thread_ms(clocks).items():
            costs[name].append(now - begun[name])
        drawn.append(page.evaluate("window.draws") - draws)
        if number % MEMORY_EVERY == 0:
            memory.append(_memory(devtools, clocks["wall"], number))
    long_tasks = page.evaluate("window.longTasks")
    context.close()
    return {"idle_ms": idle, "update_ms": costs, "drawn": drawn, "long_tasks_ms": long_tasks, "memory": memory}


def _pass(page: Any) -> None:
    """Let the time between two steps pass."""
    for _ in range(STEP_S * 1000 // REFRESH_MS):
        page.clock.run_for(REFRESH_MS)
        page.wait_for_timeout(ANSWER_MS)


def _metrics(devtools: Any) -> dict[str, float]:
    return {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}


def _main_thread_ms(clocks: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds that the page's main thread has worked so far, by each clock."""
    return {name: _metrics(devtools)["TaskDuration"] * 1000 for name, devtools in clocks.items()}


def _memory(devtools: Any, counters: Any, updates: int) -> dict[str, float]:
    devtools.send("HeapProfiler.collectGarbage")
    found = _metrics(counters)
    return {
        "updates": updates,
        "heap_mb": found["JSHeapUsedSize"] / 1024**2,
        "nodes": found["Nodes"],
        "listeners": found["JSEventListeners"],
    }


def _report(url: str, token: str, rows: list[dict[str, Any]]) -> None:
    request = urllib.request.Request(
        f"{url}/api/v1/ingest/attempts/{ATTEMPT}/batches",
        json.dumps({"events": rows}).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        answer.read()


def print_tables(found: dict[str, Any]) -> None:
    """Print the measurements against their targets."""
    print("\n| navigation to drawn | median s | lowest | highest | target |\n|---|---|---|---|---|")
    for name, values in {**found["load_s"], **found["sweep_s"]}.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} | {TARGET_LOAD_S} |")
    updates = found["updates"]
    for clock, measured in updates["update_ms"].items():
        idle = updates["idle_ms"][clock]
        print(f"\n| main thread, ms an update, {clock} | mean | median | 95 % | highest | over {TARGET_UPDATE_MS:g} |")
        print("|---|---|---|---|---|---|")
        both = list(zip(measured, updates["drawn"], strict=True))
        for name, costs in (
            ("all", measured),
            (f"less {idle:.1f} of {STEP_S} s without news", [ms - idle for ms in measured]),
            ("figures drawn, less that", [ms - idle for ms, figures in both if figures]),
            ("none drawn, less that", [ms - idle for ms, figures in both if not figures]),
        ):
            if ordered := sorted(costs):
                last = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
                over = sum(ms > TARGET_UPDATE_MS for ms in ordered)
                print(
                    f"| {name}: {len(ordered)} | {statistics.fmean(ordered):.1f} | {statistics.median(ordered):.1f} | "
                    f"{last:.1f} | {ordered[-1]:.1f} | {over} |"
                )
    figures = sum(updates["drawn"]) / max(1, sum(1 for one in updates["drawn"] if one))
    long_tasks = updates["long_tasks_ms"]
    print(f"\n{figures:.1f} figures drawn where any are. ", end="")
    print(f"Tasks of more than 50 ms: {len(long_tasks)}, the longest {max(long_tasks, default=0):.0f} ms")
    print("\n| after updates | heap MB | DOM nodes | listeners |\n|---|---|---|---|")
    for one in updates["memory"]:
        print(f"| {one['updates']} | {one['heap_mb']:.2f} | {one['nodes']:.0f} | {one['listeners']:.0f} |")
    # The first updates compile what the others run.
    settled = [one["heap_mb"] for one in updates["memory"] if one["updates"] >= SETTLED]
    if len(settled) > 1:
        slope = statistics.linear_regression(range(len(settled)), settled).slope
        print(f"From {SETTLED} updates on: {1024 * slope / MEMORY_EVERY:+.1f} KB of heap an update")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--sweep", type=int, default=200, metavar="RUNS", help="runs of the experiment, at most 200")
    parser.add_argument("--repeats", type=int, default=5, help="loads of each kind")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--store", type=Path, metavar="DIR", help="where the runs are kept; else a temporary folder")
    parser.add_argument("--make-only", action="store_true", help="make the runs in --store and measure nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON with everything that was measured")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        store = open_store(given.store or Path(temporary), given.steps, given.engines, given.updates, given.sweep)
        if given.make_only:
            return 0
        with serving(store.folder) as url, sync_playwright() as playwright:
            # As root, which containers are, Chromium does not start with its sandbox.
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            found: dict[str, Any] = {
                "steps": given.steps,
                "engines": given.engines,
                "browser": browser.version,
                "load_s": measure_loads(browser, url, store.token, given.repeats),
                "sweep_s": measure_sweep(browser, url, store, given.repeats),
                "updates": measure_updates(browser, url, store, given.updates),
            }
            browser.close()
    print_tables(found)
    if given.out:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
