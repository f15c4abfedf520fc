"""How much is verified of what vLLM's own methods propose (`--drafting.source` ngram, draft_model, eagle3).

They propose a draft for every sample, in the worker, and say nothing of their confidence. The same budget as for
history (`drafting/budget.py`) takes tokens of all samples in the order of their probability, which here is by place
(`drafting/position_acceptance.py`).

What is not verified is judged too: the token that was sampled behind the verified part is the one that was proposed
there with just the probability with which it would have been accepted. So a sample whose proposals become right is
noticed while nothing of it is verified. That says nothing of the tokens behind that one: where none is believed to be
worth it, now and then the beginning of a proposal is verified all the same (`drafting/budget.py`).

Where planning takes too much of a step, a plan holds for some steps (`drafting/replanning.py`): it is then the least
probability for which a token is verified. Drafts are cut where theirs falls below it, and left out where all together
are not worth verifying. Proposals are judged as ever, because how a sample fares changes within a few steps; what that
says of others is learnt with the next plan. Where drafts were worth it in none of many steps, nothing is proposed for
most of the time. A plan of few tokens says only that the boundary lies between two of them, and so what was known
before goes on to hold there.

Invariants: a draft is only ever cut, never lengthened or changed; without a planner it is verified as it was proposed,
as far as the step has room.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from rhyme_openrlhf.drafting.acceptance import FIRST_RECENT, RECENT_EDGES, RECENT_SHARE, RECENTS, Floats, Ints
from rhyme_openrlhf.drafting.budget import choose, share
from rhyme_openrlhf.drafting.drafter import NO_SOURCE, SOURCE_NAMES, Attribution, Verified
from rhyme_openrlhf.drafting.planner import Decision, Planner
from rhyme_openrlhf.drafting.position_acceptance import PositionAcceptance
from rhyme_openrlhf.latency.predictor import Predictor

# Proposed tokens that are judged before a plan may hold: some first steps of many samples, a minute of a single one.
SETTLED_TOKENS = 2048
# Drafts are chosen where tokens per second are expected to be more than without by this factor: of the tokens that are
# expected to be accepted a tenth is not, since the most promising are chosen, and proposals that are never verified
# need not be made (docs/benchmarks.md).
LEAST_GAIN = 1.03
# Above every probability; and what two of them may differ by that are the same.
_NONE = 2.0
_SAME = 1e-5
# The class of each value of recent acceptance (acceptance.py `classes_of_recent`, at less cost for one).
_CLASSES: list[int] = np.repeat(range(RECENTS), np.diff((0, *RECENT_EDGES, 1001))).tolist()
# Where nothing was worth it for so many samples and steps, samples times steps, one of so many plans that hold goes on
# looking for what is. By then each of 64 samples had eight tokens, a single one all of a long answer.
LOOKED_FOR, LOOKS_AGAIN = 512, 4


class Proposed(NamedTuple):
    """A sample that decodes, the tokens proposed for it, and its text so far."""

    request_id: str
    tokens: list[int]
    text: Sequence[int]


class Waiting(NamedTuple):
    """A proposal for what follows the first `text_tokens` of a sample's text, and how much of it is to be verified."""

    tokens: list[int]
    verified: int
    text_tokens: int


