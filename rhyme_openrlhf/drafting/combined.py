"""The sources "history+draft_model" and "history+eagle3": each sample drafts from history or from a model beside it.

History drafts for all samples between two steps. The model's proposals come from vLLM's worker, made in passes at the
end of the step before. For each sample the draft is taken that is expected to yield more. A draft's yield is the sum of
its tokens' acceptance probabilities, less the price of verifying them. Both kinds of drafts learn their acceptance
(`AcceptanceModel`, `PositionAcceptance`). One budget cuts the drafts of all samples together. Without step times a
token has no price and drafts keep their own lengths: history's window, and the model's `tokens`.

vLLM runs the model's passes for all samples of a step or for none; a single pass always keeps its KV cache up to date.
So passes are a decision on whole steps (`PassRule`):
- History serves a sample if its draft is expected to yield no less than the model's would.
- The passes are skipped where history serves all samples.
- Otherwise they run where they give more tokens per second, by the times of steps with and without them.

A step's decision is made one step ahead, by the drafts of that step, because the next tokens are not known yet.

Invariants:
- A source proposes, and vLLM's rejection sampler decides. A draft is only ever cut.
- A sample's draft has one source. The first token of an unused draft is judged by the sampled one, so neither kind is
  forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting.acceptance import AcceptanceModel, PositionAcceptance
from rhyme_openrlhf.drafting.budget import choose, share
from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES, HistoryDrafter
from rhyme_openrlhf.drafting.planner import REFIT_TOKENS, Decision, Drafts, Planner
from rhyme_openrlhf.drafting.source import Attribution, DraftSource, Int64s, Verified, WorkerProposals
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

Floats = NDArray[np.float32]

# The rule needs this many steps of a kind before it uses their times. After TRIED_AFTER steps of one kind it tries the
# other again, in about a hundredth of the steps, in which load and acceptance change little.
FEWEST_STEPS, TRIED_AFTER = 8, 64
# Weight of a step in the mean time of its kind: the last 20 or so count.
STEP_SHARE = 0.05


class BothAcceptances:
    """Acceptance of drafts from history and of drafts from the model."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: the most that the model proposes for a sample."""
        self.history = AcceptanceModel(len(SOURCE_NAMES))
        self.model = PositionAcceptance(tokens)

    def forget(self) -> None:
        """Halve what was seen of both: the policy was updated."""
        self.history.forget()
        self.model.forget()

    def refit(self) -> None:
        """Make both tables anew from what was seen."""
        self.history.refit()
        self.model.refit()


class CombinedPlanner(Planner):
    """The decisions of one engine on drafts of both kinds."""

    def price(self, running: int, context: int, most: int) -> tuple[NDArray[np.float64], float]:
        """Return step seconds with 0 to `most` draft tokens, and the price of a draft token in tokens."""
        seconds = self.predictor.step_table(running, context, most)
        a_token = (float(seconds[-1]) - float(seconds[0])) / max(most, 1)
        return seconds, max(a_token, 0.0) * running / float(seconds[0])

    def cut(
        self, likely: Floats, lengths: Int64s, seconds: NDArray[np.float64], running: int, context: int
    ) -> tuple[Int64s, Decision]:
        """Return how many tokens of each draft to verify in a step of `running` samples, and why.

        `likely`: one draft after the other, the probability that a token is accepted if those before it are.
        """
        tried = self._tries.tokens(running, seconds.size - 1)
        taken, drafts, expected = choose(likely, lengths, seconds, running, tried)
        self._tries.decided(int(lengths.sum()), drafts)
        return taken, Decision(running, context, drafts, expected, float(seconds[drafts]))


class PassRule:
    """The decision whether the model's passes run in the next step, by yield and by times with and without them."""

    def __init__(self, timed: bool) -> None:
        """`timed`: compare step times; else the passes run wherever history does not serve all samples."""
        self._timed = timed
        # By class of batch size, for steps without and with passes: mean seconds, and steps seen.
        self._seconds: dict[int, tuple[list[float], list[int]]] = {}
        # Steps since the other kind was tried, by class.
        self._same: dict[int, int] = {}

    def took(self, passes: bool, running: int, seconds: float) -> None:
        """Note a step of `running` samples, with passes or without."""
        means, seen = self._seconds.setdefault(running.bit_length(), ([0.0, 0.0], [0, 0]))
        seen[passes] += 1
        # The mean of all steps at first, then of the recent ones.
        means[passes] += (seconds - means[passes]) * max(STEP_SHARE, 1 / seen[passes])

    def runs(self, running: int, otherwise: float, more: float) -> bool:
        """Return whether passes run, for `running` samples of which history does not serve all.

        `otherwise`: accepted tokens to expect without the model; `more`: further ones with it.
        """
        if not self._timed:
            return True
        size = running.bit_length()
        means, seen = self._seconds.get(size, ([0.0, 0.0], [0, 0]))
        if seen[True] < FEWEST_STEPS or seen[False] < FEWEST_STEPS:
            return seen[True] < FEWEST_STEPS
        tokens = running + otherwise
        better = (tokens + more) * means[False] > tokens * means[True]
        self._same[size] = self._same.get(size, 0) + 1
        if self._same[size] > TRIED_AFTER:
            self._same[size] = 0
            return not better
        return better


