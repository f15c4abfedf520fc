"""A source of drafts, as the scheduler sees it: one protocol for history and for vLLM's own methods.

A new source is a subclass and an entry in `SOURCES` (engine/scheduler_parts/drafting.py). A source that
proposes bare tokens extends `Proposals` (proposals.py), which plans, cuts and learns, and only says what it proposes.

Invariants: a source proposes and vLLM's rejection sampler decides; samples are known by their request's name; one
caller at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting.planner import Decision, Planner
from rhyme_openrlhf.latency.predictor import Predictor

Int64s = NDArray[np.int64]


class Verified(NamedTuple):
    """Drafts that a step verified: the requests, tokens verified of each (one at least), and tokens accepted."""

    requests: list[str]
    drafted: list[int]
    accepted: list[int]


class Attribution(NamedTuple):
    """Where verified drafts came from.

    Each draft's source; its number in the last step, -1 if an earlier step drafted it; and the accepted tokens by
    source. Sources are numbered as in `DraftSource.names`.
    """

    sources: list[int]
    numbers: Int64s
    accepted: list[int]


class DraftSource:
    """What drafts for all samples of one engine; `draft` is all that every source has to say."""

    names: Sequence[str]
    """What counters and traces call the source; several names if drafts come from several places."""
    from_worker: bool = False
    """Whether vLLM's worker proposes the drafts, after each decode step that wants some."""
    planner: Planner[Any] | None = None
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

    def proposed(self, requests: Sequence[str], drafts: Sequence[list[int]]) -> None:
        """Note what vLLM's worker proposes for the next decode step."""

    def draft(self, requests: Sequence[str], context: int = 0, most: int | None = None) -> list[list[int]]:
        """Return the draft tokens to verify in the next decode step, for each request.

        `context`: the tokens of all requests; `most`: the draft tokens that fit into the step. Raises KeyError for a
        request that has not started.
        """
        raise NotImplementedError

    def leave_out(self) -> None:
        """Note that the next decode step has no drafts."""
        self.decision = None

    def verified(self, drafts: Verified) -> Attribution:
        """Learn what became of the last drafts, and return where they came from: from the first of `names`."""
        count = len(drafts.requests)
        return Attribution([0] * count, np.full(count, -1), [sum(drafts.accepted)])

    def window(self, request_id: str) -> int | None:
        """Return the size of a sample's window, which goes with the sample to another engine; None if it has none."""
        return None

    def finish(self, request_id: str) -> None:
        """Forget a sample that ended, was aborted or moves away. Raises KeyError for one that has not started."""

    def install(self, prompt_key: str, buffer: Any) -> None:
        """Draft for this prompt from a draft index, if the source uses any."""

    def forget(self, prompt_key: str) -> None:
        """Drop the prompt's draft index, if there is one."""
