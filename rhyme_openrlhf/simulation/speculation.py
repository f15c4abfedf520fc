"""Gain of speculation, from the live system's own window and budget: in the mean, and at each moment of a run.

The window of a sample is a Markov chain: `SpeculationWindow` itself says where it goes after a draft that was accepted
whole and after one that was not. With each draft token accepted with the same probability, given those before it, the
chain's stationary distribution gives tokens and draft tokens per step. Under a budget there is no window, as in the
live system. Every draft is proposed as far as there is room. `drafting/budget.py` chooses from the same probabilities
and the step times the part of it that is verified.

Invariants:
- A step gives one token or more; nothing is drafted where no history matches.
- The gain changes with the step that is planned.
- The gain of one acceptance is computed once in a run. So steps of the same epoch, and epochs behind the last
  acceptance, share the chosen budgets.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting import budget
from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.latency.step_model import context_bucket
from rhyme_openrlhf.scheduling.step_plan import Speculation
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation.engine import Pace, PaceOf
from rhyme_openrlhf.simulation.engine_kinds import EngineKind, StepTimes
from rhyme_openrlhf.simulation.settings import Acceptance, Features
from rhyme_openrlhf.simulation.workload import StepLoad

# Draft tokens in all for which step times are looked up: beyond, no budget of a measured engine ever went.
MOST_DRAFTS = 4096


@dataclass(frozen=True)
class Rates:
    """Per sample and decode step: tokens, draft tokens, and the window's mean size in steps that draft."""

    tokens_per_step: float
    drafts_per_step: float
    window: float


NO_SPECULATION = Rates(1.0, 0.0, 0.0)


def window_rates(settings: HistoSpecSettings, acceptance: Acceptance) -> Rates:
    """Return the gain of full windows."""
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
    """Return the gain of drafts as long as there is room, from which a budget chooses."""
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
    """Return the pace without a budget: every sample drafts its window."""
    return Pace(round(drafts), 1.0)


def budgeted(times: StepTimes, rates: Rates, acceptance: Acceptance) -> Callable[[int, float, float], Pace]:
    """Return the pace under `drafting/budget.py`: as many draft tokens as yield most tokens a second.

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


class Speculating:
    """Speculation of one run. `kinds`: by tensor-parallel size; `measured`: of each step of a run that is replayed."""

    def __init__(self, features: Features, kinds: Mapping[int, EngineKind], measured: Sequence[Rates]) -> None:
        self._features = features
        self._kinds = kinds
        self._measured = measured
        self.rates: Rates = NO_SPECULATION
        """Of whole drafts."""
        self.paces: Mapping[int, PaceOf] = dict.fromkeys(kinds, full_windows)
        """By tensor-parallel size."""
        self._known: dict[Acceptance, tuple[Rates, Mapping[int, PaceOf]]] = {}

    def turn_to(self, step: int, epoch: int) -> None:
        """Step `step` (from 1) is planned now: from the second epoch on acceptance grows to the last one."""
        features = self._features
        if features.speculation == "measured":
            self.rates = self._measured[step - 1] if self._measured else NO_SPECULATION
        elif features.speculation != "off" and epoch >= 2:
            acceptance = features.acceptance(epoch)
            if acceptance not in self._known:
                self._known[acceptance] = self._of(acceptance)
            self.rates, self.paces = self._known[acceptance]

    def _of(self, acceptance: Acceptance) -> tuple[Rates, Mapping[int, PaceOf]]:
        features = self._features
        settings = HistoSpecSettings(window_start=features.window_start, window_max=features.window_max)
        if features.speculation != "budget":
            return window_rates(settings, acceptance), self.paces
        rates = proposal_rates(settings, acceptance)
        return rates, {size: budgeted(kind.times, rates, acceptance) for size, kind in self._kinds.items()}

    def verified(
        self, load: StepLoad, last_lengths: Callable[[int], Sequence[int]], engines: int, most_running: int, size: int
    ) -> Speculation:
        """Predict gain and cost of the step's drafts in the middle of it, with `engines` engines of tensor-parallel
        size `size`; `last_lengths`: of a prompt's last responses, by which the middle is known."""
        rates = self.rates
        if not rates.drafts_per_step:
            return Speculation()
        samples = sum(len(prompt.lengths) for prompt in load.prompts)
        running = max(min(round(samples / engines), most_running), 1)
        lengths = [length for prompt in load.prompts for length in last_lengths(prompt.prompt)]
        each = statistics.fmean(prompt.prompt_tokens for prompt in load.prompts)
        each += statistics.fmean(lengths) / 2 if lengths else 0.0
        pace = self.paces[size](running, running * each, running * rates.drafts_per_step)
        return Speculation(rates.tokens_per_step * pace.part, pace.drafts / running)