class HistoryAndModel(DraftSource):
    """Drafts from history where it is expected to yield more, and from a model in vLLM's worker elsewhere."""

    from_worker = True
    planner: CombinedPlanner | None = None

    def __init__(self, settings: HistoSpecSettings, method: str, tokens: int, timed: bool = True) -> None:
        """`method`: of vLLM; `tokens`: the most that it proposes for a sample; `timed`: as in `PassRule`.

        Raises CoreMissing where the compiled core was not built.
        """
        self.names = (*SOURCE_NAMES, method)
        self._history, self._model = HistoryDrafter(settings), WorkerProposals(method, tokens)
        self._tokens = tokens
        self._acceptance = BothAcceptances(tokens)
        self._rule = PassRule(timed)
        # Tokens that were learnt from since the last refit, without a planner.
        self._learnt = 0
        # Of history's drafts of the last step: each token's cell, and each draft's length.
        self._cells = np.empty(0, np.int32)
        self._lengths: Int64s = np.empty(0, np.int64)
        # Requests whose last draft is the model's; and their first token from history, with its draft's number there.
        self._of_model: set[str] = set()
        self._unused: dict[str, tuple[int, int]] = {}

    def plan_by(self, predictor: Predictor) -> None:
        self.planner = CombinedPlanner(predictor, self._acceptance)

    def policy_updated(self) -> None:
        self._acceptance.forget()
        self._acceptance.refit()

    def start(
        self, request_id: str, prompt_key: str | None, tokens: Sequence[int], prompt_tokens: int, most_tokens: int,
        window: int | None = None,
    ) -> None:  # fmt: skip
        self._history.start(request_id, prompt_key, tokens, prompt_tokens, most_tokens, window)
        self._model.start(request_id, prompt_key, tokens, prompt_tokens, most_tokens)

    def append(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        self._history.append(requests, tokens)
        self._model.append(requests, tokens)
        if self._unused:
            self._judge_unused(requests, tokens)

    def proposed(self, requests: Sequence[str], drafts: Sequence[list[int]]) -> None:
        # Near the longest length vLLM runs no passes and gives every sample as many zeros as a draft may have.
        self._model.proposed(requests, [draft if len(draft) <= self._tokens else [] for draft in drafts])

    def draft(self, requests: Sequence[str], context: int = 0, most: int | None = None) -> list[list[int]]:
        self.decision = None
        if not requests:
            return []
        self._learn_of_proposals()
        running = len(requests)
        drafts = self._history.drafts_of(requests, whole=self.planner is not None)
        proposals = self._model.offered(requests)
        recents = np.array([self._model.recent(request) for request in requests], np.int64)
        hoped = self._acceptance.model.likelihoods(recents)
        likely, tokens, lengths = self._of_history(drafts)
        proposed, offered = core.flatten(proposals)
        room = int(np.maximum(lengths, proposed).sum()) if most is None else most
        seconds, price = np.zeros(1), 0.0
        if self.planner is not None:
            seconds, price = self.planner.price(running, context, min(int(np.maximum(lengths, proposed).sum()), room))
        by_history = worth(likely, lengths, price)
        by_model = worth(hoped, np.full(running, self._tokens), price)
        self._decide_passes(by_history, by_model)

        taken = (worth(hoped, proposed, price) > by_history) & (proposed > 0)
        unused = np.flatnonzero(taken & (lengths > 0)).tolist()
        self._unused = {requests[number]: (number, int(tokens[number, 0])) for number in unused}
        places = np.arange(likely.shape[1])
        mine = np.where(taken, proposed, 0)
        there = places < mine[:, None]
        tokens[there] = offered[np.repeat(taken, proposed)]
        likely[there] = hoped[there[:, : self._tokens]]
        lengths = np.where(taken, proposed, lengths)
        if self.planner is None:
            kept = share(lengths, room)
        else:
            flat = likely[places < lengths[:, None]]
            kept, self.decision = self.planner.cut(flat, lengths, seconds, running, context)
        self._note(requests, proposals, taken, kept)
        found: list[list[int]] = core.split(tokens[places < kept[:, None]], kept)
        return found

    def leave_out(self) -> None:
        self.decision = None
        self._unused = {}
        self._model.leave_out()

    def computing(self) -> None:
        super().computing()
        self._history.computing()

    def took(self, passes: bool, running: int, seconds: float) -> None:
        self._rule.took(passes, running, seconds)

    def verified(self, drafts: Verified) -> Attribution:
        model = len(self.names) - 1
        mine = [number for number, request in enumerate(drafts.requests) if request not in self._of_model]
        sources, numbers = np.full(len(drafts.requests), model), np.full(len(drafts.requests), -1)
        by_source = [0] * len(self.names)
        if mine:
            requests = [drafts.requests[number] for number in mine]
            of_history = Verified(requests, drafts.drafted[mine], drafts.accepted[mine])
            found = self._history.verified(of_history)
            self._learn_of_history(found.numbers, of_history)
            by_source[: len(found.accepted)] = found.accepted
            sources[mine] = found.sources
        by_source[model] = int(drafts.accepted.sum()) - sum(by_source)
        return Attribution(sources, numbers, by_source)

    def window(self, request_id: str) -> int:
        return self._history.window(request_id)

    def finish(self, request_id: str) -> None:
        self._history.finish(request_id)
        self._model.finish(request_id)
        self._of_model.discard(request_id)

    def install(self, prompt_key: str, buffer: Any) -> None:
        self._history.install(prompt_key, buffer)

    def forget(self, prompt_key: str) -> None:
        self._history.forget(prompt_key)

    def _of_history(self, drafts: Drafts) -> tuple[Floats, NDArray[np.int32], Int64s]:
        """Return acceptance and tokens of history's drafts, a row for each sample, and the drafts' lengths."""
        self._cells, flat = self._acceptance.history.estimate(drafts)
        self._lengths = drafts.lengths
        width = max(int(drafts.lengths.max(initial=0)), self._tokens)
        there = np.arange(width) < drafts.lengths[:, None]
        likely, tokens = np.zeros(there.shape, np.float32), np.zeros(there.shape, np.int32)
        likely[there], tokens[there] = flat, drafts.flat
        return likely, tokens, drafts.lengths.copy()

    def _decide_passes(self, by_history: Floats, by_model: Floats) -> None:
        more = float(np.maximum(by_model - by_history, 0).sum())
        self.wants_proposals = more > 0 and self._rule.runs(by_history.size, float(by_history.sum()), more)

    def _note(
        self, requests: Sequence[str], proposals: list[list[int]], taken: NDArray[np.bool_], kept: Int64s
    ) -> None:
        """Remember which drafts are the model's, and the proposals until they can be judged."""
        self._of_model.difference_update(requests)
        self._of_model.update(request for request, mine in zip(requests, taken, strict=True) if mine)
        self._model.await_outcome(requests, proposals, np.where(taken, kept, 0).tolist())

    def _learn_of_history(self, numbers: Int64s, drafts: Verified) -> None:
        learn = self._acceptance.history.learn
        self._refit_after(learn(self._cells, self._lengths, numbers, drafts.drafted, drafts.accepted))

    def _judge_unused(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        judged = [
            (*self._unused[name], new[0])
            for name, new in zip(requests, tokens, strict=True)
            if name in self._unused and new
        ]
        self._unused = {}
        numbers = np.array([number for number, _, _ in judged], np.int64)
        right = np.array([first == sampled for _, first, sampled in judged], np.int64)
        learn = self._acceptance.history.learn
        self._refit_after(learn(self._cells, self._lengths, numbers, np.ones_like(numbers), right))

    def _learn_of_proposals(self) -> None:
        recents, judged, right = (np.array(one, np.int64) for one in self._model.take_fates())
        if judged.size:
            self._acceptance.model.learn(recents, judged, right)
            self._refit_after(int(judged.sum()))

    def _refit_after(self, tokens: int) -> None:
        if self.planner is not None:
            self.planner.learnt(tokens)
            return
        self._learnt += tokens
        if self._learnt >= REFIT_TOKENS:
            self._learnt = 0
            self._acceptance.refit()


def worth(likely: Floats, lengths: Int64s, price: float) -> Floats:
    """Return the tokens that each draft is expected to yield, less the price of each token that is worth it.

    `likely`: float32[drafts, places], the probability that a token is accepted if those before it are; `lengths`: the
    tokens of each draft; `price`: of a draft token, in tokens.
    """
    there = np.arange(likely.shape[1]) < lengths[:, None]
    paths = np.cumprod(np.where(there, likely, 0), axis=1)
    total: Floats = np.maximum(paths - price, 0).sum(axis=1)
    return total
