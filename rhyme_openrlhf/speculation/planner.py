"""How much of what the drafter proposes is verified in the next step, and what is learnt from what became of it.

Puts three things together for one engine: the acceptance model (how likely is each proposed token), the latency model
(what does a step with so many draft tokens take, with so much context), and the budget (which tokens are worth it).

Where no draft is believed to be worth it, now and then the beginning of one is verified all the same: what was never
tried is never learnt, and an engine that always runs many samples would not draft however well drafts are accepted.

Invariants: a draft is only ever cut, never lengthened or changed; every decision can be told (`Decision`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.speculation.acceptance import AcceptanceModel, estimate
from rhyme_openrlhf.speculation.budget import choose_lengths
from rhyme_openrlhf.speculation.live_texts import Cut, Drafts

# CRC-32 of the modules whose compiled functions are called here, as CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 3854265917

Ints = NDArray[np.int64]

# Draft tokens between two looks at what was learnt: some steps of a few samples, a part of one of many.
REFIT_TOKENS = 256

# Steps in which nothing of what is proposed is verified, before a beginning is; and running samples to a token of it.
# A token a 32 samples costs such a step some percent, and so all of them together some tenths.
TRIED_AFTER, RUNNING_TO_A_TOKEN = 16, 32


@dataclass(frozen=True)
class Decision:
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
        self._learnt = 0

    def took(self, running: int, context: int, drafts: int, seconds: float) -> None:
        """A decode step of so many samples, tokens of context and draft tokens took `seconds`."""
        self.predictor.observe(running, context, drafts, seconds)

    def policy_updated(self) -> None:
        """The engine has new weights, and a drafter of its own has not: what was accepted before counts less."""
        self._acceptance.forget()
        self._acceptance.refit()

    def _refit_after(self, tokens: int) -> None:
        self._learnt += tokens
        if self._learnt >= REFIT_TOKENS:
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
        # Steps in a row in which nothing of what was proposed was verified.
        self._untried = 0
        self._tried = False
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
        tried = 0
        if self._untried == TRIED_AFTER:
            tried = min(max(running // RUNNING_TO_A_TOKEN, 1), seconds.size - 1)
        kept, lengths = np.empty(proposed, dtype=np.int32), np.empty(drafts.lengths.size, dtype=np.int64)
        total, expected = _plan(
            self._acceptance.table, drafts.sources, drafts.matches, drafts.recents, drafts.lengths, drafts.flat,
            drafts.confidences, seconds, running, tried, self._cells, self._begins, kept, lengths,
        )  # fmt: skip
        self._tried = tried > 0
        self._untried = self._untried + 1 if proposed and not total else 0
        decision = Decision(running, context, total, expected, float(seconds[total]))
        return Cut(kept[:total], lengths), decision

    def learn(self, numbers: Ints, verified: Ints, accepted: Ints) -> None:
        """So many tokens were verified and accepted of the drafts of these numbers that the last `cut` saw.

        -1: it did not see the draft.
        """
        learnt = self._acceptance.learn(self._cells, self._begins, numbers, verified, accepted)
        # Of a beginning that was tried there are few tokens, and the next is some steps away.
        self._refit_after(max(learnt, REFIT_TOKENS) if learnt and self._tried else learnt)

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
    chosen, total, expected = choose_lengths(acceptance, lengths, seconds, running)
    if total == 0 and tried and flat.size:
        total, expected = _beginning(acceptance, lengths, tried, chosen)
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


@njit(cache=True)
def _beginning(acceptance, lengths, tried, chosen):  # type: ignore[no-untyped-def]
    """Choose so many tokens of the longest draft; returns what it has of them and how many will be accepted."""
    longest = 0
    for draft in range(lengths.size):
        if lengths[draft] > lengths[longest]:
            longest = draft
    begin = 0
    for draft in range(longest):
        begin += lengths[draft]
    taken, expected, path = min(tried, lengths[longest]), 0.0, 1.0
    for place in range(begin, begin + taken):
        path *= acceptance[place]
        expected += path
    chosen[longest] = taken
    return taken, expected
