"""What the inference engine's scheduler asks for drafts: indexes by prompt, windows by sample.

Two sources: the history of the sample's prompt, and the sample's own text so far. The one that matches more of the
sample's last tokens drafts; the history if both match as many, because rewards chose among its branches.

Invariants:
- A sample drafts from history as soon as its prompt's index is installed, whether that is before or after its start,
  and no more when the index is forgotten. Indexes live until the caller forgets them.
- A draft is never longer than the sample's window and the room the caller gives.
- No call gets slower with more samples or prompts; beside the lookup of the prefix and the children at a branch, a
  draft costs time in proportion to the window only.
- `drafted` and `accepted` count what the engine verified, which may be less than was proposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.index import Draft, DraftIndex, compile_lookup
from rhyme_openrlhf.speculation.own_output import OwnOutput
from rhyme_openrlhf.speculation.window import SpeculationWindow

NO_DRAFT = Draft([], 0)
# Where a draft comes from: earlier responses to the prompt, or the sample's own text so far.
HISTORY = "history"
OWN_TEXT = "own"


@dataclass(frozen=True)
class SampleSpeculation:
    """What speculation did for one sample: tokens drafted and accepted, number of drafts, window at the end."""

    drafted: int
    accepted: int
    drafts: int
    window: int


@dataclass
class DrafterCounters:
    """Totals since the drafter was made.

    Index lookups, lookups that found something, drafts from samples' own text; tokens drafted and accepted.
    """

    lookups: int = 0
    matches: int = 0
    own: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class _Sample:
    prompt_key: str | None
    window: SpeculationWindow
    own: OwnOutput | None
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    source: str = ""


class HistoryDrafter:
    """Drafts from history for all samples of one engine (RhymeRL, sections 5.2 to 5.4). One caller at a time."""

    def __init__(self, settings: HistoSpecSettings) -> None:
        """Compiles the lookup, or loads it from Numba's cache, so that no decode step waits for it."""
        self._settings = settings
        self._indexes: dict[str, DraftIndex] = {}
        self._samples: dict[str, _Sample] = {}
        self._counters = DrafterCounters()
        compile_lookup()
        OwnOutput(settings.prefix_min).extend([0])

    def install(self, prompt_key: str, buffer: Any) -> None:
        """Draft for this prompt from `buffer` (made by `build_index`), which must not change from now on.

        Replaces the prompt's earlier index. Raises IndexBufferError for a bad buffer, and then keeps the earlier one.
        """
        self._indexes[prompt_key] = DraftIndex.from_buffer(buffer)

    def forget(self, prompt_key: str) -> None:
        """Drop the prompt's index, if there is one; its running samples go on without drafts from it."""
        self._indexes.pop(prompt_key, None)

    def start(self, request_id: str, prompt_key: str | None, window: int | None = None) -> None:
        """A sample begins. `prompt_key` None: it never drafts. `window`: its window's size if it ran elsewhere before.

        Raises ValueError if the request has started already, or for an impossible `window`.
        """
        if request_id in self._samples:
            raise ValueError(f"request {request_id} has started already")
        own = OwnOutput(self._settings.prefix_min) if self._settings.own_output and prompt_key is not None else None
        self._samples[request_id] = _Sample(prompt_key, SpeculationWindow(self._settings, window), own)

    def draft(self, request_id: str, tokens: Sequence[int], room: int) -> list[int]:
        """Draft tokens to verify in the sample's next decode step; empty if there is no match or room.

        `tokens`: prompt and response so far, whole. `room`: most draft tokens the engine can take. Raises KeyError for
        a request that has not started.
        """
        sample = self._sample(request_id)
        limit = min(sample.window.size, room)
        if limit <= 0:
            return []
        drafted = self._from_history(sample, tokens, limit)
        if sample.own is not None:
            sample.own.extend(tokens[len(sample.own) :])
            if sample.own.match_length > drafted.match_length:
                self._counters.own += 1
                sample.source = OWN_TEXT
                return sample.own.draft(limit)
        sample.source = HISTORY
        return drafted.tokens

    def source(self, request_id: str) -> str:
        """Where the sample's last draft came from. Raises KeyError for a request that has not started."""
        return self._sample(request_id).source

    def _from_history(self, sample: _Sample, tokens: Sequence[int], limit: int) -> Draft:
        index = self._indexes.get(sample.prompt_key) if sample.prompt_key is not None else None
        if index is None:
            return NO_DRAFT
        last_tokens = tokens[-self._settings.prefix_max :]
        drafted = index.draft(last_tokens, self._settings.prefix_max, self._settings.prefix_min, limit)
        self._counters.lookups += 1
        self._counters.matches += bool(drafted.tokens)
        return drafted

    def record(self, request_id: str, drafted: int, accepted: int) -> None:
        """The engine verified `drafted` tokens of a draft and accepted the first `accepted` of them.

        Raises KeyError for a request that has not started, ValueError unless 0 <= accepted <= drafted.
        """
        sample = self._sample(request_id)
        sample.window.record(drafted, accepted)
        sample.drafted += drafted
        sample.accepted += accepted
        sample.drafts += drafted > 0
        self._counters.drafted += drafted
        self._counters.accepted += accepted

    def finish(self, request_id: str) -> SampleSpeculation:
        """A sample ended, was aborted or moves away. Raises KeyError for a request that has not started."""
        sample = self._sample(request_id)
        del self._samples[request_id]
        return SampleSpeculation(sample.drafted, sample.accepted, sample.drafts, sample.window.size)

    def counters(self) -> DrafterCounters:
        """A copy of the totals."""
        return dataclasses.replace(self._counters)

    def _sample(self, request_id: str) -> _Sample:
        try:
            return self._samples[request_id]
        except KeyError:
            raise KeyError(f"request {request_id} has not started, or has finished") from None
