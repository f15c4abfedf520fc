"""Speed and quality of drafts: ours beside arctic-inference 0.3.0 and vLLM 0.29.0's proposers, in one run.

    python benchmarks/drafting.py --arctic FOLDER --out drafting.json

Measured: time and memory, on synthetic responses (16 x 8192 tokens, each a copy of one text with mutations) and on a
recorded run's. Simulated: how many drafts are accepted, by exact replay of that run (benchmarks/replay.py), with each
part of ours switched off. "shared" replays all recorded runs and made texts (benchmarks/made_tasks.py) with and without
what all prompts share. Peers are timed in turn with ours, round by round.

FOLDER has the package arctic_inference; without it those columns are left out. Its whole install needs an older vLLM,
so build its suffix extension alone (needs cmake and nanobind, a few seconds). Download the source, then build:

    pip download --no-deps --no-build-isolation arctic-inference==0.3.0 && tar xf arctic_inference-0.3.0.tar.gz
    cd arctic_inference-0.3.0 && cmake -S csrc/suffix_decoding -B build && cmake --build build
    mkdir -p FOLDER/arctic_inference && touch FOLDER/arctic_inference/__init__.py
    cp -r arctic_inference/suffix_decoding FOLDER/arctic_inference/
    cp build/_C*.so FOLDER/arctic_inference/suffix_decoding/
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafting_peers as peers
import numpy as np
from draft_step_time import step_text, whole_step
from drafting_texts import CONTEXT, VOCABULARY, recorded, synthetic
from made_tasks import TASKS, made
from replay import ENGINES, REAL_TRACE, TRACE, TRACES, Drafter, Ours, name_of, read_trace, replay

from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

SHORTEST = HistoSpecSettings().prefix_min
LOOKUPS = 4000
REPEATS = 8
ROUNDS = 5
TMPFS = Path("/dev/shm")
PARTS = ["structure", "step", "hand_over", "acceptance", "shared"]
Timed = dict[str, list[float]]


def contexts(pieces: list[Piece]) -> list[list[int]]:
    """Ends of a text that a sample could have: places in the responses, a few tokens of them changed."""
    rng = random.Random(6)
    found = []
    for _ in range(LOOKUPS):
        tokens = list(rng.choice(pieces).tokens)
        at = rng.randrange(CONTEXT, len(tokens))
        end = tokens[at - CONTEXT : at]
        if rng.random() < 0.3:
            end[rng.randrange(CONTEXT)] = VOCABULARY + 1
        found.append(end)
    return found


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def structure(pieces: list[Piece], arctic: bool) -> dict[str, dict[str, float]]:
    """Build time (us a token), draft time (us, mean and p99, of 32 tokens), bytes a token.

    A draft is asked for from Python, as the peer's is; "compiled" is what it costs where ours is asked for, inside the
    compiled step: each of the lookups REPEATS times, so that calling and timing it do not count.
    """
    tokens = sum(len(piece.tokens) for piece in pieces)
    asked = contexts(pieces)
    index = DraftIndex.from_buffer(build_index(pieces))
    index.draft(asked[0], CONTEXT, SHORTEST, 32)
    ends = np.array(asked, dtype=np.int32)
    builds: Timed = {"ours": []}
    drafts: Timed = {"ours": []}
    size = {"ours": build_index(pieces).nbytes / tokens}
    trees: list[Any] = []
    if arctic:
        from arctic_inference.suffix_decoding._C import SuffixTree

        builds["arctic"], drafts["arctic"] = [], []

        def build_tree() -> None:
            tree = SuffixTree(64)
            for number, piece in enumerate(pieces):
                tree.extend(number, list(piece.tokens))
            trees[:] = [tree]

    for _ in range(ROUNDS):
        builds["ours"].append(1e6 * seconds(lambda: build_index(pieces)) / tokens)
        if arctic:
            builds["arctic"].append(1e6 * seconds(build_tree) / tokens)
    for context in asked:
        drafts["ours"].append(1e6 * seconds(lambda end=context: index.draft(end, CONTEXT, SHORTEST, 32)))
        if arctic:
            tree = trees[0]
            drafts["arctic"].append(
                1e6 * seconds(lambda end=context, at=tree: at.speculate(end, 32, 32.0, 0.0, 0.0, False))
            )
    compiled = [
        1e6 * seconds(lambda at=at: index.compiled.draft(ends[at], CONTEXT, SHORTEST, 32, REPEATS)) / REPEATS
        for at in range(LOOKUPS)
    ]
    drafts["ours, compiled"] = compiled
    builds["ours, compiled"], size["ours, compiled"] = builds["ours"], size["ours"]
    if arctic:
        size["arctic"] = trees[0].estimate_memory() / tokens
    return {
        name: {
            "build_us_per_token": statistics.median(builds[name]),
            "draft_us_mean": statistics.mean(drafts[name]),
            "draft_us_p99": float(np.percentile(drafts[name], 99)),
            "bytes_per_token": size[name],
        }
        for name in builds
    }


def hand_over(pieces: list[Piece]) -> dict[str, float]:
    """Milliseconds for what the engine process does with a new index: map it, check it, first draft."""
    buffer = build_index(pieces)
    end = list(pieces[0].tokens)[100 : 100 + CONTEXT]
    taken = []
    with tempfile.NamedTemporaryFile(dir=TMPFS) as file:
        buffer.tofile(file.name)
        for _ in range(ROUNDS):
            taken.append(
                1000
                * seconds(
                    lambda: DraftIndex.from_buffer(np.memmap(file.name, dtype=np.uint8, mode="r")).draft(
                        end, CONTEXT, SHORTEST, 32
                    )
                )
            )
    return {"hand_over_ms": statistics.median(taken), "tokens": float(sum(len(piece.tokens) for piece in pieces))}


def variants(arctic: bool) -> dict[str, Callable[[], Drafter]]:
    """Ours, ours with each part switched off, and the peers."""

    def ours(**changes: Any) -> Callable[[], Drafter]:
        return lambda: Ours(HistoSpecSettings(**changes))

    plain = {"extend_confidence": 1.0, "stop_confidence": 0.0}
    rows, length = 256, 1024
    found: dict[str, Callable[[], Drafter]] = {
        "ours": ours(),
        "ours, from the last two rollouts": lambda: Ours(HistoSpecSettings(), rollouts=2),
        "without rewards (counts choose)": lambda: Ours(HistoSpecSettings(), with_rewards=False),
        "without siblings": ours(siblings=False),
        "without own text": ours(own_output=False),
        "without what all prompts share": ours(shared_tokens=0),
        "without history": lambda: Ours(HistoSpecSettings(), rollouts=0),
        "without confidence (the paper's window)": ours(**plain),
        "without window (always 32)": ours(window_start=32, **plain),
        "7 down to 3 tokens looked up": ours(prefix_max=7, prefix_min=3),
        "16 down to 3 tokens looked up": ours(prefix_min=3),
        "RhymeRL's own: 7 to 3, window, history only": ours(
            prefix_max=7, prefix_min=3, own_output=False, siblings=False, shared_tokens=0, **plain
        ),
        "vllm ngram": lambda: peers.ngram(rows, length),
    }
    if arctic:
        found["vllm suffix (arctic)"] = lambda: peers.suffix(rows, length)
    return found


def acceptance(steps: list[list[Record]], arctic: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Return by variant the first epoch, and all later ones."""
    rows = {}
    for name, make in variants(arctic).items():
        epochs = replay(steps, [make() for _ in range(ENGINES)])
        rows[name] = {
            "epoch 1": figures(epochs[0]),
            "epochs 2 on": figures(sum(epochs[1:], Counter())),
        }
    return rows


