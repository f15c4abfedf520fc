"""Time of all drafting in one decode step, for 512 running samples of 32 prompts. Measured.

    python benchmarks/draft_step_time.py --against CHECKOUT --out draft_step_time.json

Every sample repeats one of its prompt's 16 responses of 8192 tokens from a place of its own, and gains TOKENS_A_STEP
tokens a step. Ours is all that vLLM's real scheduler with our plug-in does for real requests (engine/scheduler.py).
It notes new tokens, finds samples that decode, drafts by the fixed rules, makes the lists, and gives each request its
own. vLLM's proposers are called like its model runner calls them, without making their input batch and without the
scheduler's work on their lists.

Before each timed step:

- FORWARD_BYTES of memory are read, as a forward pass does, so the caches hold nothing of ours.
- The new tokens are appended to each sample's list, as vLLM's scheduler does right before drafting.
- The last step's drafts are freed, as in vLLM.

Once everything is made, Python's garbage collector leaves that out, as in vLLM's engine core.

"each its own index": each prompt has an index of its own in memory, as in a run. "one index": all prompts share one,
like the one tree of the suffix proposer. "warm": without reading memory in between. "no history": as in a first
epoch. "nothing shared": without what all prompts share. "compiled" is the call that drafts. Milliseconds: median,
95th and 99th percentile and worst of STEPS_TIMED steps, in which texts and tables outgrow their memory.

`--against` measures another checkout of the repository too, in processes in turn. It fails unless both draft the same
tokens in every step; with `--other_drafts` they need not. The peers: drafting.py.
"""

from __future__ import annotations

import argparse
import gc
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
from step_overhead import scheduler_of

from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.drafting.gain import GainMeter
from rhyme_openrlhf.drafting.source import Verified
from rhyme_openrlhf.engine.requests import PROMPT_KEY
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

STEP_SAMPLES = 512
TOKENS_A_STEP = 8
FIRST_TOKENS = CONTEXT + 64
STEPS_TIMED = 200
# Steps before any are counted: in the first all tokens are new, and windows grow.
WARM_UP = 4
# Weights of a small model: many times a core's own caches.
FORWARD_BYTES = 64 << 20
# None in versions that share nothing among prompts.
NOTHING_SHARED = {"shared_tokens": 0} if hasattr(HistoSpecSettings, "shared_tokens") else {}
Row = dict[str, float]


class Ours:
    """Our scheduler's drafting."""

    def __init__(
        self, pieces: list[Piece], full: list[list[int]], one_index: bool, history: bool = True, shared: bool = True
    ) -> None:
        from vllm import SamplingParams
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
        from vllm.v1.request import Request

        length = len(full[0]) + 2 * HistoSpecSettings().window_max
        self._scheduler = scheduler_of("rules", len(full), length)
        if not shared:
            self._scheduler.drafting.use(HistoryDrafter(HistoSpecSettings(**NOTHING_SHARED)))
        # No step leaves its drafts out to measure what they gain.
        self._scheduler.drafting.gain = GainMeter(0)
        buffer = build_index(pieces)
        self._requests = []
        for number, text in enumerate(full):
            prompt = f"prompt {number // RESPONSES}"
            if history and number % RESPONSES == 0:
                self._scheduler.drafting.source.install(prompt, buffer if one_index else buffer.copy())
            parameters = SamplingParams(temperature=1, max_tokens=length - CONTEXT, extra_args={PROMPT_KEY: prompt})
            parameters.update_from_generation_config({}, eos_token_id=None)
            request = Request(f"sample {number}", text[:CONTEXT], parameters, None)
            self._scheduler.add_request(request)
            self._requests.append(request)
        while any(not request.num_output_tokens for request in self._requests):
            output = self._scheduler.schedule()
            names = list(output.num_scheduled_tokens)
            # The prompts are computed, and each has its first token.
            first = [[full[int(name.split()[1])][CONTEXT]] for name in names]
            places = {name: place for place, name in enumerate(names)}
            self._scheduler.update_from_output(output, ModelRunnerOutput(names, places, first))
        names = [request.request_id for request in self._requests]
        self._ids = DraftTokenIds(names, [[] for _ in names])
        self._sampled: list[list[int]] = []
        self.compiled_seconds = 0.0
        self._time(self._scheduler.drafting.source, "propose")

    def _time(self, whose: Any, name: str) -> None:
        """Have each call of that function timed."""
        call = getattr(whose, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments, **named)
            self.compiled_seconds = time.perf_counter() - began
            return result

        setattr(whose, name, timed)

    def prepare(self, texts: list[list[int]]) -> None:
        self._sampled = []
        for request, text in zip(self._requests, texts, strict=True):
            request.spec_token_ids = []
            new = text[request.num_tokens :]
            request.append_output_token_ids(new)
            self._sampled.append(new)

    def ask(self) -> Any:
        self._scheduler.drafting.sampled(self._ids.req_ids, self._sampled)
        self._scheduler.update_draft_token_ids(self._ids)

    def drafts(self) -> list[list[int]]:
        return [request.spec_token_ids for request in self._requests]

    def learn(self) -> None:
        lengths = {request.request_id: len(request.spec_token_ids) for request in self._requests}
        drafted = {name: length for name, length in lengths.items() if length}
        self._scheduler.drafting.source.verified(Verified.of([*drafted], [*drafted.values()], [*drafted.values()]))
        # In a version that has it: what a scheduler does while the forward pass runs.
        getattr(self._scheduler.drafting, "computing", lambda: None)()


