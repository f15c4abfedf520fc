"""How much is verified of what vLLM's own methods propose (`--drafting.source` ngram, draft_model, eagle3).

They propose a draft for every sample, in the worker, and say nothing of their confidence. The same budget as for
history (`speculation/budget.py`) takes tokens of all samples in the order of their probability, which here is by place
(`speculation/position_acceptance.py`).

Invariants: a draft is only ever cut, never lengthened or changed; without a planner it is verified as it was proposed,
as far as the step has room; `drafted` counts what the engine verified, which may be less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.speculation.acceptance import FIRST_RECENT, RECENT_SHARE
from rhyme_openrlhf.speculation.budget import choose
from rhyme_openrlhf.speculation.drafter import Verified
from rhyme_openrlhf.speculation.live_texts import Came
from rhyme_openrlhf.speculation.planner import Decision, Planner
from rhyme_openrlhf.speculation.position_acceptance import PositionAcceptance
from rhyme_openrlhf.speculation.rows import COUNT_OF_SOURCES, NO_SOURCE


class Proposed(NamedTuple):
    """A sample that decodes, the tokens proposed for it, and the most draft tokens it can take."""

    request_id: str
    tokens: list[int]
    room: int


class Fate(NamedTuple):
    """What became of a draft: its sample's recent acceptance before it (thousandths), tokens verified and accepted."""

    recent: int
    verified: int
    accepted: int


class ProposalPlanner(Planner[PositionAcceptance]):
    """The decisions of one engine."""

    def __init__(self, predictor: Predictor, tokens: int) -> None:
        """`predictor`: of this engine's steps; `tokens`: the most that is proposed for a sample."""
        super().__init__(predictor, PositionAcceptance(tokens))

    def cut(
        self, recents: Sequence[int], lengths: Sequence[int], running: int, context: int, most: int
    ) -> tuple[list[int], Decision]:
        """How many tokens of each proposed draft to verify in a step of `running` samples, and why.

        Arguments as `PositionAcceptance.likelihood`; `context` is the tokens of all running samples, `most` the draft
        tokens that the engine can take in one step.
        """
        proposed = np.array(lengths, dtype=np.int64)
        acceptance = self._acceptance.likelihood(np.array(recents, dtype=np.int64), proposed)
        seconds = self.predictor.step_table(running, context, max(min(acceptance.size, most), 0))
        budget = choose(acceptance, proposed, seconds, running)
        decision = Decision(running, context, budget.drafts, budget.expected_accepted, budget.seconds)
        return budget.lengths.tolist(), decision

    def learn(self, fates: Sequence[Fate]) -> None:
        """What became of the drafts of one step."""
        recents, verified, accepted = np.array(fates, dtype=np.int64).reshape(-1, 3).T
        self._acceptance.learn(recents, verified, accepted)
        self._refit_after(int(verified.sum()))


class ProposalDrafter:
    """What the scheduler asks for the drafts of all samples of one engine. One caller at a time."""

    def __init__(self) -> None:
        self._planner: ProposalPlanner | None = None
        # How each sample's drafts fared lately, in thousandths.
        self._recents: dict[str, int] = {}
        self._fates: list[Fate] = []
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

    def draft(self, running: Sequence[Proposed], context: int, most: int) -> list[list[int]]:
        """Draft tokens to verify in the next decode step, for each sample. Raises KeyError as `finish`."""
        self._learn()
        self.decision = None
        lengths = [max(min(len(tokens), room), 0) for _, tokens, room in running]
        if not running:
            return []
        if self._planner is not None:
            recents = [self._recents[sample.request_id] for sample in running]
            lengths, self.decision = self._planner.cut(recents, lengths, len(running), context, most)
        elif sum(lengths) > most:
            lengths = [min(length, most // len(running)) for length in lengths]
        return [sample.tokens[:length] for sample, length in zip(running, lengths, strict=True)]

    def leave_out(self) -> None:
        """The next decode step has no drafts."""
        self._learn()
        self.decision = None

    def verified(self, drafts: Verified) -> Came:
        """As `HistoryDrafter.verified`: all of them from the one source there is."""
        for request_id, drafted, accepted in zip(*drafts, strict=True):
            self.record(request_id, drafted, accepted)
        count = len(drafts.requests)
        by_source = [0] * COUNT_OF_SOURCES
        by_source[NO_SOURCE] = sum(drafts.accepted)
        return Came([NO_SOURCE] * count, np.full(count, -1), by_source)

    def record(self, request_id: str, drafted: int, accepted: int) -> None:
        """The engine verified `drafted` tokens of the last draft and accepted the first `accepted` of them.

        Raises KeyError as `finish`, ValueError unless 0 <= accepted <= drafted.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"need 0 <= accepted <= drafted, got {accepted} accepted of {drafted} drafted")
        recent = self._recents[request_id]
        if drafted:
            self._recents[request_id] = recent + (1000 * accepted // drafted - recent) // RECENT_SHARE
            if self._planner is not None:
                self._fates.append(Fate(recent, drafted, accepted))

    def _learn(self) -> None:
        if self._planner is not None and self._fates:
            self._planner.learn(self._fates)
            self._fates.clear()
