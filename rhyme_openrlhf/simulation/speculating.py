"""What speculation gives at present in one run: rates of whole drafts, and the pace of its engines' decode steps.

Invariants: it changes with the step that is planned; what one acceptance gives is made once in a run, so that steps of
the same epoch, and epochs behind the last acceptance, share what budgets were chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rhyme_openrlhf.scheduling.step_plan import Speculation
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation.engine import EngineKind, PaceOf
from rhyme_openrlhf.simulation.planner import History
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.speculation_rates import (
    NO_SPECULATION,
    Acceptance,
    Rates,
    budgeted,
    full_windows,
    proposal_rates,
    window_rates,
)
from rhyme_openrlhf.simulation.workload import StepLoad


class Speculating:
    """That of one run. `kinds`: by tensor-parallel size; `measured`: of each step of a run that is replayed."""

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
        settings = HistoSpecSettings(window_max=self._features.window_max)
        if self._features.speculation != "budget":
            return window_rates(settings, acceptance), self.paces
        rates = proposal_rates(settings, acceptance)
        return rates, {size: budgeted(kind.times, rates, acceptance) for size, kind in self._kinds.items()}

    def verified(self, load: StepLoad, history: History, engines: int, most_running: int, size: int) -> Speculation:
        """What the step's drafts will give and cost in the middle of it, by the lengths that were last seen, with so
        many engines of tensor-parallel size `size`."""
        rates = self.rates
        if not rates.drafts_per_step:
            return Speculation()
        samples = sum(len(prompt.lengths) for prompt in load.prompts)
        running = max(min(round(samples / engines), most_running), 1)
        lengths = [length for prompt in load.prompts for length in history.lengths(prompt.prompt)]
        each = statistics.fmean(prompt.prompt_tokens for prompt in load.prompts)
        each += statistics.fmean(lengths) / 2 if lengths else 0.0
        pace = self.paces[size](running, running * each, running * rates.drafts_per_step)
        return Speculation(rates.tokens_per_step * pace.part, pace.drafts / running)