class Held(NamedTuple):
    """A plan that holds: draft tokens to verify of a sample, and how many of so many are accepted, by the class of its
    recent acceptance; and how many of so many verified tokens must be accepted for them to be worth it."""

    lengths: list[int]
    accepted: list[list[float]]
    needed: list[float]


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
        self.worth = False
        """Whether the last plan verifies tokens because they are worth it."""
        # The probability, with those before it, from which on a token is worth it, as far as plans say; by the power of
        # two of running samples, on which it depends.
        self._least: dict[int, float] = {}
        # Samples and context of the last one.
        self._planned = (1, 0)
        self._judged = 0

    def cut(
        self, recents: Sequence[int], lengths: Sequence[int], running: int, context: int, most: int
    ) -> tuple[list[int], Decision]:
        """How many tokens of each proposed draft to verify in a step of `running` samples, and why.

        For each draft its sample's recent acceptance (thousandths) and its length; `context` is the tokens of all
        running samples, `most` the draft tokens that the engine can take in one step.
        """
        proposed = sum(lengths)
        self.worth, self._planned = False, (running, context)
        if not proposed:
            return list(lengths), Decision(running, context, 0, 0.0, self.predictor.step_seconds(running, context, 0))
        seconds = self.predictor.step_table(running, context, max(min(proposed, most), 0))
        without = float(seconds[0])
        seconds[0] /= LEAST_GAIN
        tried = self._tries.tokens(running, seconds.size - 1)
        likelihoods, sizes = self._acceptance.likelihoods(np.array(recents, np.int64)), np.array(lengths, np.int64)
        flat = likelihoods[np.arange(likelihoods.shape[1]) < sizes[:, None]]
        taken, drafts, expected = choose(flat, sizes, seconds, running, tried)
        least, left_out = _boundary(likelihoods, sizes, taken)
        self.worth = drafts > tried
        if self.worth and not left_out < self._least_of(running) <= least:
            self._least[running.bit_length()] = (left_out + least) / 2
        self._tries.decided(proposed, drafts)
        taking = float(seconds[drafts]) if drafts else without
        return taken.tolist(), Decision(running, context, drafts, expected, taking)

    def _least_of(self, running: int) -> float:
        """Where plans of about as many samples, or of fewer or more, say that the boundary lies."""
        size = running.bit_length()
        nearest = min(self._least, key=lambda known: abs(known - size), default=None)
        return _NONE if nearest is None else self._least[nearest]

    @property
    def settled(self) -> bool:
        """Whether so much was learnt that it changes little from step to step."""
        return self._judged >= SETTLED_TOKENS

    def hold(self) -> Held:
        """The last plan is to hold for some steps of about as many samples."""
        running, context = self._planned
        paths = np.cumprod(self._acceptance.table, axis=1)
        # Products in another order may differ in their last bit.
        lengths = (paths >= self._least_of(running) * (1 - _SAME)).sum(axis=1)
        accepted = np.hstack([np.zeros((len(paths), 1)), np.cumsum(paths, axis=1)])
        seconds = self.predictor.step_table(running, context, running * paths.shape[1])
        needed = running * (LEAST_GAIN * seconds / seconds[0] - 1)
        needed[0] = 0.0
        return Held(lengths.tolist(), accepted.tolist(), needed.tolist())

    def learn(self, fates: Fates) -> None:
        """What became of the drafts of one step."""
        recents, judged, right = (np.array(one, np.int64) for one in fates)
        self._acceptance.learn(recents, judged, right)
        tokens = sum(fates.judged)
        self._judged += tokens
        self._refit_after(tokens)


def _boundary(likelihoods: Floats, lengths: Ints, chosen: Ints) -> tuple[float, float]:
    """The probability, with those before it, of the least probable token that is chosen (_NONE if there is none), and
    of the most probable one that is left out (0 if there is none)."""
    paths = np.cumprod(likelihoods, axis=1, dtype=np.float32)
    verified, cut = np.flatnonzero(chosen), np.flatnonzero(chosen < lengths)
    least = paths[verified, chosen[verified] - 1].min(initial=np.float32(_NONE))
    left_out = paths[cut, chosen[cut]].max(initial=np.float32(0.0))
    return least, left_out


