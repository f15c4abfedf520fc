"""A patch: the output of a request that ran elsewhere begins with what it generated there.

vLLM's frontend keeps, for each request, a detokenizer (which also looks for stop strings) and its log-probabilities.
Here they are filled before the engine hears of the request. So text, tokens, log-probabilities, and stop strings across
the seam come out as if the request had always been here, and nothing needs stitching. Checked against vLLM 0.29.0 and
0.32.0 `v1/engine/output_processor.py`; contract test: `tests/engine/patches/test_contracts.py`.

After a handover (engine/actor_parts/moves.py), the engine core may generate before the earlier output is known here.
Its new output is held back and processed afterwards.

Invariant: only requests that were announced by `expect` or `hold` are touched.
"""

from __future__ import annotations

import copy
from typing import Any

from rhyme_openrlhf.engine.messages import Progress


class ResumedOutputs:
    """Wraps `add_request` and `process_outputs` of one vLLM AsyncLLM's output processor."""

    def __init__(self, llm: Any) -> None:
        self._processor = llm.output_processor
        self._add = self._processor.add_request
        self._processor.add_request = self._add_request
        self._expected: dict[str, Progress] = {}
        self._process = self._processor.process_outputs
        self._processor.process_outputs = self._process_outputs
        # What was held back, by vLLM's name of the request.
        self._announced: set[str] = set()
        self._held: dict[str, list[Any]] = {}

    def expect(self, request_id: str, progress: Progress) -> None:
        """Have the next request of this (external) id go on from `progress`."""
        self._expected[request_id] = progress

    def hold(self, request_id: str) -> None:
        """Hold back what is made of the next request of this (external) id until `release`."""
        self._announced.add(request_id)

    def release(self, request_id: str, progress: Progress) -> list[str]:
        """Give out what was held back, behind `progress`.

        Returns vLLM's names of requests that a stop string ends, which are to be aborted in the engine core.
        """
        state = self.state(request_id)
        if state is None:
            return []
        held = self._held.pop(state.request_id, [])
        fill(state, progress)
        ended: list[str] = self._process(held).reqs_to_abort
        return ended

    def _process_outputs(self, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        if self._held:
            for name in [name for name in self._held if name not in self._processor.request_states]:
                del self._held[name]
            for output in outputs:
                if output.request_id in self._held:
                    self._held[output.request_id].append(output)
            outputs = [output for output in outputs if output.request_id not in self._held]
        return self._process(outputs, *args, **kwargs)

    def state(self, request_id: str) -> Any:
        """Return what the frontend keeps of the unfinished request with this (external) id, or None."""
        internal = self._processor.external_req_ids.get(request_id)
        return self._processor.request_states.get(internal[0]) if internal else None

    def name_of(self, request_id: str) -> str:
        """Return the (external) id of the unfinished request that vLLM calls `request_id`, "" if there is none."""
        state = self._processor.request_states.get(request_id)
        return "" if state is None else str(state.external_req_id)

    def _add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._add(request, *args, **kwargs)
        if request.external_req_id in self._announced:
            self._announced.discard(request.external_req_id)
            self._held[request.request_id] = []
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
