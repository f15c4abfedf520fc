"""How much is verified of what vLLM's own methods propose (`--drafting.source` ngram, draft_model, eagle3).

They propose a draft for every sample, in the worker, and say nothing of their confidence. The same budget as for
history (`speculation/budget.py`) takes tokens of all samples in the order of their probability, which here is by place
(`speculation/position_acceptance.py`).

What is not verified is judged too: the token that was sampled behind the verified part is the one that was proposed
there with just the probability with which it would have been accepted. So a sample whose proposals become right is
noticed while nothing of it is verified. That says nothing of the tokens behind that one: where none is believed to be
worth it, now and then the beginning of a proposal is verified all the same (`speculation/trying.py`).

Where planning takes too much of a step, a plan holds for some steps (`speculation/plan_turns.py`): it is then the least
probability for which a token is verified, and drafts are cut where theirs falls below it; nothing is learnt meanwhile.
A plan of few tokens says only that it lies between two of them, and so what was known before goes on to hold there.

Invariants: a draft is only ever cut, never lengthened or changed; without a planner it is verified as it was proposed,
as far as the step has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.speculation.acceptance import FIRST_RECENT, RECENT_SHARE, class_of_recent
from rhyme_openrlhf.speculation.drafter import Verified
from rhyme_openrlhf.speculation.live_texts import Came
from rhyme_openrlhf.speculation.planner import Decision, Planner
from rhyme_openrlhf.speculation.position_acceptance import PositionAcceptance, likelihoods
from rhyme_openrlhf.speculation.rows import COUNT_OF_SOURCES, NO_SOURCE
from rhyme_openrlhf.speculation.trying import choose_or_try

# CRC-32 of the modules whose compiled functions are called here, as CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 728536906

# Proposed tokens that are judged before a plan may hold: some first steps of many samples, a minute of a single one.
SETTLED_TOKENS = 2048
# Above every probability; and what two of them may differ by that are the same.
_NONE = 2.0
_SAME = 1e-5


class Proposed(NamedTuple):
    """A sample that decodes, the tokens proposed for it, the most draft tokens it can take, and its text so far."""

    request_id: str
    tokens: list[int]
    room: int
    text: Sequence[int]


class Waiting(NamedTuple):
    """A proposal for what follows the first `text_tokens` of a sample's text, and how much of it is to be verified."""

    tokens: list[int]
    verified: int
    text_tokens: int


class Held(NamedTuple):
    """What is verified at most while a plan holds: of each sample that had started, and of a new one."""

    by_sample: dict[str, int]
    of_new: int


class Fates(NamedTuple):
    """What became of some proposals: their samples' recent acceptance before them (thousandths), tokens that can be
    judged, and how many of those were right before the first wrong one."""

    recents: list[int]
    judged: list[int]
    right: list[int]


class ProposalPlanner(Planner[PositionAcceptance]):
    """The decisions of one engine."""

    def __init__(self, predictor: Predictor, tokens: int) -> None:
        """`predictor`: of this engine's steps; `tokens`: the most that is proposed for a sample."""
        super().__init__(predictor, PositionAcceptance(tokens))
        # The probability, with those before it, from which on a token is worth it, as far as the last plans say; and
        # whether the last one verified nothing that was.
        self._least = _NONE
        self._nothing = True
        self._judged = 0
        # Compiled, or loaded from Numba's cache, so that no decode step waits for it.
        nothing = np.zeros(1, np.int64)
        self._acceptance.learn(nothing, nothing, nothing)
        _plan(self._acceptance.table, nothing, nothing, np.ones(1), 1, 0)

    def cut(
        self, recents: Sequence[int], lengths: Sequence[int], running: int, context: int, most: int
    ) -> tuple[list[int], Decision]:
        """How many tokens of each proposed draft to verify in a step of `running` samples, and why.

        For each draft its sample's recent acceptance (thousandths) and its length; `context` is the tokens of all
        running samples, `most` the draft tokens that the engine can take in one step.
        """
        proposed = sum(lengths)
        if not proposed:
            return list(lengths), Decision(running, context, 0, 0.0, self.predictor.step_seconds(running, context, 0))
        seconds = self.predictor.step_table(running, context, max(min(proposed, most), 0))
        tried = self._tries.tokens(running, seconds.size - 1)
        taken, drafts, expected, least, left_out = _plan(
            self._acceptance.table, np.array(recents, np.int64), np.array(lengths, np.int64), seconds, running, tried
        )
        self._nothing = drafts == tried
        if not self._nothing and not left_out < self._least <= least:
            self._least = (left_out + least) / 2
        self._tries.decided(proposed, drafts)
        return taken.tolist(), Decision(running, context, drafts, expected, float(seconds[drafts]))

    @property
    def settled(self) -> bool:
        """Whether so much was learnt that it changes little from step to step."""
        return self._judged >= SETTLED_TOKENS

    def held_lengths(self) -> list[int]:
        """While the last plan holds: draft tokens to verify of a sample, by the class of its recent acceptance."""
        paths = np.cumprod(self._acceptance.table, axis=1)
        least = _NONE if self._nothing else self._least * (1 - _SAME)
        # Products in another order may differ in their last bit.
        held: list[int] = (paths >= least).sum(axis=1).tolist()
        return held

    def learn(self, fates: Fates) -> None:
        """What became of the drafts of one step."""
        recents, judged, right = (np.array(one, np.int64) for one in fates)
        self._acceptance.learn(recents, judged, right)
        tokens = sum(fates.judged)
        self._judged += tokens
        self._refit_after(tokens)


