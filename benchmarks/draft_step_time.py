"""How long does all drafting of one decode step take, for 512 running samples of 32 prompts?

    python benchmarks/draft_step_time.py --against CHECKOUT --out draft_step_time.json

Measured. Every sample repeats one of its prompt's 16 responses of 8192 tokens from a place of its own, and gains
TOKENS_A_STEP tokens a step. Before each timed step FORWARD_BYTES of memory are read, as a forward pass does, so the
caches hold nothing of ours; then the new tokens are appended to each sample's list, as vLLM's scheduler does right
before it asks for drafts; the last step's drafts are freed before, as there. Lists in and lists out, as vLLM has them;
for vLLM's proposers without making their input batch. "each its own index": each prompt has an index of its own in
memory, as in a run; "one index": all prompts' is the same, as the one tree of the suffix proposer is; "warm": without
reading memory in between. "compiled" is the part of ours inside its one compiled call.

`--against` measures another checkout of the repository too, in processes in turn, and fails unless both draft the same
tokens in every step. The peers: drafting.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from drafting_texts import CONTEXT, RESPONSES, recorded, synthetic
from replay import TRACE, read_trace

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.speculation import draft_step
from rhyme_openrlhf.speculation.drafter import HistoryDrafter, Verified

STEP_SAMPLES = 512
TOKENS_A_STEP = 8
FIRST_TOKENS = CONTEXT + 64
STEPS_TIMED = 30
# Steps before any are counted: in the first all tokens are new, and windows grow.
WARM_UP = 4
# Weights of a small model: many times a core's own caches.
FORWARD_BYTES = 64 << 20
Row = dict[str, float]


class Ours:
    """Our drafter, asked as the scheduler asks it."""

    def __init__(self, pieces: list[Piece], names: list[str], one_index: bool) -> None:
        prompts = [f"prompt {number // RESPONSES}" for number in range(len(names))]
        buffer = build_index(pieces)
        self._drafter = HistoryDrafter(HistoSpecSettings())
        self._names = names
        for prompt in dict.fromkeys(prompts):
            self._drafter.install(prompt, buffer if one_index else buffer.copy())
        for name, prompt in zip(names, prompts, strict=True):
            self._drafter.start(name, prompt, CONTEXT, 1 << 20)

    def prepare(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def ask(self) -> Any:
        return self._drafter.draft(self._names, self._texts)

    def learn(self, drafts: Any) -> None:
        lengths = {name: len(draft) for name, draft in zip(self._names, drafts, strict=True) if draft}
        self._drafter.verified(Verified([*lengths], [*lengths.values()], [*lengths.values()]))


class Peer:
    """One of vLLM's proposers."""

    def __init__(self, proposer: Any, names: list[str]) -> None:
        self._proposer = proposer
        self._names = names

    def prepare(self, texts: list[list[int]]) -> None:
        self._proposer.prepare([(who, text, CONTEXT) for who, text in zip(self._names, texts, strict=True)])

    def ask(self) -> Any:
        return self._proposer.ask()

    def learn(self, drafts: Any) -> None:
        """Nothing."""


