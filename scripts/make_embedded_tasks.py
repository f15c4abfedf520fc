"""Write the embedded prompt sets, byte for byte the same from the same seed.

    python scripts/make_embedded_tasks.py [--out DIRECTORY]

No prompt appears twice in all files together, so every evaluation set is disjoint from every training set.
"""

import argparse
import random
from pathlib import Path

from embedded_tasks import KINDS, Problem, jsonl, problem_set

from rhyme_openrlhf.embedded import DATA

SEED = 20250825

# The mixed sets serve the demonstration run: 48 prompts are four optimizer steps of 96 samples an epoch at eight
# samples a prompt. The sets of one kind leave room for longer runs.
MIXED_TRAIN_SIZE, MIXED_EVAL_SIZE = 48, 24
KIND_TRAIN_SIZE, KIND_EVAL_SIZE = 96, 32


def problem_sets(seed: int = SEED) -> dict[str, list[Problem]]:
    """File name to problems, for every shipped file."""
    rng = random.Random(seed)
    taken: set[str] = set()
    sets = {
        "mixed_train.jsonl": problem_set(KINDS, MIXED_TRAIN_SIZE, rng, taken),
        "mixed_eval.jsonl": problem_set(KINDS, MIXED_EVAL_SIZE, rng, taken),
    }
    for kind in KINDS:
        sets[f"{kind}_train.jsonl"] = problem_set((kind,), KIND_TRAIN_SIZE, rng, taken)
        sets[f"{kind}_eval.jsonl"] = problem_set((kind,), KIND_EVAL_SIZE, rng, taken)
    return sets


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, problems in problem_sets().items():
        (out / name).write_text(jsonl(problems), encoding="utf-8")
        lengths = sorted(len(problem.solution) + 1 for problem in problems)
        median, tail = lengths[len(lengths) // 2], lengths[int(0.95 * len(lengths))]
        print(f"{name:18} {len(problems):4} prompts, response tokens: median {median}, p95 {tail}, max {lengths[-1]}")