def shared(arctic: bool) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return the figures of each run by drafter and epoch."""
    runs = {name_of(path): read_trace(path) for path in (*TRACES, REAL_TRACE)}
    runs |= {task: made(task) for task in TASKS}
    drafters: dict[str, Callable[[], Drafter]] = {
        "ours": lambda: Ours(HistoSpecSettings()),
        "without what all prompts share": lambda: Ours(HistoSpecSettings(shared_tokens=0)),
    }
    if arctic:
        drafters["vllm suffix (arctic)"] = lambda: peers.suffix(512, 1024)
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for run, steps in runs.items():
        for name, make in drafters.items():
            engines = 1 if run == name_of(REAL_TRACE) else ENGINES
            epochs = replay(steps, [make() for _ in range(engines)])
            by_epoch = {"epoch 1": figures(epochs[0]), "later": figures(sum(epochs[1:], Counter()))}
            found.setdefault(run, {})[name] = by_epoch
    return found


def figures(total: Counter[str]) -> dict[str, float]:
    """Return the figures of a replay's totals."""
    return {
        "tokens_per_step": total["tokens"] / total["samples"],
        "decode_steps": total["steps"],
        "drafted": total["drafted"],
        "acceptance": total["accepted"] / max(1, total["drafted"]),
        **{f"from_{source}": total[f"from {source}"] / total["tokens"] for source in SOURCE_NAMES[1:]},
    }


