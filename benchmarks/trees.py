"""Trees against chains: tokens a decode step of the best draft tree of n nodes and of the best draft chain of n tokens.

    python benchmarks/trees.py --out trees.json        # history 4, draft model 12 minutes of one core
    python benchmarks/trees.py --quick                 # a part of each text: does it work?

Replayed, not measured: a sample's text does not depend on drafts, so every place of a recorded response says how many
tokens a draft would have yielded there. Both drafts verify the same number of tokens, so their verification costs the
same. The texts are the recorded runs of `benchmarks/data` and the made tasks of `made_tasks.py`.

History: the prompt's last two rollouts and the sample's own text. A node's weight is the share of earlier occurrences
of the matched tokens that continue that way. The tree has the n nodes of largest weight, as RLHFSpec selects them
(section 5.3); the chain follows the likeliest branch. Each of the two takes the better of two matches, for each text
and each n: the longest match, or the longest match with at least four occurrences.

By load: each of the two takes the n that yields most tokens a second. Step times are from a data sheet (Llama-3.1-8B on
an H100); the draft model's passes and lookups are not counted.

Draft model: the embedded one, on places drawn from the recorded runs. A node's weight is the product of the model's
probabilities along its path (the paper's draft logit). Both drafts are of the same model.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from made_tasks import TASKS, made
from papers import ROOT
from papers_inputs import EFFICIENCY, H100, LLAMA_8B
from replay import TRACES, name_of, read_trace
from roofline import roofline
from table_in_page import put

from rhyme_openrlhf import embedded
from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.history import HistorySettings

PAGE = ROOT / "docs" / "trees.md"
SIZES = (4, 8, 16, 32, 64)
SETTINGS = HistoSpecSettings()
# Occurrences that a match must have: the two rules of which each draft takes the better.
LEAST_OCCURRENCES = (1, 4)
# The latest occurrences, of which the weights are made.
MOST_OCCURRENCES = 32
# Drawn places of each recorded run for the draft model.
PLACES = 150
QUICK_STEPS = 3
SEED = 1
# Running samples of an engine, and the context of each, for the table by load.
LOADS = (1, 8, 32, 128, 512)
CONTEXT = 2048
Place = tuple[int, int]


@dataclass(frozen=True)
class Accepted:
    """Accepted tokens of a place's drafts, by size."""

    tree: tuple[int, ...]
    chain: tuple[int, ...]


