"""How much of what the drafter proposes is verified in the next step, and what is learnt from what became of it.

Puts three things together for one engine: the acceptance model (how likely is each proposed token), the latency model
(what does a step with so many draft tokens take, with so much context), and the budget (which tokens are worth it).

Invariants: a draft is only ever cut, never lengthened or changed; every decision can be told (`Decision`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.speculation.acceptance import AcceptanceModel
from rhyme_openrlhf.speculation.budget import choose
from rhyme_openrlhf.speculation.live_texts import Drafts

# Draft tokens between two looks at what was learnt: some steps of a few samples, a part of one of many.
REFIT_TOKENS = 256


@dataclass(frozen=True)
class Decision:
    """Draft tokens of a step of `running` samples with `context` tokens in all, and what was expected of it."""

    running: int
    context: int
    drafts: int
    expected_accepted: float
    seconds: float


class DraftPlanner:
    """The decisions of one engine."""

    def __init__(self, predictor: Predictor, sources: int) -> None:
        """`predictor`: of this engine's steps; `sources`: drafts come from 0 to `sources` - 1."""
        self.predictor = predictor
        self._acceptance = AcceptanceModel(sources)
        self._cells = np.empty(0, dtype=np.int32)
        self._begins: list[int] = []
        self._learnt = 0

    def cut(self, drafts: Drafts, running: int, context: int, most: int) -> tuple[list[int], Decision]:
        """How many tokens of each draft to verify in a step of `running` samples, and why.

        `drafts` are of some of the running samples, `context` is the tokens of all of them, `most` the draft tokens
        that the engine can take in one step.
        """
        lengths = drafts.lengths
        likelihood = self._acceptance.likelihood(
            drafts.sources, drafts.matches, drafts.recents, lengths, drafts.confidences
        )
        ends = np.cumsum(lengths)
        self._cells, self._begins = likelihood.cells, (ends - lengths).tolist()
        proposed = int(ends[-1]) if len(ends) else 0
        seconds = self.predictor.step_table(running, context, max(min(proposed, most), 0))
        budget = choose(likelihood.acceptance, lengths, seconds, running)
        decision = Decision(running, context, budget.drafts, budget.expected_accepted, budget.seconds)
        return budget.lengths.tolist(), decision

    def learn(self, numbers: Sequence[int], verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Of drafts that the last `cut` saw, by number, so many tokens were verified and accepted."""
        begins = np.array([self._begins[number] for number in numbers], dtype=np.int64)
        self._acceptance.learn(self._cells, begins, np.array(verified, np.int64), np.array(accepted, np.int64))
        self._learnt += sum(verified)
        if self._learnt >= REFIT_TOKENS:
            self._learnt = 0
            self._acceptance.refit()

    def took(self, running: int, context: int, drafts: int, seconds: float) -> None:
        """A decode step of so many samples, tokens of context and draft tokens took `seconds`."""
        self.predictor.observe(running, context, drafts, seconds)

    def policy_updated(self) -> None:
        """The engine has new weights: what was accepted before counts less."""
        self._acceptance.forget()
        self._acceptance.refit()
