"""A patch: the output of a request that ran elsewhere begins with what it generated there.

vLLM's frontend keeps, for each request, a detokenizer (which also looks for stop strings) and its log-probabilities.
Here they are filled before the engine hears of the request. So text, tokens, log-probabilities, and stop strings across
the seam come out as if the request had always been here, and nothing needs stitching.
Checked against vLLM 0.29.0 `v1/engine/output_processor.py`; contract test: `tests/rollout/moves/test_contracts.py`.

Invariant: only requests that were announced by `expect` are touched.
"""

from __future__ import annotations

import copy
from typing import Any

from rhyme_openrlhf.rollout.moves.travel import Progress


class ResumedOutputs:
    """Wraps `add_request` of one vLLM AsyncLLM's output processor."""

    def __init__(self, llm: Any) -> None:
        self._processor = llm.output_processor
        self._add = self._processor.add_request
        self._processor.add_request = self._add_request
        self._expected: dict[str, Progress] = {}

    def expect(self, request_id: str, progress: Progress) -> None:
        """The next request of this (external) id goes on from `progress`."""
        self._expected[request_id] = progress

    def state(self, request_id: str) -> Any:
        """What the frontend keeps of the unfinished request with this (external) id, or None."""
        internal = self._processor.external_req_ids.get(request_id)
        return self._processor.request_states.get(internal[0]) if internal else None

    def name_of(self, request_id: str) -> str:
        """The (external) id of the unfinished request that vLLM calls `request_id`, "" if there is none."""
        state = self._processor.request_states.get(request_id)
        return "" if state is None else str(state.external_req_id)

    def _add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._add(request, *args, **kwargs)
        progress = self._expected.pop(request.external_req_id, None)
        if progress is not None:
            fill(self._processor.request_states[request.request_id], progress)


def fill(state: Any, progress: Progress) -> None:
    """Bring the frontend's state of a new request to where `progress` is."""
    # Whether a stop string was there is known: the sample would not have gone on.
    state.detokenizer.update(list(progress.tokens), False)
    if progress.log_probs is not None and state.logprobs_processor.logprobs is not None:
        known = copy.copy(progress.log_probs)
        state.logprobs_processor.logprobs = known
        state.logprobs_processor.cumulative_logprob = sum(
            at[token].logprob for at, token in zip(known, progress.tokens, strict=True)
        )


def generated(state: Any, first: int = 0) -> tuple[tuple[int, ...], Any]:
    """Response tokens from number `first` on, as far as the frontend has heard of them, and their log-probabilities."""
    log_probs = state.logprobs_processor.logprobs
    return tuple(state.detokenizer.output_token_ids[first:]), None if log_probs is None else log_probs[first:]