class Peer:
    """One of vLLM's proposers."""

    def __init__(self, proposer: Any, names: list[str]) -> None:
        self._proposer = proposer
        self._names = names

    def prepare(self, texts: list[list[int]]) -> None:
        self._proposer.prepare([(who, text, CONTEXT) for who, text in zip(self._names, texts, strict=True)])

    def ask(self) -> Any:
        return self._proposer.ask()

    def learn(self) -> None:
        """Do nothing."""


def whole_step(pieces: list[Piece], arctic: bool = False, peers: bool = True) -> dict[str, Row]:
    """Milliseconds of a step, by drafter."""
    length = FIRST_TOKENS + (WARM_UP + STEPS_TIMED) * TOKENS_A_STEP
    rng = random.Random(7)
    full = []
    for number in range(STEP_SAMPLES):
        tokens = pieces[number % len(pieces)].tokens
        at = rng.randrange(len(tokens) - length)
        full.append([int(token) for token in (*pieces[0].context, *tokens[at : at + length])])
    names = [f"sample {number}" for number in range(STEP_SAMPLES)]
    drafters: dict[str, Any] = {
        "ours, each its own index": Ours(pieces, full, False),
        "ours, one index": Ours(pieces, full, True),
        "ours, each its own index, warm": Ours(pieces, full, False),
        "ours, nothing shared": Ours(pieces, full, False, shared=False),
        "ours, no history": Ours(pieces, full, False, history=False),
        "ours, no history nor shared": Ours(pieces, full, False, history=False, shared=False),
    }
    if peers:
        import drafting_peers

        drafters["vllm ngram"] = Peer(drafting_peers.ngram(STEP_SAMPLES, 4096), names)
        if arctic:
            suffix = drafting_peers.suffix(STEP_SAMPLES, 4096)
            suffix.propose([(f"old {i}", list(piece.tokens)[:4000], 0) for i, piece in enumerate(pieces)])
            drafters["vllm suffix (arctic)"] = Peer(suffix, names)
    weights = np.ones(FORWARD_BYTES // 8)
    found = {}
    gc.collect()
    gc.freeze()
    for name, drafter in drafters.items():
        texts = [text[:FIRST_TOKENS] for text in full]
        taken, inside, digest, drafted = [], [], 0, 0
        for number in range(WARM_UP + STEPS_TIMED):
            if not name.endswith("warm"):
                weights.sum()
            end = FIRST_TOKENS + number * TOKENS_A_STEP
            for text, whole in zip(texts, full, strict=True):
                # Ints of their own, as sampled ones are.
                text += np.array(whole[len(text) : end]).tolist()
            drafter.prepare(texts)
            began = time.perf_counter()
            drafts = drafter.ask()
            taken.append(1000 * (time.perf_counter() - began))
            if name.startswith("ours"):
                inside.append(1000 * drafter.compiled_seconds)
                drafts = drafter.drafts()
                digest, drafted = zlib.crc32(json.dumps(drafts).encode(), digest), sum(map(len, drafts))
            drafter.learn()
            drafts = None
        counted = np.array(taken[WARM_UP:])
        found[name] = {f"ms_p{share}": float(np.percentile(counted, share)) for share in (50, 95, 99)}
        found[name]["ms_worst"] = float(counted.max())
        if name.startswith("ours"):
            found[name]["compiled_ms"] = statistics.median(inside[WARM_UP:])
            found[name]["drafted"] = float(drafted)
            found[name]["digest"] = float(digest)
    gc.unfreeze()
    return found


def digests_of(by_data: dict[str, dict[str, Row]]) -> dict[str, float]:
    """Return the digests of all drafted tokens, by data and drafter."""
    return {f"{data}, {name}": row["digest"] for data, rows in by_data.items() for name, row in rows.items()}


def step_text(by_checkout: dict[str, dict[str, dict[str, Row]]]) -> str:
    """Return the findings as text."""
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
    parser.add_argument("--other_drafts", action="store_true", help="the checkouts need not draft the same tokens")
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
    if len(digests) > 1 and not chosen.other_drafts:
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