class Texts:
    """Texts to draft from, with the places at which each run of `prefix_min` to `prefix_max` tokens ends."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [list(text) for text in texts]
        self._ends: dict[tuple[int, ...], list[Place]] = defaultdict(list)
        for number, text in enumerate(self.texts):
            for end in range(1, len(text)):
                self.end_at(number, end)

    def end_at(self, number: int, end: int) -> None:
        """Add the runs of tokens that end before `end`."""
        text = self.texts[number]
        for length in range(SETTINGS.prefix_min, min(SETTINGS.prefix_max, end) + 1):
            self._ends[tuple(text[end - length : end])].append((number, end))

    def occurrences(self, tail: Sequence[int], least: int) -> list[Place]:
        """Return the latest places after the longest run that ends `tail`, of those with `least` occurrences."""
        for length in range(min(SETTINGS.prefix_max, len(tail)), SETTINGS.prefix_min - 1, -1):
            found = self._ends.get(tuple(tail[-length:]), ())
            if len(found) >= least:
                return list(found[-MOST_OCCURRENCES:])
        return []

    def branches(self, places: Sequence[Place], depth: int) -> dict[int, list[Place]]:
        """Return the places by the token that follows `depth` tokens after them."""
        found: dict[int, list[Place]] = {}
        for number, end in places:
            text = self.texts[number]
            if end + depth < len(text):
                found.setdefault(text[end + depth], []).append((number, end))
        return found


def tree_of(texts: Texts, places: Sequence[Place], answer: Sequence[int]) -> tuple[int, ...]:
    """Return the accepted tokens of the best tree of each size; `answer`: the tokens that follow."""
    order = count()
    heap = [(-len(places), next(order), 0, True, list(places))]
    accepted, nodes, found = 0, -1, []
    while heap and len(found) < len(SIZES):
        _, _, depth, right, own = heapq.heappop(heap)
        nodes += 1
        if right and depth:
            accepted = depth
        while len(found) < len(SIZES) and nodes == SIZES[len(found)]:
            found.append(accepted)
        for token, part in texts.branches(own, depth).items():
            follows = right and depth < len(answer) and answer[depth] == token
            heapq.heappush(heap, (-len(part), next(order), depth + 1, follows, part))
    return tuple(found) + (accepted,) * (len(SIZES) - len(found))


def chain_of(texts: Texts, places: Sequence[Place], answer: Sequence[int]) -> tuple[int, ...]:
    """Return the accepted tokens of the chain of each size; of equal branches the latest is taken."""
    accepted, own = 0, list(places)
    while accepted < SIZES[-1]:
        branches = texts.branches(own, accepted)
        if not branches:
            break
        token = max(branches, key=lambda one: (len(branches[one]), branches[one][-1]))
        if accepted >= len(answer) or answer[accepted] != token:
            break
        own = branches[token]
        accepted += 1
    return tuple(min(accepted, size) for size in SIZES)


def response_places(
    history: Sequence[Sequence[int]], context: Sequence[int], response: Sequence[int]
) -> Iterator[dict[int, Accepted]]:
    """Yield what is accepted at each place of a response behind its first token, by the rule of matches."""
    texts = Texts([*history, context])
    own = len(texts.texts) - 1
    tail = texts.texts[own]
    for done in range(1, len(response)):
        # The sample's own text grows, so that nothing behind the place is known.
        texts.end_at(own, len(tail))
        tail.append(response[done - 1])
        answer = response[done:-1]
        found = {}
        for least in LEAST_OCCURRENCES:
            places = texts.occurrences(tail, least)
            found[least] = Accepted(tree_of(texts, places, answer), chain_of(texts, places, answer))
        yield found


def walk(accepted: Sequence[int]) -> int:
    """Return the decode steps of a response whose places accept these numbers of tokens."""
    place = steps = 0
    while place < len(accepted):
        place += accepted[place] + 1
        steps += 1
    return steps


def by_history(steps: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Return tokens a decode step of trees and chains, over all steps with a history; of each prompt's first sample."""
    kept: dict[str, list[list[int]]] = {}
    tokens = 0
    taken: dict[tuple[str, int, int], int] = defaultdict(int)
    for records in steps:
        for record in records:
            history = kept.get(record.prompt_key, [])
            for piece in record.pieces[:1] if history else ():
                context, response = [int(t) for t in piece.context], [int(t) for t in piece.tokens]
                places = list(response_places(history, context, response))
                tokens += len(places)
                for least in LEAST_OCCURRENCES:
                    for at, size in enumerate(SIZES):
                        taken["tree", least, size] += walk([place[least].tree[at] for place in places])
                        taken["chain", least, size] += walk([place[least].chain[at] for place in places])
        for record in records:
            new = [[*(int(t) for t in p.context), *(int(t) for t in p.tokens)] for p in record.pieces]
            before = kept.get(record.prompt_key, [])
            kept[record.prompt_key] = [*before, *new][-HistorySettings().rollouts * len(new) :]
    found: dict[str, Any] = {"tokens": tokens}
    for kind in ("tree", "chain"):
        found[kind] = {size: tokens / min(taken[kind, least, size] for least in LEAST_OCCURRENCES) for size in SIZES}
    return found


