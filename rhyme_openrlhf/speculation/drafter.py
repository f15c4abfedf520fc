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
- What was verified of a draft may be less than was proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.index import DraftIndex
from rhyme_openrlhf.speculation.compile_step import compile_step
from rhyme_openrlhf.speculation.live_texts import Came, LiveTexts
from rhyme_openrlhf.speculation.off_switch import OffSwitch
from rhyme_openrlhf.speculation.planner import Decision, DraftPlanner
from rhyme_openrlhf.speculation.rows import FROM_HISTORY, FROM_OWN, FROM_SIBLINGS, NO_SOURCE
from rhyme_openrlhf.speculation.window import SpeculationWindow

SOURCE_NAMES = {NO_SOURCE: "", FROM_HISTORY: "history", FROM_SIBLINGS: "siblings", FROM_OWN: "own"}
# The row of a sample that never drafts.
NEVER = -1


class Verified(NamedTuple):
    """Drafts that a step verified: the requests, tokens verified of each (one at least), and tokens accepted."""

    requests: list[str]
    drafted: list[int]
    accepted: list[int]


class HistoryDrafter:
    """Drafts for all samples of one engine (RhymeRL, sections 5.2 to 5.4). One caller at a time."""

    def __init__(self, settings: HistoSpecSettings) -> None:
        """Compiles a step, or loads it from Numba's cache, so that no decode step waits for it."""
        self._settings = settings
        # Of each request, NEVER or the row of its text.
        self._rows: dict[str, int] = {}
        compile_step()
        self._texts = LiveTexts(settings)
        limits = settings.batch_limit_pairs()
        self._switch = OffSwitch(limits) if limits else None
        self._planner: DraftPlanner | None = None
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

    def start(
        self, request_id: str, prompt_key: str | None, prompt_tokens: int, most_tokens: int, window: int | None = None,
        request: Any = None,
    ) -> None:  # fmt: skip
        """A sample begins, whose prompt has `prompt_tokens` tokens. `prompt_key` None: it never drafts.

        `most_tokens`: prompt and response together have no more in the end; `window`: its window if it ran elsewhere
        before; `request`: vLLM's, if `draft_decoding` shall find it. Raises ValueError if the request has started
        already, or for an impossible `window`.
        """
        if request_id in self._rows:
            raise ValueError(f"request {request_id} has started already")
        first = SpeculationWindow(self._settings, window).size
        self._rows[request_id] = row = (
            NEVER if prompt_key is None else self._texts.start(prompt_key, prompt_tokens, most_tokens, first)
        )
        if row != NEVER and request is not None:
            self._texts.bind(row, request_id, request)

    def draft(
        self, requests: list[str], texts: list[list[int]], context: int = 0, most: int | None = None
    ) -> list[list[int]]:
        """Draft tokens to verify in the next decode step, for each sample; empty where nothing matches or fits.

        `texts`: of each, prompt and response so far. All are empty while the off-switch says so; what the samples wrote
        meanwhile is caught up with later. A planner is told `context`, the tokens of all samples, and `most`, the draft
        tokens that fit into the step.

        Raises KeyError for a request that has not started.
        """
        self.leave_out()
        rows = self._rows_of(requests)
        if self._planner is None and self._switch is not None and not self._switch.allows(len(rows)):
            return [[] for _ in rows]
        asking = rows
        if NEVER in rows:
            asking = [row for row in rows if row != NEVER]
            texts = [text for row, text in zip(rows, texts, strict=True) if row != NEVER]
        if not asking:
            return [[] for _ in rows]
        drafted = self._texts.draft(asking, texts, whole=self._planner is not None)
        if self._planner is not None:
            fit = drafted.flat.size if most is None else most
            cut, self.decision = self._planner.cut(drafted, len(rows), context, fit)
            drafts = cut.tokens()
        else:
            drafts = drafted.tokens()
        if asking is not rows:
            found = iter(drafts)
            return [[] if row == NEVER else next(found) for row in rows]
        return drafts

    def find_decoding(self, requests: list[str], running: Any) -> int:
        """Which of these requests of a step decode: their status is `running`, and no part of a prompt was computed.

        Returns how many do. Those that have finished do not, nor those that never draft, or started without `request`.
        """
        return self._texts.find_decoding(requests, self._rows, running)

    def draft_decoding(self, most: int) -> None:
        """As `draft` for the requests that were found to decode, and give each its draft (`decoding.DRAFT`).

        What has no draft is left alone: vLLM takes the last one when it schedules it. `most`: tokens that fit.
        """
        self.leave_out()
        running = self._texts.decoding
        if self._planner is None and self._switch is not None and not self._switch.allows(running):
            return
        if self._planner is None:
            self._texts.draft_and_give()
            return
        drafted = self._texts.draft_decoding(whole=True)
        cut, self.decision = self._planner.cut(drafted, running, self._texts.context(), most)
        self._texts.give(cut.flat, cut.lengths)

    def leave_out(self) -> None:
        """The next decode step has no drafts. What the samples wrote meanwhile is caught up with later."""
        self.decision = None

    def verified(self, drafts: Verified) -> Came:
        """The engine verified so many tokens of the last draft of each request, and accepted the first of them.

        Raises KeyError for a request that has not started, ValueError unless 0 <= accepted <= drafted and 1 <= drafted.
        """
        rows = self._rows_of(drafts.requests)
        if NEVER in rows:
            return self._verified_of_some(rows, drafts)
        judged = np.array([*rows, *drafts.drafted, *drafts.accepted], dtype=np.int64)
        came = self._texts.verified(judged)
        if self._switch is not None:
            for tokens, hits in zip(drafts.drafted, drafts.accepted, strict=True):
                self._switch.record(tokens, hits)
        if self._planner is not None:
            count = len(rows)
            self._planner.learn(came.numbers, judged[count : 2 * count], judged[2 * count :])
        return came

    def _verified_of_some(self, rows: list[int], drafts: Verified) -> Came:
        """Where drafts were not from here: of samples that never draft (dummies, while step times are measured)."""
        kept = [at for at, row in enumerate(rows) if row != NEVER]
        of_kept = Verified(
            [drafts.requests[at] for at in kept], [drafts.drafted[at] for at in kept],
            [drafts.accepted[at] for at in kept],
        )  # fmt: skip
        came = self.verified(of_kept)
        sources, numbers = [NO_SOURCE] * len(rows), np.full(len(rows), -1)
        for at, source, number in zip(kept, came.sources, came.numbers, strict=True):
            sources[at], numbers[at] = source, number
        accepted = list(came.accepted)
        accepted[NO_SOURCE] += sum(drafts.accepted) - sum(accepted)
        return Came(sources, numbers, accepted)

    def window(self, request_id: str) -> int:
        """The size of a sample's window, which goes with it when it moves. Raises KeyError as `finish`."""
        row = self._rows_of([request_id])[0]
        return self._settings.window_start if row == NEVER else self._texts.window(row)

    def finish(self, request_id: str) -> None:
        """A sample ended, was aborted or moves away. Raises KeyError for a request that has not started."""
        row = self._rows_of([request_id])[0]
        del self._rows[request_id]
        if row != NEVER:
            self._texts.finish(row)

    def _rows_of(self, requests: Sequence[str]) -> list[int]:
        rows = self._rows
        try:
            return [rows[request] for request in requests]
        except KeyError as error:
            raise KeyError(f"request {error.args[0]} has not started, or has finished") from None
