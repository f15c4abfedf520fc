"""Sources of drafts: one protocol for history and for vLLM's own methods, and the base of sources of bare tokens.

History is a source of its own (drafter.py). vLLM's methods (`--drafting.source` ngram, draft_model, eagle3) extend
`Proposals`, and so does any other source of bare tokens. `Proposals` plans, cuts and learns; its subclass proposes. A
new source is such a class and an entry in `SOURCES` (engine/scheduler_parts/drafting.py).

Bare tokens have no confidence. The same budget as for history (budget.py) takes tokens of all samples in the order of
their probability, which is learnt by place in the draft (`PositionAcceptance`). Proposed tokens that are not verified
are judged too: the token sampled behind the verified part equals the proposed one as often as it would have been
accepted. So a sample whose proposals become right is noticed while none of them is verified. The tokens behind that one
are judged when a beginning is tried (`Tries`).

Invariants:
- A source proposes, and vLLM's rejection sampler decides.
- A draft is only ever cut, never lengthened or changed.
- Samples are known by their request's name. There is one caller at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting.acceptance import FIRST_RECENT, RECENT_SHARE, PositionAcceptance
from rhyme_openrlhf.drafting.budget import choose, share
from rhyme_openrlhf.drafting.planner import Cut, Decision, Planner
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.latency.predictor import Predictor

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

# Drafts must promise this factor of the tokens per second of a step without. The most promising drafts are chosen, so
# a tenth of the tokens that are expected to be accepted is not.
LEAST_GAIN = 1.03


class Verified(NamedTuple):
    """Drafts that a step verified: the requests, tokens verified of each (one at least), and tokens accepted."""

    requests: list[str]
    drafted: Int64s
    accepted: Int64s

    @classmethod
    def of(cls, requests: list[str], drafted: Sequence[int], accepted: Sequence[int]) -> Verified:
        """Return the same of other sequences than arrays."""
        return cls(requests, np.array(drafted, np.int64), np.array(accepted, np.int64))


class Attribution(NamedTuple):
    """The sources of verified drafts.

    Each draft's source; its number in the last step, -1 if an earlier step drafted it; and the accepted tokens by
    source. Sources are numbered as in `DraftSource.names`.
    """

    sources: Int64s
    numbers: Int64s
    accepted: list[int]


class DraftSource:
    """A source that drafts for all samples of one engine; only `draft` must be there."""

    names: Sequence[str]
    """What counters and traces call the source; several names if drafts come from several places."""
    from_worker: bool = False
    """Whether vLLM's worker proposes the drafts, after each decode step that wants some."""
    wants_proposals: bool = True
    """Whether the worker is to propose behind the next decode step."""
    planner: Planner | None = None
    """What cuts the drafts by step times; None: fixed rules do."""
    decision: Decision | None = None
    """What the planner decided for the next decode step; None without a planner."""

    def plan_by(self, predictor: Predictor) -> None:
        """Make a planner, which cuts the drafts from the next decode step on, if the source can be planned."""

    def start(
        self, request_id: str, prompt_key: str | None, tokens: Sequence[int], prompt_tokens: int, most_tokens: int,
        window: int | None = None,
    ) -> None:  # fmt: skip
        """Begin a sample with the text `tokens`, of which the first `prompt_tokens` are its prompt.

        `prompt_key` names the prompt; `most_tokens`: prompt and response together have no more in the end; `window`:
        the sample's window if it ran elsewhere before. Raises ValueError if the request has started already.
        """

    def append(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Note the tokens that a decode step sampled for each of these requests; those that finished are passed by."""

    def append_flat(self, requests: Sequence[str], counts: Int64s, tokens: Int32s) -> None:
        """Do the same for the tokens of all requests in one array; `counts`: how many each sampled."""
        self.append(requests, core.split(tokens, counts))

    def proposed(self, requests: Sequence[str], drafts: Sequence[list[int]]) -> None:
        """Note what vLLM's worker proposes for the next decode step."""

    def prepare(self, requests: Sequence[str], context: int, most: int) -> None:
        """Do what needs no tokens of `draft` with the same arguments, while the tokens are waited for."""

    def draft(self, requests: Sequence[str], context: int = 0, most: int | None = None) -> list[list[int]]:
        """Return the draft tokens to verify in the next decode step, for each request.

        `context`: the tokens of all requests; `most`: the draft tokens that fit into the step. Raises KeyError for a
        request that has not started.
        """
        raise NotImplementedError

    def draft_flat(self, requests: Sequence[str], context: int = 0, most: int | None = None) -> Cut:
        """Return the same with the tokens of all drafts in one array."""
        lengths, flat = core.flatten(self.draft(requests, context, most))
        return Cut(lengths, flat)

    def computing(self) -> None:
        """Do what delays no decode step, while its forward pass runs. Each step needs this call, after its drafts."""
        if self.planner is not None:
            self.planner.computing()

    def took(self, passes: bool, running: int, seconds: float) -> None:
        """Note the `seconds` of a step of `running` samples, behind which the worker proposed (`passes`) or did not."""

    def policy_updated(self) -> None:
        """Count what was accepted before less, because the engine has new weights."""
        if self.planner is not None:
            self.planner.policy_updated()

    def leave_out(self) -> None:
        """Note that the next decode step has no drafts."""
        self.decision = None

    def verified(self, drafts: Verified) -> Attribution:
        """Learn what became of the last drafts, and return where they came from: from the first of `names`."""
        count = len(drafts.requests)
        return Attribution(np.zeros(count, np.int64), np.full(count, -1), [int(drafts.accepted.sum())])

    def window(self, request_id: str) -> int | None:
        """Return the size of a sample's window, which goes with the sample to another engine; None if it has none."""
        return None

    def finish(self, request_id: str) -> None:
        """Forget a sample that ended, was aborted or moves away. Raises KeyError for one that has not started."""

    def install(self, prompt_key: str, buffer: Any) -> None:
        """Draft for this prompt from a draft index, if the source uses any."""

    def forget(self, prompt_key: str) -> None:
        """Drop the prompt's draft index, if there is one."""


class Fates(NamedTuple):
    """Outcomes of proposals: their samples' recent acceptance before them (thousandths), tokens that can be judged,
    and how many of those were right before the first wrong one."""

    recents: list[int]
    judged: list[int]
    right: list[int]


class ProposalPlanner(Planner):
    """The decisions of one engine on drafts of bare tokens."""

    _acceptance: PositionAcceptance

    def __init__(self, predictor: Predictor, tokens: int) -> None:
        """`predictor`: of this engine's steps; `tokens`: the most that is proposed for a sample."""
        super().__init__(predictor, PositionAcceptance(tokens))

    def cut(
        self, recents: Sequence[int], lengths: Sequence[int], running: int, context: int, most: int
    ) -> tuple[list[int], Decision]:
        """Return how many tokens of each proposed draft to verify in a step of `running` samples, and why.

        For each draft its sample's recent acceptance (thousandths) and its length; `context` is the tokens of all
        running samples, `most` the draft tokens that the engine can take in one step.
        """
        proposed = sum(lengths)
        if not proposed:
            return list(lengths), Decision(running, context, 0, 0.0, self.predictor.step_seconds(running, context, 0))
        seconds = self.predictor.step_table(running, context, max(min(proposed, most), 0))
        without = float(seconds[0])
        seconds[0] /= LEAST_GAIN
        tried = self._tries.tokens(running, seconds.size - 1)
        likelihoods, sizes = self._acceptance.likelihoods(np.array(recents, np.int64)), np.array(lengths, np.int64)
        flat = likelihoods[np.arange(likelihoods.shape[1]) < sizes[:, None]]
        taken, drafts, expected = choose(flat, sizes, seconds, running, tried)
        self._tries.decided(proposed, drafts)
        taking = float(seconds[drafts]) if drafts else without
        return taken.tolist(), Decision(running, context, drafts, expected, taking)

    def learn(self, fates: Fates) -> None:
        """Learn what became of the drafts of one step."""
        recents, judged, right = (np.array(one, np.int64) for one in fates)
        self._acceptance.learn(recents, judged, right)
        self.learnt(sum(fates.judged))


class Proposals(DraftSource):
    """A source of bare tokens; a class of its own gives `propose`."""

    planner: ProposalPlanner | None = None

    def __init__(self, name: str, tokens: int) -> None:
        """`name`: of the source; `tokens`: the most that it proposes for a sample."""
        self.names = (name,)
        self._tokens = tokens
        # How each sample's proposals fared lately, in thousandths; and tokens that its text has room for.
        self._recents: dict[str, int] = {}
        self._room: dict[str, int] = {}
        # Of each sample the last proposal, until it can be judged, and how many tokens of it are verified.
        self._waiting: dict[str, tuple[list[int], int]] = {}
        # What became of proposals since something was learnt last.
        self._fates = Fates([], [], [])

    def propose(self, requests: Sequence[str]) -> list[list[int]]:
        """Return the tokens proposed for each of these samples."""
        raise NotImplementedError

    def plan_by(self, predictor: Predictor) -> None:
        self.planner = ProposalPlanner(predictor, self._tokens)

    def start(
        self, request_id: str, prompt_key: str | None, tokens: Sequence[int], prompt_tokens: int, most_tokens: int,
        window: int | None = None,
    ) -> None:  # fmt: skip
        if request_id in self._recents:
            raise ValueError(f"request {request_id} has started already")
        self._recents[request_id] = FIRST_RECENT
        self._room[request_id] = most_tokens - len(tokens)

    def finish(self, request_id: str) -> None:
        del self._recents[request_id], self._room[request_id]
        self._waiting.pop(request_id, None)

    def append(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Note new tokens, and judge the samples' last proposals by them."""
        for request_id, new in zip(requests, tokens, strict=True):
            if new and request_id in self._room:
                self._room[request_id] -= len(new)
                if (waiting := self._waiting.pop(request_id, None)) is not None:
                    self._judge(request_id, *waiting, new)

    def draft(self, requests: Sequence[str], context: int = 0, most: int | None = None) -> list[list[int]]:
        self.decision = None
        proposals = self.propose(requests)
        lengths = self._lengths(requests, proposals)
        room = sum(lengths) if most is None else most
        if self.planner is None:
            return [tokens[:length] for tokens, length in zip(proposals, share(lengths, room), strict=True)]
        if not requests:
            return []
        if self._fates.judged:
            self.planner.learn(self.take_fates())
        recents = [self._recents[request_id] for request_id in requests]
        lengths, self.decision = self.planner.cut(recents, lengths, len(requests), context, room)
        self.await_outcome(requests, proposals, lengths)
        return [tokens[:length] for tokens, length in zip(proposals, lengths, strict=True)]

    def offered(self, requests: Sequence[str]) -> list[list[int]]:
        """Return the proposals for these samples, cut to the room that each has."""
        proposals = self.propose(requests)
        return [tokens[:length] for tokens, length in zip(proposals, self._lengths(requests, proposals), strict=True)]

    def await_outcome(self, requests: Sequence[str], proposals: Sequence[list[int]], lengths: Sequence[int]) -> None:
        """Judge these proposals by the next tokens; `lengths`: how much of each is verified."""
        waiting = zip(requests, proposals, lengths, strict=True)
        self._waiting = {request_id: (tokens, length) for request_id, tokens, length in waiting if tokens}

    def recent(self, request_id: str) -> int:
        """Return how a sample's proposals fared lately, in thousandths."""
        return self._recents[request_id]

    def take_fates(self) -> Fates:
        """Return what became of proposals since the last call."""
        fates, self._fates = self._fates, Fates([], [], [])
        return fates

    def _lengths(self, requests: Sequence[str], proposals: Sequence[list[int]]) -> list[int]:
        # A draft of n yields up to n + 1 tokens.
        return [
            max(min(len(tokens), self._room[request_id] - 1), 0)
            for request_id, tokens in zip(requests, proposals, strict=True)
        ]

    def leave_out(self) -> None:
        self._waiting.clear()
        self.decision = None

    def _judge(self, request_id: str, tokens: list[int], verified: int, text: Sequence[int]) -> None:
        """Note how many of the `tokens` proposed were right, by the `text` that was sampled in their place."""
        new = text[: min(verified + 1, len(tokens))]
        right = 0
        while right < len(new) and new[right] == tokens[right]:
            right += 1
        recent = self._recents[request_id]
        fates = self._fates
        fates.recents.append(recent)
        fates.judged.append(len(new))
        fates.right.append(right)
        self._recents[request_id] = recent + (1000 * right // len(new) - recent) // RECENT_SHARE


class WorkerProposals(Proposals):
    """Proposals of vLLM's own methods, made in the worker after each decode step."""

    from_worker = True

    def __init__(self, name: str, tokens: int) -> None:
        super().__init__(name, tokens)
        self._proposed: dict[str, list[int]] = {}

    def proposed(self, requests: Sequence[str], drafts: Sequence[list[int]]) -> None:
        self._proposed = dict(zip(requests, drafts, strict=True))

    def propose(self, requests: Sequence[str]) -> list[list[int]]:
        return [self._proposed[request_id] for request_id in requests]