def table(results: dict[str, Any]) -> str:
    """Return all results as text."""
    lines = []
    for data, found in results.get("structure", {}).items():
        for name, row in found.items():
            shown = "  ".join(f"{key} {value:9.2f}" for key, value in row.items())
            lines.append(f"{data:10s} {name:14s} {shown}")
    if "step" in results:
        lines.append(step_text({"now": results["step"]}))
    if "hand_over" in results:
        over = results["hand_over"]
        lines.append(f"hand over {over['tokens']:,.0f} tokens: {over['hand_over_ms']:.2f} ms")
    for epoch in ("epoch 1", "epochs 2 on") if "acceptance" in results else ():
        lines.append(f"\n{epoch:44s} tok/step   steps  drafted  accepted  history  siblings  own  shared")
        for name, rows in results["acceptance"].items():
            row = rows[epoch]
            shares = "  ".join(f"{row[f'from_{source}']:7.0%}" for source in SOURCE_NAMES[1:])
            lines.append(
                f"{name:44s} {row['tokens_per_step']:8.2f} {row['decode_steps']:7,.0f} {row['drafted']:8,.0f} "
                f"{row['acceptance']:9.1%}  {shares}"
            )
    for run, by_drafter in results.get("shared", {}).items():
        for name, by_epoch in by_drafter.items():
            for epoch, row in by_epoch.items():
                shares = "  ".join(f"{source} {row[f'from_{source}']:4.0%}" for source in SOURCE_NAMES[1:])
                lines.append(
                    f"{run:24s} {name:32s} {epoch:8s} {row['tokens_per_step']:6.3f} tokens a step  "
                    f"{row['drafted']:8,.0f} drafted  {shares}"
                )
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arctic", type=Path, help="folder with the package arctic_inference")
    parser.add_argument(
        "--parts", nargs="*", default=PARTS, choices=PARTS, help="what to measure; all of it by default"
    )
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--out", type=Path, default=Path("drafting.json"))
    chosen = parser.parse_args()
    arctic = chosen.arctic is not None
    if arctic:
        peers.use_arctic(chosen.arctic)
    steps = read_trace(chosen.trace)
    data = {"synthetic": synthetic(), "recorded": recorded(steps)}
    measure: dict[str, Callable[[], Any]] = {
        "structure": lambda: {name: structure(pieces, arctic) for name, pieces in data.items()},
        "step": lambda: {name: whole_step(pieces, arctic) for name, pieces in data.items()},
        "hand_over": lambda: hand_over(data["synthetic"]),
        "acceptance": lambda: acceptance(steps, arctic),
        "shared": lambda: shared(arctic),
    }
    results = {"cpus": os.cpu_count()} | {part: measure[part]() for part in chosen.parts}
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
