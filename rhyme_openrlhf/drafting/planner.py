"""Plans of one engine: how much of each draft the next decode step verifies, and what is learnt from the outcome.

A planner joins three things:
- the acceptance model: how likely is each proposed token;
- the latency model: how long does a step take, by samples, context and draft tokens;
- the budget: which tokens are worth it.

Where no draft is
believed to be worth it, the beginning of a draft is tried now and then (budget.py), and learnt from at once.

Invariants: a draft is only ever cut, never lengthened or changed; every decision can be told (`Decision`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting.acceptance import AcceptanceModel
from rhyme_openrlhf.drafting.budget import Tries, choose, share
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.latency.predictor import Predictor

Ints = NDArray[np.int64]

# Draft tokens between two looks at what was learnt: some steps of a few samples, a part of one of many.
REFIT_TOKENS = 256


@dataclass(frozen=True)
class Cut:
    """Drafts of one step as cut: the length of each, and their tokens one draft after the other."""

    lengths: Ints
    flat: NDArray[np.int32]

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each draft."""
        found: list[list[int]] = core.split(self.flat, self.lengths)
        return found

    def within(self, most: int) -> Cut:
        """Return these drafts with at most `most` tokens in all, as `share` cuts them."""
        return self if self.flat.size <= most else self.to(share(self.lengths, most))

    def to(self, lengths: Ints) -> Cut:
        """Return the beginnings of these drafts that have these lengths."""
        return Cut(lengths, core.cut(self.flat, self.lengths, lengths))


@dataclass(frozen=True)
class Drafts(Cut):
    """The drafts of one step, and each token's estimated probability that it is right if those before it are.

    Of each draft also its source, tokens matched before it, and its sample's recent acceptance in thousandths.
    """

    confidences: NDArray[np.float32]
    sources: Ints
    matches: Ints
    recents: Ints


class Decision(NamedTuple):
    """Draft tokens of a step of `running` samples with `context` tokens in all, and what was expected of it."""

    running: int
    context: int
    drafts: int
    expected_accepted: float
    seconds: float


class Learning(Protocol):
    """An acceptance model, or several together (acceptance.py, `Acceptance`)."""

    def forget(self) -> None: ...
    def refit(self) -> None: ...


class Planner:
    """The part of a planner that is the same for all sources of drafts."""

    def __init__(self, predictor: Predictor, acceptance: Learning) -> None:
        """`predictor`: of this engine's steps; `acceptance`: of its drafts."""
        self.predictor = predictor
        self._acceptance = acceptance
        self._tries = Tries()
        # Tokens that were learnt from since the last refit, and whether they are enough for the next.
        self._learnt, self._refits = 0, False

    def took(self, running: int, context: int, drafts: int, seconds: float) -> None:
        """Note the `seconds` of a decode step, with its samples, tokens of context and draft tokens."""
        self.predictor.observe(running, context, drafts, seconds)

    def policy_updated(self) -> None:
        """Count what was accepted before less, because the engine has new weights."""
        self._acceptance.forget()
        self._acceptance.refit()

    def learnt(self, tokens: int) -> None:
        """Note how many `tokens` of the last step's drafts were learnt from."""
        self._learnt += tokens
        # Of a beginning that was tried there are few tokens, and the next is some steps away.
        self._refits |= self._learnt >= REFIT_TOKENS or (tokens > 0 and self._tries.trying)

    def computing(self) -> None:
        """Refit, if enough was learnt, while the step's forward pass runs."""
        if self._refits:
            self._learnt, self._refits = 0, False
            self._acceptance.refit()


class DraftPlanner(Planner):
    """The decisions of one engine on drafts from history."""

    _acceptance: AcceptanceModel

    def __init__(self, predictor: Predictor, sources: int) -> None:
        """`predictor`: of this engine's steps; `sources`: drafts come from 0 to `sources` - 1."""
        super().__init__(predictor, AcceptanceModel(sources))
        # Of the drafts of the last step: each token's cell, and each draft's length.
        self._cells = np.empty(0, dtype=np.int32)
        self._lengths: Ints = np.empty(0, dtype=np.int64)
        # Of the step that was prepared: samples, tokens of context, and seconds with 0, 1, ... draft tokens.
        self._prepared: tuple[int, int, NDArray[np.float64]] = 0, 0, np.empty(0)

    def prepare(self, running: int, context: int, most: int) -> None:
        """Predict the step that `cut` will be asked about; what it learns until then does not count."""
        self._prepared = running, context, self.predictor.step_table(running, context, max(most, 0))

    def cut(self, drafts: Drafts, running: int, context: int, most: int) -> tuple[Cut, Decision]:
        """Return what of each draft to verify in a step of `running` samples, and why.

        `drafts` are of some of the running samples, `context` is the tokens of all of them, `most` the draft tokens
        that the engine can take in one step.
        """
        proposed = drafts.flat.size
        size = max(min(proposed, most), 0) + 1
        *prepared, seconds = self._prepared
        if prepared != [running, context] or seconds.size < size:
            seconds = self.predictor.step_table(running, context, size - 1)
        seconds = seconds[:size]
        tried = self._tries.tokens(running, seconds.size - 1)
        self._cells, acceptance = self._acceptance.estimate(drafts)
        self._lengths = drafts.lengths
        lengths, total, expected = choose(acceptance, drafts.lengths, seconds, running, tried)
        self._tries.decided(proposed, total)
        decision = Decision(running, context, total, expected, float(seconds[total]))
        return Cut(lengths, core.cut(drafts.flat, drafts.lengths, lengths)), decision

    def learn(self, numbers: Ints, verified: Ints, accepted: Ints) -> None:
        """Learn how many tokens were verified and accepted, by the drafts' numbers in the last `cut`; -1: in none."""
        self.learnt(self._acceptance.learn(self._cells, self._lengths, numbers, verified, accepted))


class DecisionLog:
    """Decisions since the log was taken last, as sums over decode steps by running samples."""

    def __init__(self) -> None:
        self._by_running: dict[int, list[float]] = {}

    def add(self, decision: Decision, seconds: float, accepted: int) -> None:
        """Add the step of a `decision`: its seconds, and its accepted draft tokens."""
        new = (1, decision.drafts, decision.seconds, seconds, decision.expected_accepted, accepted)
        sums = self._by_running.setdefault(decision.running, [0.0] * len(new))
        for place, value in enumerate(new):
            sums[place] += value

    def take(self) -> dict[str, list[Any]]:
        """Return the fields of a DraftBudget event (telemetry/events.py), empty without decisions, and begin anew."""
        taken, self._by_running = sorted(self._by_running.items()), {}
        steps = [int(sums[0]) for _, sums in taken]
        return {
            "running": [running for running, _ in taken],
            "decode_steps": steps,
            "draft_length": [sums[1] / sums[0] / running for running, sums in taken],
            "predicted_ms": [1000 * sums[2] / sums[0] for _, sums in taken],
            "real_ms": [1000 * sums[3] / sums[0] for _, sums in taken],
            "expected_accepted": [sums[4] / sums[0] for _, sums in taken],
            "accepted": [sums[5] / sums[0] for _, sums in taken],
        }