class ProposalDrafter:
    """What the scheduler asks for the drafts of all samples of one engine. One caller at a time."""

    def __init__(self) -> None:
        self._planner: ProposalPlanner | None = None
        # How each sample's proposals fared lately, in thousandths; and its last one, until it can be judged.
        self._recents: dict[str, int] = {}
        # The most tokens that each sample's text can have.
        self._most_tokens: dict[str, int] = {}
        self._waiting: dict[str, Waiting] = {}
        # What became of proposals since something was learnt last.
        self._fates = Fates([], [], [])
        self._held = Held([], [], [])
        # Since something was worth it, or another number of samples ran: how many ran then; samples times steps; and
        # plans that have held behind LOOKED_FOR of them.
        self._looked_with = 1
        self._looked = 0
        self._idle = 0
        self.decision: Decision | None = None
        """What the planner decided for the next step; None without a planner."""

    def plan_with(self, planner: ProposalPlanner) -> None:
        """From the next step on `planner` cuts what is proposed."""
        self._planner = planner

    def start(self, request_id: str, most_tokens: int) -> None:
        """A sample begins whose text, with its prompt, can have so many tokens. Raises ValueError if it has started
        already."""
        if request_id in self._recents:
            raise ValueError(f"request {request_id} has started already")
        self._recents[request_id] = FIRST_RECENT
        self._most_tokens[request_id] = most_tokens

    def finish(self, request_id: str) -> None:
        """A sample ended or was aborted. Raises KeyError for one that has not started."""
        del self._recents[request_id], self._most_tokens[request_id]
        self._waiting.pop(request_id, None)

    def draft(self, running: Sequence[Proposed], context: int, most: int) -> list[list[int]]:
        """Draft tokens to verify in the next decode step, for each sample. Raises KeyError as `finish`."""
        self.decision = None
        lengths = [self._fitting(sample) for sample in running]
        if not running:
            return []
        if self._planner is not None:
            self._learn(self._planner, running)
            recents = [self._recents[sample.request_id] for sample in running]
            lengths, self.decision = self._planner.cut(recents, lengths, len(running), context, most)
            self._look(len(running), self._planner.worth)
            return self._wait(running, lengths)
        return [sample.tokens[:length] for sample, length in zip(running, share(lengths, most), strict=True)]

    def hold(self) -> bool:
        """The last plan is to hold for some steps; returns whether proposals are needed for them."""
        assert self._planner is not None
        self._held = self._planner.hold()
        self.decision = None
        if self._looked >= LOOKED_FOR:
            self._idle += 1
            if self._idle % LOOKS_AGAIN:
                self.leave_out()
                return False
        return True

    @property
    def waiting(self) -> Container[str]:
        """The samples whose last proposal is still to be judged."""
        return self._waiting

    def draft_held(self, asked: Sequence[Proposed], running: int, most: int) -> list[list[int]]:
        """As `draft` in a step of `running` samples, by the plan that holds; those of them that have no proposal and
        are not `waiting` need not be asked for."""
        lengths, total, expected, held = [], 0, 0.0, self._held
        for sample in asked:
            self._judge(sample.request_id, sample.text)
            length = 0
            if sample.tokens:
                of_class = _CLASSES[self._recents[sample.request_id]]
                if length := held.lengths[of_class]:
                    length = min(length, self._fitting(sample), most - total)
                    total += length
                    expected += held.accepted[of_class][length]
            lengths.append(length)
        worth = expected >= held.needed[min(total, len(held.needed) - 1)]
        if not worth:
            lengths = [0] * len(lengths)
        self._look(running, total > 0 and worth)
        return self._wait(asked, lengths)

    def leave_out(self) -> None:
        """The next decode step has no drafts."""
        self._waiting.clear()
        self.decision = None

    def verified(self, drafts: Verified) -> Attribution:
        """As `HistoryDrafter.verified`: all of them from the one source there is."""
        count = len(drafts.requests)
        by_source = [0] * len(SOURCE_NAMES)
        by_source[NO_SOURCE] = sum(drafts.accepted)
        return Attribution([NO_SOURCE] * count, np.array([-1] * count, dtype=np.int64), by_source)

    def _look(self, running: int, worth: bool) -> None:
        """Drafts of so many samples are, or are not, worth verifying in the next step."""
        # What is worth nothing with many samples may be worth much with a few.
        if worth or not self._looked_with <= 2 * running <= 4 * self._looked_with:
            self._looked_with, self._looked, self._idle = running, 0, 0
        if not worth:
            self._looked += running

    def _fitting(self, sample: Proposed) -> int:
        """Tokens of its proposal that fit into its text; a draft of n yields up to n + 1."""
        return max(min(len(sample.tokens), self._most_tokens[sample.request_id] - len(sample.text) - 1), 0)

    def _wait(self, running: Sequence[Proposed], lengths: Sequence[int]) -> list[list[int]]:
        """So much is verified of each proposal; it is judged when there is more text."""
        drafts = []
        for (request_id, tokens, text), length in zip(running, lengths, strict=True):
            if tokens:
                self._waiting[request_id] = Waiting(tokens, length, len(text))
                tokens = tokens[:length]
            drafts.append(tokens)
        return drafts

    def _learn(self, planner: ProposalPlanner, running: Sequence[Proposed]) -> None:
        """From what became of proposals since it was called last."""
        for sample in running:
            self._judge(sample.request_id, sample.text)
        if self._fates.judged:
            fates, self._fates = self._fates, Fates([], [], [])
            planner.learn(fates)

    def _judge(self, request_id: str, text: Sequence[int]) -> None:
        """The last proposal for a sample, by what its text has now."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        tokens, verified, count = waiting
        new = text[count : count + min(verified + 1, len(tokens))]
        if not new:
            return
        right = 0
        while right < len(new) and new[right] == tokens[right]:
            right += 1
        recent = self._recents[request_id]
        fates = self._fates
        fates.recents.append(recent)
        fates.judged.append(len(new))
        fates.right.append(right)
        self._recents[request_id] = recent + (1000 * right // len(new) - recent) // RECENT_SHARE