class CompiledSeconds:
    """How long the last compiled call took."""

    def __init__(self) -> None:
        self.last = 0.0
        self._call = draft_step.append_and_draft

    def __call__(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = self._call(*arguments)
        self.last = time.perf_counter() - began
        return result


def whole_step(pieces: list[Piece], arctic: bool = False, peers: bool = True) -> dict[str, Row]:
    """Milliseconds of a step, by drafter: median and worst of STEPS_TIMED, and of the compiled part."""
    length = FIRST_TOKENS + (WARM_UP + STEPS_TIMED) * TOKENS_A_STEP
    rng = random.Random(7)
    full = []
    for number in range(STEP_SAMPLES):
        tokens = pieces[number % len(pieces)].tokens
        at = rng.randrange(len(tokens) - length)
        full.append(np.array([*pieces[0].context, *tokens[at : at + length]]))
    names = [f"sample {number}" for number in range(STEP_SAMPLES)]
    drafters: dict[str, Any] = {
        "ours, each its own index": Ours(pieces, names, False),
        "ours, one index": Ours(pieces, names, True),
        "ours, each its own index, warm": Ours(pieces, names, False),
    }
    if peers:
        import drafting_peers

        drafters["vllm ngram"] = Peer(drafting_peers.ngram(STEP_SAMPLES, 4096), names)
        if arctic:
            suffix = drafting_peers.suffix(STEP_SAMPLES, 4096)
            suffix.propose([(f"old {i}", list(piece.tokens)[:4000], 0) for i, piece in enumerate(pieces)])
            drafters["vllm suffix (arctic)"] = Peer(suffix, names)
    weights = np.ones(FORWARD_BYTES // 8)
    compiled = CompiledSeconds()
    draft_step.append_and_draft = compiled
    found = {}
    for name, drafter in drafters.items():
        texts = [text[:FIRST_TOKENS].tolist() for text in full]
        taken, inside, digest = [], [], 0
        for number in range(WARM_UP + STEPS_TIMED):
            if not name.endswith("warm"):
                weights.sum()
            end = FIRST_TOKENS + number * TOKENS_A_STEP
            for text, whole in zip(texts, full, strict=True):
                text += whole[len(text) : end].tolist()
            drafter.prepare(texts)
            drafts = None
            began = time.perf_counter()
            drafts = drafter.ask()
            taken.append(1000 * (time.perf_counter() - began))
            inside.append(1000 * compiled.last)
            drafter.learn(drafts)
            if name.startswith("ours"):
                digest = zlib.crc32(json.dumps(drafts).encode(), digest)
        found[name] = {"ms_median": statistics.median(taken[WARM_UP:]), "ms_worst": max(taken[WARM_UP:])}
        if name.startswith("ours"):
            found[name]["compiled_ms"] = statistics.median(inside[WARM_UP:])
            found[name]["drafted"] = float(sum(map(len, drafts)))
            found[name]["digest"] = float(digest)
    draft_step.append_and_draft = compiled._call
    return found


def digests_of(by_data: dict[str, dict[str, Row]]) -> dict[str, float]:
    """Of all tokens that were drafted, by data and drafter."""
    return {f"{data}, {name}": row["digest"] for data, rows in by_data.items() for name, row in rows.items()}


def step_text(by_checkout: dict[str, dict[str, dict[str, Row]]]) -> str:
    """What was found, as text."""
    lines = []
    for checkout, by_data in by_checkout.items():
        for data, rows in by_data.items():
            for name, row in rows.items():
                shown = "  ".join(f"{key} {value:8.2f}" for key, value in row.items() if key != "digest")
                lines.append(f"{STEP_SAMPLES} samples, {checkout:7s} {data:10s} {name:31s} {shown}")
    return "\n".join(lines)


def measured(checkout: Path) -> dict[str, dict[str, Row]]:
    """Ours in a process of its own, with the package of `checkout`."""
    paths = os.pathsep.join([str(checkout), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--one"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{checkout} failed:\n{done.stderr[-4000:]}")
    found: dict[str, dict[str, Row]] = json.loads(lines[-1][len("RESULT ") :])
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--out", type=Path, default=Path("draft_step_time.json"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        data = {"synthetic": synthetic(), "recorded": recorded(read_trace(TRACE))}
        print("RESULT " + json.dumps({name: whole_step(pieces, peers=False) for name, pieces in data.items()}))
        return
    checkouts = {"now": Path(__file__).parent.parent}
    if chosen.against:
        checkouts["before"] = chosen.against.resolve()
    rounds: dict[str, list[Any]] = defaultdict(list)
    for number in range(chosen.rounds):
        for name in sorted(checkouts, reverse=bool(number % 2)):
            rounds[name].append(measured(checkouts[name]))
    digests = {json.dumps(digests_of(one)) for found in rounds.values() for one in found}
    if len(digests) > 1:
        raise SystemExit(f"not all drafted the same tokens: {digests}")
    medians = {
        name: {
            data: {
                which: {key: statistics.median(one[data][which][key] for one in found) for key in row}
                for which, row in rows.items()
            }
            for data, rows in found[0].items()
        }
        for name, found in rounds.items()
    }
    chosen.out.write_text(json.dumps({"cpus": os.cpu_count(), "medians": medians, "rounds": rounds}, indent=1) + "\n")
    print(step_text(medians))


if __name__ == "__main__":
    main()
