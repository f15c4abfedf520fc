"""Do log-probabilities with several rows a sample differ more than another batch size makes them differ? Pure.

An engine computes one row for each sample of a decode step, and one more for each draft token. Which kernels run, and
in which order they add, depends on how many rows there are. So the log-probabilities of a text are never quite those
of the same text in another step, with drafts or without. What another number of samples changes is measured, and
drafts may change a few times as much. A fault (a row that sees the wrong tokens, a draft accepted that the model would
not have said) changes some log-probabilities by tenths and whole units.

Invariants: responses are compared up to the first token in which they differ, that place included: there both tokens
were the likeliest, so their log-probabilities must be as close. A number that is none is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

# What drafts may change, in terms of what batch sizes change. Chosen, not measured: the largest of a few hundred
# differences spreads more than their mean. On a CPU a right engine is at 0 with both.
MEAN_TIMES = 3.0
LARGEST_TIMES = 4.0
# A batch size may change nothing at all, where kernels happen to add in the same order. Then the spacing of numbers
# between 8 and 16, where logits are, is what may differ: this many times the spacing at 1.
SPACINGS = 8
# The mean difference above which nothing can be told from an engine's log-probabilities. Other engines of the same
# weights, and trainers, are one to three hundredths away in 16 bits.
STEADY = 0.1
# Fewer compared tokens than this share show little: the texts part too early.
LEAST_COMPARED = 0.25


class Scored(Protocol):
    """A text and the log-probability of each of its tokens."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def log_probs(self) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class Difference:
    """The distance of log-probabilities of the same texts, over `compared` of `tokens` tokens."""

    tokens: int
    compared: int
    mean: float
    largest: float


def difference(pairs: Iterable[tuple[Scored, Scored]]) -> Difference:
    """Compare texts with the same texts, computed in another way."""
    gaps: list[float] = []
    tokens = 0
    for one, other in pairs:
        tokens += len(one.tokens)
        gaps += _gaps(one, other)
    largest = max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)
    mean = sum(gaps) / len(gaps) if gaps and math.isfinite(largest) else largest
    return Difference(tokens, len(gaps), mean, largest)


def _gaps(one: Scored, other: Scored) -> list[float]:
    """Return the differences of a text's log-probabilities up to its first other token, that place included."""
    gaps = []
    for token, other_token, a, b in zip(one.tokens, other.tokens, one.log_probs, other.log_probs, strict=False):
        gaps.append(0.0 if a == b else abs(a - b))
        if token != other_token:
            break
    return gaps


@dataclass(frozen=True)
class Bound:
    """The most that drafts may change: the mean and the largest difference of log-probabilities."""

    mean: float
    largest: float


def bound(by_batch_size: Difference, spacing: float) -> Bound:
    """Return the bound that follows from what batch sizes change; `spacing`: of numbers at 1 (torch's eps)."""
    least = SPACINGS * spacing
    return Bound(max(MEAN_TIMES * by_batch_size.mean, least), max(LARGEST_TIMES * by_batch_size.largest, 4 * least))


def unsteady(by_batch_size: Difference) -> str:
    """Return a clause where batch sizes alone change too much to judge drafts; "" else."""
    if by_batch_size.mean <= STEADY:
        return ""
    return f"another batch size alone changes log-probabilities by {by_batch_size.mean:.2g} on average"


def fault(what: str, found: Difference, allowed: Bound) -> str:
    """Return a clause that says what is wrong with log-probabilities found in the way `what`; "" for nothing."""
    if found.compared < LEAST_COMPARED * found.tokens:
        return f"{what}, only {found.compared} of {found.tokens} tokens are those that were said without drafts"
    # Written so that what is no number is a fault.
    if found.mean <= allowed.mean and found.largest <= allowed.largest:
        return ""
    return (
        f"{what}, log-probabilities differ by {found.mean:.2g} on average and {found.largest:.2g} at most, where "
        f"another batch size allows {allowed.mean:.2g} and {allowed.largest:.2g}"
    )


def never_drafted(kind: str, drafted: int, accepted: int, rights: Sequence[str]) -> str:
    """Return a clause where a history of this kind tested nothing; "" else. `rights`: kinds with right drafts."""
    if not drafted:
        return f"no draft was verified with the {kind} history"
    if kind in rights and not accepted:
        return f"none of {drafted} right drafts was accepted"
    return ""
