"""RhymeRL's figures 6, 8, 16 and 17 of a recorded run of ours: a page (`--html`), its numbers (`--out`), and a table.

    python benchmarks/rhymerl_figures.py RUN --without OTHER_RUN --html figures.html --out figures.json

RUN: the directory of a run with its events and, for figures 6 and 8, its history workers' journals; OTHER_RUN: the same
run without drafts, which figure 16 compares with. A journal over 1 MB is shortened to the rollouts that drafts need:
then `--trace` gives the responses (a file of `replay.write_trace`), alone or beside a run.

- 6a: the share of an epoch's responses that the epoch before has, by section 5.1 (history/similarity.py).
- 6b: the distribution of that share over the responses.
- 8: lengths of the accepted stretches: shares of their number, and of all their tokens.
- 16: tokens/s of the rollout stage, step by step, over those of OTHER_RUN's first step (without it: RUN's own).
- 17: speculation rate (response tokens that were drafted) and acceptance rate (drafted tokens that were right).

6 and 8 are simulated from what was said; 16 and 17 are what the run's engines recorded.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from replay import epochs_of, read_journal, read_trace

from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.history.similarity import Similarity, responses
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import EngineStep, RolloutFinished
from rhyme_openrlhf.telemetry.metrics import EngineCounters

# Upper ends of the classes of figure 8; the last class has no end.
LENGTHS = (2, 4, 8, 16, 32, 64)
# Classes of figure 6b: tenths.
SHARES = 10


def row(found: Similarity) -> dict[str, Any]:
    """Return the share accepted, its deciles' counts, and the hits by class of length, for JSON."""
    classes = [np.searchsorted(LENGTHS, length) for length in found.hits]
    number, tokens = np.zeros(len(LENGTHS) + 1), np.zeros(len(LENGTHS) + 1)
    for of, (length, count) in zip(classes, found.hits.items(), strict=True):
        number[of] += count
        tokens[of] += count * length
    histogram, _ = np.histogram(found.shares, bins=SHARES, range=(0, 1))
    return {
        "accepted": found.share,
        "responses_by_share": (histogram / max(1, len(found.shares))).tolist(),
        "hits_by_length": (number / max(1, number.sum())).tolist(),
        "hit_tokens_by_length": (tokens / max(1, tokens.sum())).tolist(),
    }


def similarity(epochs: dict[int, list[Record]]) -> dict[int, Similarity]:
    """Return each epoch against the one before it; prompts that had no rollout there do not count."""
    out = {}
    for epoch in sorted(epochs):
        if epoch - 1 not in epochs:
            continue
        before = {record.prompt_key: responses(record.pieces) for record in epochs[epoch - 1]}
        out[epoch] = Similarity()
        for record in epochs[epoch]:
            earlier = before.get(record.prompt_key)
            if earlier:
                out[epoch].add(responses(record.pieces), earlier)
    return out


def by_epoch(records: list[Record], epoch_of: dict[int, int]) -> dict[int, list[Record]]:
    """Records by the epoch of their training step; steps that are not in `epoch_of` were not finished."""
    epochs: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.rollout_id in epoch_of:
            epochs[epoch_of[record.rollout_id]].append(record)
    return dict(epochs)


def recorded_steps(directory: Path) -> list[dict[str, Any]]:
    """Return each training step of a run: epoch, tokens/s of its rollout, speculation and acceptance rate."""
    counters: dict[int, EngineCounters] = defaultdict(EngineCounters)
    finished: dict[int, RolloutFinished] = {}
    for event in (recorded.event for recorded in read_events(directory / "events.jsonl")):
        if isinstance(event, EngineStep):
            counters[event.step] += event.counters
        elif isinstance(event, RolloutFinished):
            finished[event.step] = event
    return [
        {
            "step": step,
            "epoch": rollout.epoch,
            "tokens_per_s": rollout.response_tokens / rollout.seconds,
            "speculation": counters[step].accepted / max(1, counters[step].response_tokens),
            "acceptance": counters[step].accepted / counters[step].drafted if counters[step].drafted else None,
        }
        for step, rollout in sorted(finished.items())
    ]


