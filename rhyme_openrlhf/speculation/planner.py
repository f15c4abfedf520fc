"""How much of what the drafter proposes is verified in the next step, and what is learnt from what became of it.

Puts three things together for one engine: the acceptance model (how likely is each proposed token), the latency model
(what does a step with so many draft tokens take, with so much context), and the budget (which tokens are worth it).

Where no draft is believed to be worth it, now and then the beginning of one is verified all the same
(`speculation/trying.py`), and learnt from at once.

Invariants: a draft is only ever cut, never lengthened or changed; every decision can be told (`Decision`).
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.speculation.acceptance import AcceptanceModel, estimate
from rhyme_openrlhf.speculation.live_texts import Cut, Drafts
from rhyme_openrlhf.speculation.trying import Tries, choose_or_try

# CRC-32 of the modules whose compiled functions are called here, as CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 1108718550

Ints = NDArray[np.int64]

# Draft tokens between two looks at what was learnt: some steps of a few samples, a part of one of many.
REFIT_TOKENS = 256


class Decision(NamedTuple):
    """Draft tokens of a step of `running` samples with `context` tokens in all, and what was expected of it."""

    running: int
    context: int
    drafts: int
    expected_accepted: float
    seconds: float


class Forgetting(Protocol):
    """What learns how likely drafts are accepted, and doubts it when the policy changes."""

    def forget(self) -> None: ...

    def refit(self) -> None: ...


A = TypeVar("A", bound=Forgetting)


class Planner(Generic[A]):
    """What the planners of all sources of drafts learn in the same way, of one engine."""

    def __init__(self, predictor: Predictor, acceptance: A) -> None:
        """`predictor`: of this engine's steps; `acceptance`: of its drafts."""
        self.predictor = predictor
        self._acceptance = acceptance
        self._tries = Tries()
        self._learnt = 0

    def took(self, running: int, context: int, drafts: int, seconds: float) -> None:
        """A decode step of so many samples, tokens of context and draft tokens took `seconds`."""
        self.predictor.observe(running, context, drafts, seconds)

    def policy_updated(self) -> None:
        """The engine has new weights, and a drafter of its own has not: what was accepted before counts less."""
        self._acceptance.forget()
        self._acceptance.refit()

    def _refit_after(self, tokens: int) -> None:
        """So many tokens of the last step's drafts were learnt from."""
        self._learnt += tokens
        # Of a beginning that was tried there are few tokens, and the next is some steps away.
        if self._learnt >= REFIT_TOKENS or (tokens and self._tries.trying):
            self._learnt = 0
            self._acceptance.refit()


class DraftPlanner(Planner[AcceptanceModel]):
    """The decisions of one engine."""

    def __init__(self, predictor: Predictor, sources: int) -> None:
        """`predictor`: of this engine's steps; `sources`: drafts come from 0 to `sources` - 1."""
        super().__init__(predictor, AcceptanceModel(sources))
        # Of the drafts of the last step: each token's cell, and where each draft begins among them, and the last ends.
        self._cells = np.empty(0, dtype=np.int32)
        self._begins: Ints = np.empty(0, dtype=np.int64)
        self._compile()

    def cut(self, drafts: Drafts, running: int, context: int, most: int) -> tuple[Cut, Decision]:
        """What of each draft to verify in a step of `running` samples, and why.

        `drafts` are of some of the running samples, `context` is the tokens of all of them, `most` the draft tokens
        that the engine can take in one step.
        """
        proposed = drafts.flat.size
        seconds = self.predictor.step_table(running, context, max(min(proposed, most), 0))
        self._cells, self._begins = (
            np.empty(proposed, dtype=np.int32),
            np.empty(drafts.lengths.size + 1, dtype=np.int64),
        )
        tried = self._tries.tokens(running, seconds.size - 1)
        kept, lengths = np.empty(proposed, dtype=np.int32), np.empty(drafts.lengths.size, dtype=np.int64)
        total, expected = _plan(
            self._acceptance.table, drafts.sources, drafts.matches, drafts.recents, drafts.lengths, drafts.flat,
            drafts.confidences, seconds, running, tried, self._cells, self._begins, kept, lengths,
        )  # fmt: skip
        self._tries.decided(proposed, total)
        decision = Decision(running, context, total, expected, float(seconds[total]))
        return Cut(kept[:total], lengths), decision

    def learn(self, numbers: Ints, verified: Ints, accepted: Ints) -> None:
        """So many tokens were verified and accepted of the drafts of these numbers that the last `cut` saw.

        -1: it did not see the draft.
        """
        self._refit_after(self._acceptance.learn(self._cells, self._begins, numbers, verified, accepted))

    def _compile(self) -> None:
        """Compile what a step calls, or load it from Numba's cache: seconds that no decode step should have to wait."""
        none, nothing = np.zeros(0, np.int64), np.zeros(0, np.int32)
        _plan(
            self._acceptance.table, none, none, none, none, nothing, np.zeros(0, np.float32), np.ones(1), 1, 0, nothing,
            np.zeros(1, np.int64), nothing, none,
        )  # fmt: skip
        self._acceptance.learn(nothing, np.zeros(1, np.int64), none, none, none)


@njit(cache=True)
def _plan(  # type: ignore[no-untyped-def]
    table, sources, matches, recents, lengths, flat, confidences, seconds, running, tried, cells, begins, kept, taken
):
    """Estimate what is accepted of the drafts, choose, and cut; returns tokens kept and how many will be accepted.

    `tried`: tokens of the longest draft that are kept if nothing is chosen. Filled: `cells` of each token, `begins` of
    each draft, `kept` tokens without gaps, `taken` of them for each draft.
    """
    acceptance = np.empty(flat.size, dtype=np.float32)
    estimate(table, sources, matches, recents, lengths, confidences, cells, acceptance)
    chosen, total, expected = choose_or_try(acceptance, lengths, seconds, running, tried)
    begin = at = 0
    for draft in range(lengths.size):
        begins[draft] = begin
        taken[draft] = chosen[draft]
        for place in range(begin, begin + chosen[draft]):
            kept[at] = flat[place]
            at += 1
        begin += lengths[draft]
    begins[lengths.size] = begin
    return total, expected
