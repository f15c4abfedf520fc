"""The source "history": drafts for names of requests, as lists of tokens.

Drafts come from the history of the sample's prompt, its siblings, its own text so far, and what all prompts share.
Siblings are the other samples of that prompt on this engine, while they are generated. A sample drafts from the source
of which most tokens are expected to be accepted, by what was verified of each source before. The compiled core
(csrc/drafter.h) holds the texts and drafts; this module keeps the names, and has a planner decide how much of the
drafts is verified.

Invariants:
- A sample drafts from history as soon as its prompt's index is installed, whether that is before or after its start,
  and no more when the index is forgotten. Indexes live until the caller forgets them.
- A draft is never longer than the room the caller gives and the largest window. A draft from history is longer than the
  sample's own window only as far as its confidence is high enough: the estimated probability that all of it is right.
- Beside the lookup of the prefix and the children at a branch, a draft costs time in proportion to the window only,
  however many samples, prompts and tokens there are.
- With a planner a draft is as long as there is room and hope, and the planner cuts the drafts of a step together. It
  needs no window, because its acceptance model knows the sample's recent acceptance.
- What was verified of a draft may be less than was proposed.
- A request without a prompt key is a request like all others; its drafts are empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.drafting.planner import Cut, DraftPlanner, Drafts
from rhyme_openrlhf.drafting.source import Attribution, DraftSource, Int32s, Int64s, Verified
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.history.index import DraftIndex
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.telemetry.draft_sources import CORE

# Sources of drafts, as the core numbers them (csrc/texts.h).
NO_SOURCE, FROM_HISTORY, FROM_SIBLINGS, FROM_OWN, FROM_SHARED, FROM_EARLIER = range(6)
SOURCE_NAMES = ("", *(source.name for source in CORE))
# The sample of a request that never drafts, as the core knows it.
NEVER = -1


class HistoryDrafter(DraftSource):
    """Drafts for all samples of one engine (RhymeRL, sections 5.2 to 5.4)."""

    names = SOURCE_NAMES
    planner: DraftPlanner | None = None

    def __init__(self, settings: HistoSpecSettings) -> None:
        """Raises CoreMissing where the compiled core was not built."""
        self._settings = settings
        # Of each request, NEVER or its sample in the core.
        self._samples: dict[str, int] = {}
        # Those of the last step, which the next one mostly asks for again: looking up hundreds takes a twentieth of it.
        self._last: tuple[list[str], Int64s] = [], np.empty(0, np.int64)
        self._core = core.Drafter(
            longest=settings.prefix_max, shortest=settings.prefix_min, siblings=settings.siblings,
            own_output=settings.own_output, window_start=settings.window_start, window_step=settings.window_step,
            window_max=settings.window_max, extend_confidence=settings.extend_confidence,
            stop_confidence=settings.stop_confidence, shared_tokens=settings.shared_tokens,
        )  # fmt: skip

    def plan_by(self, predictor: Predictor) -> None:
        """Make a planner; the fixed rules cut nothing any more."""
        self.planner = DraftPlanner(predictor, len(self.names))

    def install(self, prompt_key: str, buffer: Any) -> None:
        """Draft for this prompt from `buffer` (made by `build_index`), which must not change from now on.

        Replaces the prompt's earlier index. Raises IndexBufferError for a bad buffer, and then keeps the earlier one.
        """
        self._core.install(prompt_key, DraftIndex.from_buffer(buffer).compiled)

    def forget(self, prompt_key: str) -> None:
        """Drop the prompt's index, if there is one; its running samples go on without drafts from it."""
        self._core.forget(prompt_key)

    def start(
        self, request_id: str, prompt_key: str | None, tokens: Sequence[int], prompt_tokens: int, most_tokens: int,
        window: int | None = None,
    ) -> None:  # fmt: skip
        """Begin a sample with the text `tokens`, of which the first `prompt_tokens` are its prompt.

        `prompt_key` None: it never drafts. `most_tokens`: prompt and response together have no more in the end;
        `window`: its window if it ran elsewhere before. Raises ValueError if the request has started already, or for an
        impossible `window`.
        """
        if request_id in self._samples:
            raise ValueError(f"request {request_id} has started already")
        first = SpeculationWindow(self._settings, window).size
        sample = NEVER
        if prompt_key is not None:
            sample = self._core.start(prompt_key, np.array(tokens, np.int32), prompt_tokens, most_tokens, first)
        self._samples[request_id] = sample

    def append(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Add what each of these requests has written. Requests that have finished are passed by."""
        self.append_flat(requests, *core.flatten(tokens))

    def append_flat(self, requests: Sequence[str], counts: Int64s, tokens: Int32s) -> None:
        names, samples = self._last
        if requests != names:
            found = map(self._samples.get, requests, itertools.repeat(NEVER))
            samples = np.fromiter(found, np.int64, len(requests))
        self._core.append(samples, counts, tokens)

    def prepare(self, requests: Sequence[str], context: int, most: int) -> None:
        samples = self._samples_of(requests)
        if self.planner is not None:
            self.planner.prepare(len(samples), context, most)

    def draft(self, requests: Sequence[str], context: int = 0, most: int | None = None) -> list[list[int]]:
        """Return the draft tokens to verify in the next decode step, for each request, as `draft_flat`."""
        return self.draft_flat(requests, context, most).tokens()

    def draft_flat(self, requests: Sequence[str], context: int = 0, most: int | None = None) -> Cut:
        """Return the draft tokens to verify in the next decode step, for each request.

        `most`: the draft tokens that fit into the step; a planner is also told `context`, the tokens of all requests.
        Raises KeyError for a request that has not started.
        """
        self.leave_out()
        samples = self._samples_of(requests)
        drafts = self.propose(samples, whole=self.planner is not None)
        most = drafts.flat.size if most is None else most
        if self.planner is None:
            return drafts.within(most)
        cut, self.decision = self.planner.cut(drafts, len(samples), context, most)
        return cut

    def propose(self, samples: Int64s, whole: bool) -> Drafts:
        """Draft for these samples of the core by the fixed rules, or, `whole`, as far as there is any hope."""
        return Drafts(*self._core.draft(samples, whole))

    def drafts_of(self, requests: Sequence[str], whole: bool) -> Drafts:
        """Return the drafts of these requests, as `propose`. Raises KeyError for a request that has not started."""
        return self.propose(self._samples_of(requests), whole)

    def computing(self) -> None:
        super().computing()
        self._core.computing()

    def verified(self, drafts: Verified) -> Attribution:
        """Note the tokens verified of each request's last draft, and how many of them were accepted.

        Raises KeyError for a request that has not started, ValueError unless 0 <= accepted <= drafted and 1 <= drafted.
        """
        names, samples = self._last
        if drafts.requests != names:
            samples = self._found(drafts.requests)
        sources, numbers, by_source = self._core.verified(samples, drafts.drafted, drafts.accepted)
        if self.planner is not None:
            self.planner.learn(numbers, drafts.drafted, drafts.accepted)
        return Attribution(sources, numbers, by_source.tolist())

    def window(self, request_id: str) -> int:
        """Return the size of a sample's window. Raises KeyError as `finish`."""
        sample = self._sample_of(request_id)
        return self._settings.window_start if sample == NEVER else self._core.window(sample)

    def finish(self, request_id: str) -> None:
        """Forget a sample that ended, was aborted or moves away. Raises KeyError for a request that has not started."""
        sample = self._sample_of(request_id)
        del self._samples[request_id]
        self._last = [], self._last[1][:0]
        if sample != NEVER:
            self._core.finish(sample)

    def memory_bytes(self) -> int:
        """Return the bytes of all texts and tables (indexes not counted: they are mapped)."""
        return self._core.memory_bytes

    def _samples_of(self, requests: Sequence[str]) -> Int64s:
        names, samples = self._last
        if requests != names:
            samples = self._found(requests)
            self._last = list(requests), samples
        return samples

    def _found(self, requests: Sequence[str]) -> Int64s:
        try:
            return np.fromiter(map(self._samples.__getitem__, requests), np.int64, len(requests))
        except KeyError as error:
            raise _unknown(error.args[0]) from None

    def _sample_of(self, request: str) -> int:
        try:
            return self._samples[request]
        except KeyError:
            raise _unknown(request) from None


def _unknown(request: str) -> KeyError:
    return KeyError(f"request {request} has not started, or has finished")
