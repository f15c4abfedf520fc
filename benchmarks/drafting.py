"""How fast and how good are drafts? Ours beside arctic-inference 0.3.0 and vLLM 0.29.0's proposers, in one run.

    python benchmarks/drafting.py --arctic FOLDER --out drafting.json

Measured: time and memory, on synthetic responses (16 x 8192 tokens, each a copy of one text with mutations) and on a
recorded run's. Simulated: how many drafts are accepted, by exact replay of that run (benchmarks/replay.py), with each
part of ours switched off. Peers are timed in turn with ours, round by round.

FOLDER has the package arctic_inference; without it those columns are left out. Its whole install wants an older vLLM,
so build its suffix extension alone (needs cmake and nanobind, a few seconds):

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
from numba import njit
from replay import ENGINES, TRACE, Drafter, Ours, read_trace, replay

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.history.lookup import draft_from
from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.speculation.drafter import HistoryDrafter, Verified

RESPONSES = 16
RESPONSE_TOKENS = 8192
VOCABULARY = 50000
# Tokens between two mutations on average: runs of equal text like those of recorded runs.
MUTATION_EVERY = 40
CONTEXT = HistoSpecSettings().prefix_max
SHORTEST = HistoSpecSettings().prefix_min
LOOKUPS = 4000
REPEATS = 8
STEP_SAMPLES = 512
ROUNDS = 5
STEPS_TIMED = 12
TMPFS = Path("/dev/shm")
Timed = dict[str, list[float]]


def synthetic() -> list[Piece]:
    """Responses that share long runs of text, and differ every MUTATION_EVERY tokens or so."""
    rng = random.Random(5)
    base = [rng.randrange(VOCABULARY) for _ in range(RESPONSE_TOKENS)]
    context = [rng.randrange(VOCABULARY) for _ in range(CONTEXT)]
    pieces = []
    for number in range(RESPONSES):
        text = [rng.randrange(VOCABULARY) if rng.random() < 1 / MUTATION_EVERY else token for token in base]
        pieces.append(Piece(context, text, float(number % 2)))
    return pieces


def recorded(steps: list[list[Record]]) -> list[Piece]:
    """A recorded run's longest prompt: its responses of several epochs, one after the other, to the same length."""
    texts: dict[str, list[list[int]]] = {}
    for records in steps:
        for record in records:
            texts.setdefault(record.prompt_key, []).extend([int(t) for t in piece.tokens] for piece in record.pieces)
    longest = max(texts.values(), key=lambda found: sum(map(len, found)))
    flat = [token for text in longest for token in text]
    flat *= -(-RESPONSES * RESPONSE_TOKENS // len(flat))
    return [
        Piece(flat[:CONTEXT], flat[i * RESPONSE_TOKENS : (i + 1) * RESPONSE_TOKENS], float(i % 2))
        for i in range(RESPONSES)
    ]


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
    """How long one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@njit(cache=True, nogil=True)
def _each(tokens: Any, suffixes: Any, sums: Any, ends: Any, repeats: int) -> int:
    """Draft `repeats` times for each row of `ends`."""
    out, confidence = np.empty(32, dtype=np.int32), np.empty(32, dtype=np.float32)
    total = 0
    for _ in range(repeats):
        for row in range(ends.shape[0]):
            found, _ = draft_from(tokens, suffixes, sums, ends[row], CONTEXT, SHORTEST, out, confidence)
            total += found
    return total


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
    _each(*index.arrays(), ends[:1], 1)
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
        1e6 * seconds(lambda at=at: _each(*index.arrays(), ends[at : at + 1], REPEATS)) / REPEATS
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


def whole_step(pieces: list[Piece], arctic: bool) -> dict[str, dict[str, float]]:
    """All drafting of one step for STEP_SAMPLES samples, in ms, median and worst of STEPS_TIMED steps.

    Every sample repeats one of the responses from a place of its own and gains a draft's worth of tokens a step. For
    ours, lists in and lists out as vLLM's scheduler has them; for vLLM's proposers, without making their input batch.
    "ours": each prompt has an index of its own in memory, as in a run, more than a core's caches hold; "ours, one
    index": all prompts' is the same, as the one tree of the suffix proposer is.
    """
    step = 8
    length = CONTEXT + 64 + STEPS_TIMED * step
    rng = random.Random(7)
    texts = []
    for number in range(STEP_SAMPLES):
        tokens = list(pieces[number % len(pieces)].tokens)
        at = rng.randrange(len(tokens) - length)
        texts.append([*pieces[0].context, *tokens[at : at + length]])
    names = [f"sample {number}" for number in range(STEP_SAMPLES)]
    prompts = [f"prompt {number // RESPONSES}" for number in range(STEP_SAMPLES)]
    buffer = build_index(pieces)
    ours = {"ours": HistoryDrafter(HistoSpecSettings()), "ours, one index": HistoryDrafter(HistoSpecSettings())}
    for which, drafter in ours.items():
        for prompt in dict.fromkeys(prompts):
            drafter.install(prompt, buffer.copy() if which == "ours" else buffer)
        for name, prompt in zip(names, prompts, strict=True):
            drafter.start(name, prompt, CONTEXT, 2 * length)
    others = {"vllm ngram": peers.ngram(STEP_SAMPLES, 4096)}
    if arctic:
        others["vllm suffix"] = peers.suffix(STEP_SAMPLES, 4096)
        others["vllm suffix"].propose([(f"old {i}", list(piece.tokens)[:4000], 0) for i, piece in enumerate(pieces)])
    times: Timed = {name: [] for name in (*ours, *others)}
    for number in range(STEPS_TIMED):
        now = [text[: CONTEXT + 64 + number * step] for text in texts]
        for which, drafter in ours.items():
            found: list[list[list[int]]] = []
            times[which].append(
                1000 * seconds(lambda of=drafter, asked=now, out=found: out.append(of.draft(names, asked)))
            )
            drafted = {name: len(draft) for name, draft in zip(names, found[0], strict=True) if draft}
            drafter.verified(Verified([*drafted], [*drafted.values()], [*drafted.values()]))
        for name, proposer in others.items():
            proposer.prepare([(who, text, CONTEXT) for who, text in zip(names, now, strict=True)])
            times[name].append(1000 * seconds(proposer.ask))
    # In the first step all 64 tokens of every sample are new.
    return {
        name: {"step_ms_median": statistics.median(taken[1:]), "step_ms_worst": max(taken[1:])}
        for name, taken in times.items()
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
        "without history": lambda: Ours(HistoSpecSettings(), rollouts=0),
        "without confidence (the paper's window)": ours(**plain),
        "without window (always 32)": ours(window_start=32, **plain),
        "7 down to 3 tokens looked up": ours(prefix_max=7, prefix_min=3),
        "16 down to 3 tokens looked up": ours(prefix_min=3),
        "RhymeRL's own: 7 to 3, window, history only": ours(
            prefix_max=7, prefix_min=3, own_output=False, siblings=False, **plain
        ),
        "vllm ngram": lambda: peers.ngram(rows, length),
    }
    if arctic:
        found["vllm suffix (arctic)"] = lambda: peers.suffix(rows, length)
    return found


def acceptance(steps: list[list[Record]], arctic: bool) -> dict[str, dict[str, dict[str, float]]]:
    """By variant: the first epoch, and all later ones."""
    rows = {}
    for name, make in variants(arctic).items():
        epochs = replay(steps, [make() for _ in range(ENGINES)])
        rows[name] = {
            "epoch 1": figures(epochs[0]),
            "epochs 2 on": figures(sum(epochs[1:], Counter())),
        }
    return rows


def figures(total: Counter[str]) -> dict[str, float]:
    """Of a replay's totals."""
    return {
        "tokens_per_step": total["tokens"] / total["samples"],
        "decode_steps": total["steps"],
        "drafted": total["drafted"],
        "acceptance": total["accepted"] / max(1, total["drafted"]),
        **{f"from_{source}": total[f"from {source}"] / total["tokens"] for source in ("history", "siblings", "own")},
    }


def table(results: dict[str, Any]) -> str:
    """All results as text."""
    lines = []
    for data, found in results["structure"].items():
        for name, row in found.items():
            shown = "  ".join(f"{key} {value:9.2f}" for key, value in row.items())
            lines.append(f"{data:10s} {name:14s} {shown}")
    for name, row in results["step"].items():
        lines.append(
            f"{STEP_SAMPLES} samples {name:15s} " + "  ".join(f"{key} {value:.2f}" for key, value in row.items())
        )
    over = results["hand_over"]
    lines.append(f"hand over {over['tokens']:,.0f} tokens: {over['hand_over_ms']:.2f} ms")
    for epoch in ("epoch 1", "epochs 2 on"):
        lines.append(f"\n{epoch:44s} tok/step   steps  drafted  accepted  history  siblings  own")
        for name, rows in results["acceptance"].items():
            row = rows[epoch]
            shares = "  ".join(f"{row[f'from_{source}']:7.0%}" for source in ("history", "siblings", "own"))
            lines.append(
                f"{name:44s} {row['tokens_per_step']:8.2f} {row['decode_steps']:7,.0f} {row['drafted']:8,.0f} "
                f"{row['acceptance']:9.1%}  {shares}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arctic", type=Path, help="folder with the package arctic_inference")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--out", type=Path, default=Path("drafting.json"))
    chosen = parser.parse_args()
    arctic = chosen.arctic is not None
    if arctic:
        peers.use_arctic(chosen.arctic)
    steps = read_trace(chosen.trace)
    data = {"synthetic": synthetic(), "recorded": recorded(steps)}
    results = {
        "cpus": os.cpu_count(),
        "structure": {name: structure(pieces, arctic) for name, pieces in data.items()},
        "step": whole_step(data["synthetic"], arctic),
        "hand_over": hand_over(data["synthetic"]),
        "acceptance": acceptance(steps, arctic),
    }
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