def by_model(steps: Sequence[Sequence[Record]], places: int) -> dict[str, Any]:
    """Return 1 + the mean of accepted tokens at drawn places, of trees and chains of the embedded draft model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded.DRAFT_MODEL, dtype=torch.float32).eval()
    rng = random.Random(SEED)
    pieces = [piece for records in steps for record in records for piece in record.pieces if len(piece.tokens) > 2]
    drawn = []
    for piece in rng.choices(pieces, k=places):
        done = rng.randrange(1, len(piece.tokens) - 1)
        text = [*(int(t) for t in piece.context), *(int(t) for t in piece.tokens[:done])]
        drawn.append((text, [int(t) for t in piece.tokens[done:-1]]))

    @torch.inference_mode()
    def likeliest(texts: list[list[int]]) -> tuple[list[list[float]], list[list[int]]]:
        """Return the logarithms of the likeliest next tokens' probabilities, and these tokens."""
        longest = max(map(len, texts))
        # Padded on the right: a causal model's row at the last token does not see it.
        rows = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        logits = model(input_ids=rows).logits[torch.arange(len(texts)), torch.tensor([len(t) - 1 for t in texts])]
        best = logits.log_softmax(-1).topk(min(SIZES[-1], logits.shape[-1]), dim=-1)
        return best.values.tolist(), best.indices.tolist()

    order = count()
    heaps: list[list[tuple[float, int, list[int], bool]]] = [[(0.0, next(order), [], True)] for _ in drawn]
    trees = [0] * places
    chains, chain_ends = [0] * places, [False] * places
    found: dict[str, dict[int, float]] = {"tree": {}, "chain": {}}
    for nodes in range(SIZES[-1] + 1):
        popped = [heapq.heappop(heap) for heap in heaps]
        for at, (_, _, path, right) in enumerate(popped):
            if right:
                trees[at] = len(path)
        if nodes in SIZES:
            found["tree"][nodes] = 1 + statistics.fmean(trees)
            found["chain"][nodes] = 1 + statistics.fmean(min(one, nodes) for one in chains)
        if nodes == SIZES[-1]:
            break
        values, tokens = likeliest([[*text, *path] for (text, _), (_, _, path, _) in zip(drawn, popped, strict=True)])
        for at, ((_, answer), (weight, _, path, right)) in enumerate(zip(drawn, popped, strict=True)):
            for value, token in zip(values[at], tokens[at], strict=True):
                follows = right and len(path) < len(answer) and answer[len(path)] == token
                heapq.heappush(heaps[at], (weight - value, next(order), [*path, token], follows))
        running = [at for at in range(places) if not chain_ends[at]]
        if running:
            _, tokens = likeliest([[*drawn[at][0], *drawn[at][1][: chains[at]]] for at in running])
            for at, best in zip(running, tokens, strict=True):
                answer = drawn[at][1]
                if chains[at] < len(answer) and answer[chains[at]] == best[0]:
                    chains[at] += 1
                else:
                    chain_ends[at] = True
    return {"places": places, **found}


def by_load(found: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table of what trees gain where each takes its best n: tokens a second by running samples."""
    step = StepModel(roofline(LLAMA_8B, H100, 1, EFFICIENCY))

    def speed(tokens: dict[int, float], running: int) -> float:
        """Tokens a second of a sample at the best size; a draft of n tokens is n + 1 rows."""
        rates = {0: 1.0, **tokens}
        return max(rates[size] / step.seconds(running, running * CONTEXT, running * size) for size in rates)

    head = "| drafts from | " + " | ".join(f"{running} samples" for running in LOADS) + " |"
    lines = [head, "|" + "---|" * (1 + len(LOADS))]
    for source, texts in found.items():
        cells = []
        for running in LOADS:
            gains = [speed(one["tree"], running) / speed(one["chain"], running) - 1 for one in texts.values()]
            cells.append(f"{statistics.fmean(gains):+.1%} ({min(gains):+.1%} to {max(gains):+.1%})")
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table of both, with the gain of trees."""
    head = "| drafts from | text | " + " | ".join(f"n = {size}" for size in SIZES) + " |"
    lines = [head, "|" + "---|" * (2 + len(SIZES))]
    for source, texts in found.items():
        for name, one in texts.items():
            cells = []
            for size in SIZES:
                tree, chain = one["tree"][size], one["chain"][size]
                cells.append(f"{tree:.2f} / {chain:.2f} ({tree / chain - 1:+.0%})")
            lines.append(f"| {source} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Replay and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps and places")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/trees.md")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    places = 20 if chosen.quick else PLACES
    runs = {name_of(path): read_trace(path) for path in TRACES}
    texts = {**runs, **{f"made: {task}": made(task) for task in TASKS}}
    found: dict[str, dict[str, Any]] = {"history": {}, "draft model": {}}
    for name, steps in texts.items():
        found["history"][name] = by_history(steps[: QUICK_STEPS if chosen.quick else None])
        print(name, found["history"][name], flush=True)
    for name, steps in runs.items():
        found["draft model"][name] = by_model(steps, places)
    print("tokens a decode step, tree / chain of n tokens (replayed):\n" + table(found))
    print("gain of trees by running samples, each with its best n:\n" + by_load(found))
    if chosen.write:
        put(PAGE, "trees", table(found))
        put(PAGE, "trees-load", by_load(found))
    if chosen.out:
        chosen.out.write_text(json.dumps({"kind": "replayed", "sizes": SIZES, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
