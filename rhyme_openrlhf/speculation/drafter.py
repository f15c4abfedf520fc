"""What the inference engine's scheduler asks for drafts: indexes by prompt, windows by sample.

Three sources: the history of the sample's prompt, its siblings (the other samples of that prompt on this engine, while
they are generated), and its own text so far. The one that matches most of the sample's last tokens drafts; where they
match as many, history before siblings before own text.

Invariants:
- A sample drafts from history as soon as its prompt's index is installed, whether that is before or after its start,
  and no more when the index is forgotten. Indexes live until the caller forgets them.
- A draft is never longer than the room the caller gives and the largest window; and longer than the sample's own
  window only as far as its confidence, the estimated probability that all of it is right, is high enough.
- Beside the lookup of the prefix and the children at a branch, a draft costs time in proportion to the window only,
  however many samples, prompts and tokens there are.
- With a planner a draft is as long as there is room and hope, and the planner cuts those of a step together: a sample's
  window says how its last drafts fared, which the planner's acceptance model knows too.
- `drafted` and `accepted` count what the engine verified, which may be less than was proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.index import DraftIndex
from rhyme_openrlhf.speculation.draft_step import FROM_HISTORY, FROM_OWN, FROM_SIBLINGS, NO_SOURCE
from rhyme_openrlhf.speculation.live_texts import LiveTexts, compile_step
from rhyme_openrlhf.speculation.off_switch import OffSwitch
from rhyme_openrlhf.speculation.planner import Decision, DraftPlanner
from rhyme_openrlhf.speculation.window import SpeculationWindow

SOURCE_NAMES = {NO_SOURCE: "", FROM_HISTORY: "history", FROM_SIBLINGS: "siblings", FROM_OWN: "own"}


@dataclass(frozen=True)
class SampleSpeculation:
    """What speculation did for one sample: tokens drafted and accepted, number of drafts, window at the end."""

    drafted: int
    accepted: int
    drafts: int
    window: int


class Running(NamedTuple):
    """A sample that decodes: `tokens` are prompt and response so far, `room` the most draft tokens it can take."""

    request_id: str
    tokens: Sequence[int]
    room: int


class _Sample:
    __slots__ = ("accepted", "drafted", "drafts", "number", "row", "seen", "source", "window")

    def __init__(self, row: int | None, window: SpeculationWindow) -> None:
        """`row` None: a sample that never drafts."""
        self.row = row
        self.window = window
        self.seen = 0
        self.source = NO_SOURCE
        # Its draft's among those of the last step; -1: the step had none of it.
        self.number = -1
        self.drafted = self.accepted = self.drafts = 0


class HistoryDrafter:
    """Drafts for all samples of one engine (RhymeRL, sections 5.2 to 5.4). One caller at a time."""

    def __init__(self, settings: HistoSpecSettings) -> None:
        """Compiles a step, or loads it from Numba's cache, so that no decode step waits for it."""
        self._settings = settings
        self._samples: dict[str, _Sample] = {}
        compile_step()
        self._texts = LiveTexts(settings)
        self._switch = OffSwitch(settings.batch_limit_pairs())
        self._planner: DraftPlanner | None = None
        # Samples of the last step's drafts, by number; and what was verified of them since, if a planner asks.
        self._asked: list[_Sample] = []
        self._verified: list[tuple[_Sample, int, int]] = []
        self.decision: Decision | None = None
        """What the planner decided for the next step; None without a planner."""

    def plan_with(self, planner: DraftPlanner) -> None:
        """From the next step on `planner` cuts the drafts, in place of the fixed rules for it."""
        self._planner = planner

    def install(self, prompt_key: str, buffer: Any) -> None:
        """Draft for this prompt from `buffer` (made by `build_index`), which must not change from now on.

        Replaces the prompt's earlier index. Raises IndexBufferError for a bad buffer, and then keeps the earlier one.
        """
        self._texts.install(prompt_key, DraftIndex.from_buffer(buffer))

    def forget(self, prompt_key: str) -> None:
        """Drop the prompt's index, if there is one; its running samples go on without drafts from it."""
        self._texts.forget(prompt_key)

    def start(self, request_id: str, prompt_key: str | None, prompt_tokens: int, window: int | None = None) -> None:
        """A sample begins, whose prompt has `prompt_tokens` tokens. `prompt_key` None: it never drafts.

        `window`: its window's size if it ran elsewhere before. Raises ValueError if the request has started already,
        or for an impossible `window`.
        """
        if request_id in self._samples:
            raise ValueError(f"request {request_id} has started already")
        begun = SpeculationWindow(self._settings, window)
        row = self._texts.start(prompt_key, prompt_tokens) if prompt_key is not None else None
        self._samples[request_id] = _Sample(row, begun)

    def draft(self, running: Sequence[Running], context: int = 0, most: int | None = None) -> list[list[int]]:
        """Draft tokens to verify in the next decode step, for each sample; empty where nothing matches or fits.

        All are empty while the off-switch says so; what the samples wrote meanwhile is caught up with later. A planner
        is told `context`, the tokens of all samples, and `most`, the draft tokens that fit into the step.

        Raises KeyError for a request that has not started.
        """
        self._learn()
        window_max = self._settings.window_max
        drafts: list[list[int]] = [[] for _ in running]
        self.decision = None
        if not running or (self._planner is None and not self._switch.allows(len(running))):
            return drafts
        rows: list[int] = []
        places: list[int] = []
        asking: list[_Sample] = []
        new: list[int] = []
        ends: list[int] = []
        windows: list[int] = []
        rooms: list[int] = []
        samples = self._samples
        for place, (request_id, tokens, room) in enumerate(running):
            sample = samples.get(request_id) or self._sample(request_id)
            if sample.row is None:
                continue
            added = tokens[sample.seen :]
            sample.seen += len(added)
            new += added
            places.append(place)
            asking.append(sample)
            rows.append(sample.row)
            ends.append(len(new))
            windows.append(sample.window.size)
            rooms.append(room if room < window_max else window_max)
        if not rows:
            return drafts
        drafted = self._texts.draft(rows, new, ends, windows, rooms, whole=self._planner is not None)
        lengths = drafted.lengths.tolist()
        if self._planner is not None:
            fit = sum(lengths) if most is None else most
            lengths, self.decision = self._planner.cut(drafted, len(running), context, fit)
            self._asked = asking
            for number, sample in enumerate(asking):
                sample.number = number
        sources = drafted.sources.tolist()
        for place, sample, draft, source in zip(places, asking, drafted.tokens(lengths), sources, strict=True):
            drafts[place] = draft
            sample.source = source
        return drafts

    def leave_out(self) -> None:
        """The next decode step has no drafts. What the samples wrote meanwhile is caught up with later."""
        self._learn()
        self.decision = None

    def _learn(self) -> None:
        """What became of the last step's drafts, all at once."""
        if self._planner is None:
            return
        if self._verified:
            samples, verified, accepted = zip(*self._verified, strict=True)
            self._planner.learn([sample.number for sample in samples], verified, accepted)
            going_on = [(s.row, tokens, hits) for s, tokens, hits in self._verified if s.row is not None]
            if going_on:
                rows, tokens, hits = np.array(going_on, dtype=np.int64).T
                self._texts.verified(rows, tokens, hits)
            self._verified.clear()
        for sample in self._asked:
            sample.number = -1
        self._asked = []

    def record(self, request_id: str, drafted: int, accepted: int) -> str:
        """The engine verified `drafted` tokens of the last draft and accepted the first `accepted` of them.

        Returns the draft's source (a value of SOURCE_NAMES). Raises KeyError for a request that has not started,
        ValueError unless 0 <= accepted <= drafted.
        """
        sample = self._sample(request_id)
        sample.window.record(drafted, accepted)
        self._switch.record(drafted, accepted)
        sample.drafted += drafted
        sample.accepted += accepted
        sample.drafts += drafted > 0
        if sample.number >= 0 and drafted:
            self._verified.append((sample, drafted, accepted))
        return SOURCE_NAMES[sample.source]

    def window(self, request_id: str) -> int:
        """The size of a sample's window, which goes with it when it moves. Raises KeyError as `finish`."""
        return self._sample(request_id).window.size

    def finish(self, request_id: str) -> SampleSpeculation:
        """A sample ended, was aborted or moves away. Raises KeyError for a request that has not started."""
        sample = self._sample(request_id)
        del self._samples[request_id]
        if sample.row is not None:
            self._texts.finish(sample.row)
            sample.row = None
        return SampleSpeculation(sample.drafted, sample.accepted, sample.drafts, sample.window.size)

    def _sample(self, request_id: str) -> _Sample:
        try:
            return self._samples[request_id]
        except KeyError:
            raise KeyError(f"request {request_id} has not started, or has finished") from None