def throughput(steps: list[dict[str, Any]], without: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Figure 16: tokens/s of each step, normalised, with drafts and (where there is such a run) without."""
    unit = (without or steps)[0]["tokens_per_s"]
    arms = {"with drafts": steps, "without drafts": without}
    return {name: [step["tokens_per_s"] / unit for step in arm] for name, arm in arms.items() if arm}


def figures(results: dict[str, Any]) -> list[go.Figure]:
    """Return one figure for each of the paper's that the results have data for."""
    found = []
    if results["similarity"]:
        epochs = list(results["similarity"])
        rows = list(results["similarity"].values())
        figure = _titled("6a. Found in the epoch before", "epoch", "share of tokens")
        figure.add_scatter(x=epochs, y=[row["accepted"] for row in rows], mode="lines+markers")
        figure.update_xaxes(dtick=1)
        found.append(figure)
        figure = _titled("6b. Responses by the share that is found", "share of a response", "share of responses")
        for epoch, row in results["similarity"].items():
            tenths = [f"{i * 100 // SHARES} to {(i + 1) * 100 // SHARES} %" for i in range(SHARES)]
            figure.add_bar(x=tenths, y=row["responses_by_share"], name=f"epoch {epoch}")
        found.append(figure)
        figure = _titled("8. Lengths of what is found, last epoch", "tokens in a stretch", "share")
        figure.add_bar(x=length_names(), y=rows[-1]["hits_by_length"], name="of the stretches")
        figure.add_bar(x=length_names(), y=rows[-1]["hit_tokens_by_length"], name="of their tokens")
        found.append(figure)
    if results["steps"]:
        numbers = [step["step"] for step in results["steps"]]
        figure = _titled("16. Rollout throughput", "training step", "tokens/s, normalised")
        for name, values in results["throughput"].items():
            figure.add_scatter(x=numbers[: len(values)], y=values, mode="lines+markers", name=name)
        found.append(figure)
        figure = _titled("17. Speculation and acceptance rate", "training step", "rate")
        for name in ("speculation", "acceptance"):
            figure.add_scatter(x=numbers, y=[step[name] for step in results["steps"]], mode="lines+markers", name=name)
        found.append(figure)
    return found


def length_names() -> list[str]:
    """Return the classes of figure 8 in words."""
    begins = [1, *(end + 1 for end in LENGTHS)]
    return [*(f"{begin} to {end}" for begin, end in zip(begins, LENGTHS, strict=False)), f"over {LENGTHS[-1]}"]


def _titled(title: str, across: str, up: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(title=title, template="plotly_white", height=420, barmode="group")
    figure.update_xaxes(title=across)
    figure.update_yaxes(title=up, rangemode="tozero")
    return figure


def page(results: dict[str, Any]) -> str:
    """Return all figures in one self-contained HTML page."""
    parts = [
        figure.to_html(full_html=False, include_plotlyjs="inline" if number == 0 else False)
        for number, figure in enumerate(figures(results))
    ]
    title = f"RhymeRL's figures of {results['run']}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
        f'<body style="font-family: system-ui; max-width: 1200px; margin: 1rem auto"><h1>{escape(title)}</h1>'
        f"{''.join(parts)}</body></html>"
    )


def table(results: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = []
    for epoch, row in results["similarity"].items():
        classes = zip(length_names(), row["hits_by_length"], row["hit_tokens_by_length"], strict=True)
        shown = "  ".join(f"{name}: {number:.0%}/{tokens:.0%}" for name, number, tokens in classes)
        lines.append(f"epoch {epoch}: {row['accepted']:.1%} found; stretches/tokens by length  {shown}")
        lines.append("  responses by tenths found: " + " ".join(f"{v:.0%}" for v in row["responses_by_share"]))
    for number, step in enumerate(results["steps"]):
        rates = f"speculation {step['speculation']:.0%}, acceptance " + (
            "-" if step["acceptance"] is None else f"{step['acceptance']:.0%}"
        )
        speeds = ", ".join(
            f"{name} {arm[number]:.2f}" for name, arm in results["throughput"].items() if number < len(arm)
        )
        lines.append(f"step {step['step']} (epoch {step['epoch']}): {rates}; tokens/s {speeds}")
    return "\n".join(lines)


def main() -> None:
    """Compute, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="the run's directory")
    parser.add_argument("--without", type=Path, help="the directory of the same run without drafts")
    parser.add_argument("--trace", type=Path, help="the responses, if not from the run's journals")
    parser.add_argument("--html", type=Path, default=Path("rhymerl_figures.html"))
    parser.add_argument("--out", type=Path, default=Path("rhymerl_figures.json"))
    chosen = parser.parse_args()
    if chosen.run is None and chosen.trace is None:
        parser.error("give the directory of a run, or --trace")
    steps = recorded_steps(chosen.run) if chosen.run else []
    without = recorded_steps(chosen.without) if chosen.without else []
    if chosen.trace:
        grouped: dict[int, list[Record]] = defaultdict(list)
        trace = read_trace(chosen.trace)
        for epoch, of_a_step in zip(epochs_of(trace), trace, strict=True):
            grouped[epoch] += of_a_step
    else:
        journals = sorted((chosen.run / "history").glob("*.journal"))
        records = [record for path in journals for record in read_journal(path)]
        grouped = by_epoch(records, {step["step"]: step["epoch"] for step in steps})
    results = {
        "run": str(chosen.run or chosen.trace),
        "similarity": {epoch: row(found) for epoch, found in similarity(grouped).items()},
        "steps": steps,
        "throughput": throughput(steps, without) if steps else {},
    }
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")
    chosen.html.write_text(page(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
