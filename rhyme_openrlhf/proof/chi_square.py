"""Chi-square test: do counts follow given probabilities? Pure: numbers in, numbers out.

Invariant: no observation is dropped. Values too rare for the approximation are one class. Where that class is still too
rare, it is tested by itself, so an impossible value that occurs is found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The usual rule for when counts are normal enough for the chi-square approximation (Cochran 1954).
LEAST_EXPECTED = 5.0
# Below this, counts are held to be none of the probabilities': by accident once in 10,000 tests, while a wrong sampler
# is off by many powers of ten.
P_VALUE_FLOOR = 1e-4
# Terms or fractions after which the incomplete gamma function has converged for every degree of freedom here.
MOST_TERMS = 10_000
PRECISION = 1e-14


@dataclass(frozen=True)
class ChiSquare:
    """A test's outcome. `p_value`: the chance of counts at least this far off if the probabilities are right.

    None when all observations fall into one class, which can be compared with nothing.
    """

    statistic: float
    degrees: int
    p_value: float | None
    observations: int


def chi_square(observed: Sequence[int], probabilities: Sequence[float]) -> ChiSquare:
    """Pearson's test of counts [n] against probabilities [n] (they are normalised first).

    With probabilities that are no numbers, statistic and chance are NaN.
    """
    counts = np.asarray(observed, dtype=float)
    total = counts.sum()
    expected = np.asarray(probabilities, dtype=float)
    if not (np.isfinite(expected).all() and expected.sum() > 0):
        return ChiSquare(math.nan, 0, math.nan, int(total))
    expected = expected / expected.sum() * total
    common = expected >= LEAST_EXPECTED
    seen, wanted = counts[common], expected[common]
    seen_rare, wanted_rare = int(counts[~common].sum()), float(expected[~common].sum())
    alone = wanted_rare < LEAST_EXPECTED
    if not alone:
        seen, wanted = np.append(seen, seen_rare), np.append(wanted, wanted_rare)
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    p_values = [tail(statistic, degrees)] if degrees > 0 else []
    if alone and seen_rare:
        p_values.append(_at_least(seen_rare, wanted_rare))
    # Of two tests the one that looks worse counts, at twice its chance (Bonferroni).
    p_value = min(1.0, min(p_values) * len(p_values)) if p_values else None
    return ChiSquare(statistic, max(degrees, 0), p_value, int(total))


def _at_least(count: int, expected: float) -> float:
    """Return the chance that a Poisson variable with mean `expected` is at least `count` (1 or more)."""
    return 1.0 - tail(2 * expected, 2 * count)


def tail(statistic: float, degrees: int) -> float:
    """Return the chance that a chi-square variable with `degrees` degrees of freedom exceeds `statistic`.

    This is the regularised upper incomplete gamma function Q(degrees / 2, statistic / 2). Its series is used where it
    converges fast, and Lentz's continued fraction elsewhere (Numerical Recipes, section 6.2).
    """
    a, x = degrees / 2, statistic / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, MOST_TERMS):
            term *= x / (a + n)
            total += term
            if term < total * PRECISION:
                break
        return max(0.0, 1.0 - total * scale)
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for n in range(1, MOST_TERMS):
        factor = -n * (n - a)
        b += 2
        d = 1 / (factor * d + b or tiny)
        c = b + factor / c or tiny
        fraction *= d * c
        if abs(d * c - 1) < PRECISION:
            break
    return min(1.0, scale * fraction)


def alike(one: Sequence[int], other: Sequence[int]) -> ChiSquare:
    """Test two samples' counts [n] of the same values for one common distribution (Pearson's test of homogeneity).

    Values too rare in both together are one class.
    """
    counts = np.asarray([one, other], dtype=float)
    totals = counts.sum(axis=1)
    if not totals.all():
        return ChiSquare(0.0, 0, None, int(totals.sum()))
    shares = totals / totals.sum()
    common = counts.sum(axis=0) * shares.min() >= LEAST_EXPECTED
    seen = np.column_stack([counts[:, common], counts[:, ~common].sum(axis=1)])
    seen = seen[:, seen.sum(axis=0) > 0]
    wanted = shares[:, None] * seen.sum(axis=0)
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    degrees = seen.shape[1] - 1
    return ChiSquare(statistic, degrees, tail(statistic, degrees) if degrees else None, int(totals.sum()))
