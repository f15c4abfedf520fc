"""Worked problems whose answers differ widely in length because the problems do.

Three kinds, one token a character, each solved step by step and closed by ";" and the final answer:

- chain, a running sum over lettered terms: `a3b7c4=` -> `b3+7=10,c10+4=14;14`
- path, the total cost of following links from a start: `b4c,a3b:a=` -> `a3b=3,b4c=7;7`
- sort, a selection sort of distinct letters: `qdab=` -> `a:qdb,b:qd,d:q,q:;abdq`

Each term carries its own letter, so a small model finds the next term by its letter instead of by counting. The step
itself stays hard.

Invariants:

- The same random state gives the same problem. Prompts hold no ";".
- `Problem.answer` is always right. `Problem.solution` may hold wrong steps; then all later steps follow from the wrong
  value.
"""

import json
import math
import random
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

# One letter names one term: 52 of them bound the longest problem at about 500 tokens.
LETTERS = string.ascii_lowercase + string.ascii_uppercase

# How far off a wrong sum is. Small offsets look like slips, and leave the following steps well-formed.
SLIPS = (-2, -1, 1, 2)

# A worked solution written with errors is fully right with about this probability, for any number of steps. An
# imperfect model loses some more: sampling at temperature 1 is right in about four cases of ten. A group of eight then
# has enough right samples to compare with, and enough wrong ones to learn from.
SOLUTION_SUCCESS = 0.45


@dataclass(frozen=True)
class Problem:
    """A prompt, a worked solution of it, and the right final answer.

    kind: one of `KINDS`; prompt: ends in "="; solution: steps, ";" and the answer reached (wrong if a step was);
    answer: the right final answer, the label that the reward compares with.
    """

    kind: str
    prompt: str
    solution: str
    answer: str

    def row(self) -> dict[str, str]:
        """Return the row of a prompt data set: input, label and datasource (the kind)."""
        return {"input": self.prompt, "label": self.answer, "datasource": self.kind}


@dataclass(frozen=True)
class StepCounts:
    """A lognormal distribution of the number of steps of one kind, cut to [minimum, maximum]."""

    median: float
    sigma: float
    minimum: int
    maximum: int

    def at(self, quantile: float) -> int:
        """Return the number of steps at `quantile` of the distribution, 0 < quantile < 1."""
        steps = self.median * math.exp(self.sigma * NormalDist().inv_cdf(quantile))
        return min(self.maximum, max(self.minimum, round(steps)))


# Chosen so that each kind has a median worked solution of 60-80 tokens and a 95th percentile of more than three times
# that. Sorting takes quadratically many tokens in its letters, so it needs about half the spread. Fewer than 2 steps
# (3 letters) leave too few distinct prompts.
STEP_COUNTS = {
    "chain": StepCounts(median=8.5, sigma=0.8, minimum=2, maximum=45),
    "path": StepCounts(median=9.5, sigma=0.8, minimum=2, maximum=len(LETTERS) - 1),
    "sort": StepCounts(median=9.0, sigma=0.46, minimum=3, maximum=26),
}
KINDS = tuple(STEP_COUNTS)


def error_rate(steps: int) -> float:
    """Return the probability of writing one step wrong with which all of `steps` are right in SOLUTION_SUCCESS of
    cases.
    """
    return 1.0 - SOLUTION_SUCCESS ** (1.0 / steps)


def make_problem(kind: str, steps: int, rng: random.Random, errors: float = 0.0) -> Problem:
    """Return a random problem of `kind` with `steps` steps, each wrong in its solution with probability `errors`.

    The prompt is drawn before any error, so the error rate does not change the prompt.

    Raises KeyError for an unknown kind and ValueError for a number of steps outside the kind's bounds.
    """
    counts = STEP_COUNTS[kind]
    if not counts.minimum <= steps <= counts.maximum:
        raise ValueError(f"{kind} takes {counts.minimum} to {counts.maximum} steps, not {steps}")
    return _MAKERS[kind](steps, rng, errors)


def draw_problem(kind: str, rng: random.Random, with_errors: bool = False) -> Problem:
    """Return a problem whose number of steps is drawn from the kind's long-tailed distribution."""
    steps = STEP_COUNTS[kind].at(rng.uniform(0.001, 0.999))
    return make_problem(kind, steps, rng, error_rate(steps) if with_errors else 0.0)


def problem_set(kinds: tuple[str, ...], size: int, rng: random.Random, taken: set[str]) -> list[Problem]:
    """`size` problems with distinct prompts, none of them in `taken`, to which their prompts are added.

    The numbers of steps stand at evenly spaced quantiles, so that a small set has the distribution's spread and tail
    without luck; the kinds take turns along the quantiles. The order is shuffled.
    """
    problems = []
    for index in range(size):
        kind = kinds[index % len(kinds)]
        steps = STEP_COUNTS[kind].at((index + 0.5) / size)
        problem = make_problem(kind, steps, rng)
        while problem.prompt in taken:
            problem = make_problem(kind, steps, rng)
        taken.add(problem.prompt)
        problems.append(problem)
    rng.shuffle(problems)
    return problems


def jsonl(problems: Iterable[Problem]) -> str:
    """Return the text of a JSON lines file with one row a problem."""
    return "".join(json.dumps(problem.row()) + "\n" for problem in problems)


def _slip(value: int, rng: random.Random, errors: float) -> int:
    """`value`, or with probability `errors` a positive number near it."""
    if rng.random() >= errors:
        return value
    return value + rng.choice([slip for slip in SLIPS if value + slip > 0])


def _chain(steps: int, rng: random.Random, errors: float) -> Problem:
    terms = [rng.randint(1, 9) for _ in range(steps + 1)]
    total, written = terms[0], []
    for letter, term in zip(LETTERS[1:], terms[1:], strict=False):
        result = _slip(total + term, rng, errors)
        written.append(f"{letter}{total}+{term}={result}")
        total = result
    prompt = "".join(f"{letter}{term}" for letter, term in zip(LETTERS, terms, strict=False)) + "="
    return Problem("chain", prompt, f"{','.join(written)};{total}", str(sum(terms)))


def _path(steps: int, rng: random.Random, errors: float) -> Problem:
    nodes = rng.sample(LETTERS, steps + 1)
    costs = [rng.randint(1, 9) for _ in range(steps)]
    links = [f"{start}{cost}{end}" for start, cost, end in zip(nodes, costs, nodes[1:], strict=False)]
    shuffled = rng.sample(links, steps)
    total, written = 0, []
    for link, cost in zip(links, costs, strict=True):
        total = _slip(total + cost, rng, errors)
        written.append(f"{link}={total}")
    return Problem("path", f"{','.join(shuffled)}:{nodes[0]}=", f"{','.join(written)};{total}", str(sum(costs)))


def _sort(steps: int, rng: random.Random, errors: float) -> Problem:
    letters = rng.sample(string.ascii_lowercase, steps)
    rest, picked, written = list(letters), [], []
    while rest:
        pick = min(rest)
        if len(rest) > 1 and rng.random() < errors:
            pick = rng.choice(sorted(set(rest) - {pick}))
        rest.remove(pick)
        picked.append(pick)
        written.append(f"{pick}:{''.join(rest)}")
    answer = "".join(sorted(letters))
    return Problem("sort", "".join(letters) + "=", f"{','.join(written)};{''.join(picked)}", answer)


_MAKERS: dict[str, Callable[[int, random.Random, float], Problem]] = {"chain": _chain, "path": _path, "sort": _sort}
