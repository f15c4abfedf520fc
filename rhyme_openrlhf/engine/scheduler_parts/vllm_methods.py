"""vLLM scheduler plug-in for drafts of vLLM's own methods: ngram, draft model, EAGLE (`--drafting.source`).

The worker proposes after each step, as vLLM has it; between two steps the budget takes of every sample's proposal as
much as is worth it. While drafts are left out to measure what they gain, nothing is proposed either: the draft model
then only keeps its KV cache up to date, which is vLLM's own way of a step with no speculative tokens.

Where planning takes too much of a step a plan holds for some (drafting/replanning.py). Where nothing was
worth it for long, nothing is proposed meanwhile.

Invariants: a draft only ever proposes, vLLM's rejection sampler decides; scheduling is synchronous, so that proposals
come through the scheduler. Checked against vLLM 0.29.0 `v1/core/sched/scheduler.py` (num_spec_tokens_to_schedule) and
`v1/spec_decode/llm_base_proposer.py` (K = 0).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from rhyme_openrlhf.drafting.drafter import NO_SOURCE
from rhyme_openrlhf.drafting.gain import GainMeter
from rhyme_openrlhf.drafting.replanning import PlanTurns
from rhyme_openrlhf.drafting.vllm_methods import ProposalDrafter, ProposalPlanner, Proposed
from rhyme_openrlhf.engine.scheduler import HistoryScheduler
from rhyme_openrlhf.latency.predictor import Predictor

# The first step behind an interval without drafts has none to verify: nothing was proposed in the step before it.
SETTLING_STEPS = 1


class ProposalScheduler(HistoryScheduler):
    """Cuts what the worker proposes."""

    CALLABLE = tuple(
        name for name in HistoryScheduler.CALLABLE if name not in ("install_history", "forget_history")
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = GainMeter(self.drafting.probe_share, SETTLING_STEPS)
        self.source_names = {NO_SOURCE: self.drafting.source}
        self._proposed: dict[str, list[int]] = {}
        self._turns = PlanTurns()
        # Whether the next step goes by a plan that holds, and whether that needs proposals.
        self._holds = False
        self._proposes = True

    def make_drafter(self) -> Any:
        """What cuts drafts."""
        return _Drafter()

    def make_planner(self, predictor: Predictor) -> Any:
        """What cuts them by step times."""
        return ProposalPlanner(predictor, self.num_spec_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        # The step that is planned next has proposals to judge.
        unproposed = self._holds and not self._proposes and self._turns.goes_on
        if unproposed or (self._scheduled is not None and not self._scheduled.drafts):
            output.num_spec_tokens_to_schedule = 0
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Keep of each proposal what the budget takes."""
        started = time.perf_counter()
        held, self._holds = self._holds, self.forced_drafts is None and self._turns.holds(len(self.running))
        if self._holds:
            if not held:
                self._proposes = self.drafter.hold()
            self._draft_held(started, draft_token_ids)
            self.meter.add_draft_seconds(time.perf_counter() - started)
            return
        self._proposed = dict(zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True))
        super().update_draft_token_ids(draft_token_ids)
        decided = self.drafter.decision
        if decided is not None:
            # The first steps need plans of their own, and so do those that measure the gain.
            most = self.gain.far_steps() if self.planner.settled else 0
            self._turns.planned(time.perf_counter() - started, decided.seconds, most)

    def _draft_held(self, now: float, proposed: Any) -> None:
        """By the plan that holds."""
        self.gain.pass_by()
        if (step := self._clock.planned(now)) is not None:
            self.planner.took(*step)
        if not self._proposes:
            return
        requests, running, waiting = self.requests, RequestStatus.RUNNING, self.drafter.waiting
        decoding, asked = [], []
        for request_id, tokens in zip(proposed.req_ids, proposed.draft_token_ids, strict=True):
            # Often more than half of the samples: there is nothing to draft, and nothing to judge.
            if not tokens and request_id not in waiting:
                continue
            request = requests.get(request_id)
            if request is None or request.status is not running or request.is_prefill_chunk:
                continue
            decoding.append(request)
            asked.append(Proposed(request_id, tokens, request._all_token_ids))
        drafts = self.drafter.draft_held(asked, len(proposed.req_ids), self.most_drafts())
        for number, request in enumerate(decoding):
            if drafts[number] and request.structured_output_request is not None:
                drafts[number] = self._grammatical(request, drafts[number])
        self.set_drafts(decoding, drafts)

    def is_timed(self) -> bool:
        """As its base, but only some of the steps by a plan that holds."""
        return (not self._holds or self._turns.times) and super().is_timed()

    def on_sampled(self, names: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Nothing: what is proposed is judged by vLLM's own texts."""

    def _drafts(self, decoding: list[Any]) -> list[list[int]]:
        if self._ticket is not None and not self._ticket.drafts:
            self.drafter.leave_out()
            return [[]] * len(decoding)
        running = [
            # vLLM's own list: `all_token_ids` is a view of it, and asking it costs a call more for each sample.
            Proposed(request.request_id, self._proposed[request.request_id], request._all_token_ids)
            for request in decoding
        ]
        context = sum(request.num_computed_tokens for request in decoding) if self.planner is not None else 0
        drafts: list[list[int]] = self.drafter.draft(running, context, self.most_drafts())
        return drafts


class _Drafter(ProposalDrafter):
    """As HistoryScheduler starts a sample: its prompt and window say nothing here."""

    def start(self, request_id: str, key: Any, text: Any, prompt_tokens: int, most_tokens: int, window: Any) -> None:  # type: ignore[override]
        super().start(request_id, most_tokens)
