"""What speculation gives in the mean, from the live system's own window and budget.

The window of a sample is a Markov chain: `SpeculationWindow` itself says where it goes after a draft that was accepted
whole and after one that was not. With each draft token accepted with the same probability, given those before it, the
chain's stationary distribution gives tokens and draft tokens per step. Under a budget the window is not asked, as in
the live system: every draft is proposed as far as there is room, and `drafting/budget.py` chooses from the same
probabilities and the step times how much of it is verified.

Invariants: never less than one token a step; nothing is drafted where no history matches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting import budget
from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.latency.step_model import context_bucket
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation.engine import Pace
from rhyme_openrlhf.simulation.step_times import StepTimes

# Draft tokens in all for which step times are looked up: beyond, no budget of a measured engine ever went.
MOST_DRAFTS = 4096


@dataclass(frozen=True)
class Acceptance:
    """`coverage`: share of decode steps in which the history has a draft; `probability`: that a draft token is accepted
    if those before it were. Both 0 to 1."""

    coverage: float
    probability: float

    def __post_init__(self) -> None:
        if not (0 <= self.coverage <= 1 and 0 <= self.probability <= 1):
            raise ValueError(f"coverage and probability lie between 0 and 1, got {self.coverage}, {self.probability}")


@dataclass(frozen=True)
class Rates:
    """Per sample and decode step: tokens, draft tokens, and the window's mean size in steps that draft."""

    tokens_per_step: float
    drafts_per_step: float
    window: float


NO_SPECULATION = Rates(1.0, 0.0, 0.0)


def window_rates(settings: HistoSpecSettings, acceptance: Acceptance) -> Rates:
    """What full windows give."""
    sizes = [settings.window_start]
    while (larger := _after(settings, sizes[-1], accepted=True)) != sizes[-1]:
        sizes.append(larger)
    p = acceptance.probability
    # From each size: up with p ** size, else down to the start. Shares of steps at each size.
    shares = [1.0]
    for size in sizes[:-1]:
        shares.append(shares[-1] * p**size)
    if len(sizes) > 1:
        # The last size keeps itself with p ** size.
        stay = p ** sizes[-1]
        if stay == 1.0:
            shares = [0.0] * (len(sizes) - 1) + [1.0]
        else:
            shares[-1] /= 1 - stay
    whole = sum(shares)
    accepted = sum(share * _accepted(p, size) for share, size in zip(shares, sizes, strict=True)) / whole
    window = sum(share * size for share, size in zip(shares, sizes, strict=True)) / whole
    return Rates(1 + acceptance.coverage * accepted, acceptance.coverage * window, window)


def proposal_rates(settings: HistoSpecSettings, acceptance: Acceptance) -> Rates:
    """What drafts as long as there is room would give: what a budget chooses from."""
    room = settings.window_max
    accepted = _accepted(acceptance.probability, room)
    return Rates(1 + acceptance.coverage * accepted, acceptance.coverage * room, float(room))


def _after(settings: HistoSpecSettings, size: int, accepted: bool) -> int:
    window = SpeculationWindow(settings, size)
    window.record(size, size if accepted else 0)
    return window.size


def _accepted(probability: float, size: int) -> float:
    """Draft tokens accepted of `size`, in the mean."""
    return float(size) if probability == 1.0 else probability * (1 - probability**size) / (1 - probability)


def full_windows(running: int, context: float, drafts: float) -> Pace:
    """The pace without a budget: every sample drafts its window."""
    return Pace(round(drafts), 1.0)


def budgeted(times: StepTimes, rates: Rates, acceptance: Acceptance) -> Callable[[int, float, float], Pace]:
    """The pace under `drafting/budget.py`: as many draft tokens as yield most tokens a second.

    `rates`: of `proposal_rates`.
    """
    known: dict[tuple[int, int], Pace] = {}
    size = max(1, round(rates.window))

    @functools.cache
    def drafted(drafting: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        likely = np.full(drafting * size, acceptance.probability, dtype=np.float32)
        return likely, np.full(drafting, size, dtype=np.int64)

    def pace(running: int, context: float, drafts: float) -> Pace:
        if not drafts:
            return Pace(0, 1.0)
        key = (running, context_bucket(int(context)))
        found = known.get(key)
        if found is None:
            drafting = round(running * acceptance.coverage)
            most = min(drafting * size, MOST_DRAFTS)
            seconds = times.model.table(running, key[1], most)
            chosen = budget.choose(*drafted(drafting), seconds, running)
            part = (1 + chosen.expected_accepted / running) / rates.tokens_per_step
            found = known[key] = Pace(chosen.drafts, min(part, 1.0))
        return found

    return pace