@njit(cache=True)
def _plan(table, recents, lengths, seconds, running, tried):  # type: ignore[no-untyped-def]
    """Estimate what is accepted of the drafts, and choose: their lengths, the sum, and how many will be accepted.

    And, with those before it, the probability of the least probable token among them (_NONE if there is none) and that
    of the most probable one that is left out (0 if there is none).
    """
    acceptance = likelihoods(table, recents, lengths)
    chosen, total, expected = choose_or_try(acceptance, lengths, seconds, running, tried)
    least, left_out, begin = np.float32(_NONE), np.float32(0.0), 0
    for draft in range(lengths.size):
        path = np.float32(1.0)
        for place in range(begin, begin + chosen[draft]):
            path *= acceptance[place]
        if chosen[draft] and path < least:
            least = path
        if chosen[draft] < lengths[draft]:
            left_out = max(left_out, path * acceptance[begin + chosen[draft]])
        begin += lengths[draft]
    return chosen, total, expected, least, left_out


class ProposalDrafter:
    """What the scheduler asks for the drafts of all samples of one engine. One caller at a time."""

    def __init__(self) -> None:
        self._planner: ProposalPlanner | None = None
        # How each sample's proposals fared lately, in thousandths; and its last one, until it can be judged.
        self._recents: dict[str, int] = {}
        self._waiting: dict[str, Waiting] = {}
        self.decision: Decision | None = None
        """What the planner decided for the next step; None without a planner."""

    def plan_with(self, planner: ProposalPlanner) -> None:
        """From the next step on `planner` cuts what is proposed."""
        self._planner = planner

    def start(self, request_id: str) -> None:
        """A sample begins. Raises ValueError if it has started already."""
        if request_id in self._recents:
            raise ValueError(f"request {request_id} has started already")
        self._recents[request_id] = FIRST_RECENT

    def finish(self, request_id: str) -> None:
        """A sample ended or was aborted. Raises KeyError for one that has not started."""
        del self._recents[request_id]
        self._waiting.pop(request_id, None)

    def draft(self, running: Sequence[Proposed], context: int, most: int) -> list[list[int]]:
        """Draft tokens to verify in the next decode step, for each sample. Raises KeyError as `finish`."""
        self.decision = None
        lengths = [max(min(len(sample.tokens), sample.room), 0) for sample in running]
        if not running:
            return []
        if self._planner is not None:
            self._learn(self._planner, running)
            recents = [self._recents[sample.request_id] for sample in running]
            lengths, self.decision = self._planner.cut(recents, lengths, len(running), context, most)
            for sample, length in zip(running, lengths, strict=True):
                if sample.tokens:
                    self._waiting[sample.request_id] = Waiting(sample.tokens, length, len(sample.text))
        elif sum(lengths) > most:
            # None longer than its even share.
            lengths = [min(length, most // len(running)) for length in lengths]
        return [sample.tokens[:length] for sample, length in zip(running, lengths, strict=True)]

    def hold(self) -> Held:
        """The last plan is to hold for some steps, about which nothing is learnt; needs a planner."""
        assert self._planner is not None
        lengths = self._planner.held_lengths()
        # Not judged: what it would be judged by is known when it is planned anew.
        self.leave_out()
        by_sample = {request_id: lengths[class_of_recent(recent)] for request_id, recent in self._recents.items()}
        return Held(by_sample, lengths[class_of_recent(FIRST_RECENT)])

    def leave_out(self) -> None:
        """The next decode step has no drafts."""
        self._waiting.clear()
        self.decision = None

    def verified(self, drafts: Verified) -> Came:
        """As `HistoryDrafter.verified`: all of them from the one source there is."""
        count = len(drafts.requests)
        by_source = [0] * COUNT_OF_SOURCES
        by_source[NO_SOURCE] = sum(drafts.accepted)
        return Came([NO_SOURCE] * count, np.array([-1] * count, dtype=np.int64), by_source)

    def _learn(self, planner: ProposalPlanner, running: Sequence[Proposed]) -> None:
        """Judge the last proposals of these samples by what their texts have now."""
        if not self._waiting:
            return
        fates = Fates([], [], [])
        for request_id, _, _, text in running:
            waiting = self._waiting.pop(request_id, None)
            if waiting is None:
                continue
            tokens, verified, count = waiting
            new = text[count : count + min(verified + 1, len(tokens))]
            if not new:
                continue
            right = 0
            while right < len(new) and new[right] == tokens[right]:
                right += 1
            recent = self._recents[request_id]
            fates.recents.append(recent)
            fates.judged.append(len(new))
            fates.right.append(right)
            self._recents[request_id] = recent + (1000 * right // len(new) - recent) // RECENT_SHARE
        if fates.judged:
            planner.learn(fates)
