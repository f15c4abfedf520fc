"""What the samples of one engine have written so far, held so that one compiled call drafts for all of them.

Owns the memory that `speculation/draft_step.py` reads: a row and a text for each sample, a row and a table for each
prompt. A finished sample stays, as history of its siblings, until its prompt's last running sample has finished.

Invariants: a row's addresses always belong to arrays that are kept here; text and tables have room for what is
appended before the compiled call sees it; nothing is shared between prompts. One caller at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.cursor import BOUND, LENGTH, SEEN
from rhyme_openrlhf.history.index import DraftIndex
from rhyme_openrlhf.speculation import decoding
from rhyme_openrlhf.speculation import rows as columns
from rhyme_openrlhf.speculation import step_parts as step
from rhyme_openrlhf.speculation import text_tables as tables
from rhyme_openrlhf.speculation.acceptance import FIRST_RECENT
from rhyme_openrlhf.speculation.draft_step import note_verified
from rhyme_openrlhf.speculation.prompt_memory import PromptMemory
from rhyme_openrlhf.speculation.python_lists import split
from rhyme_openrlhf.speculation.slabs import Slabs
from rhyme_openrlhf.speculation.step_threads import StepThreads, step_threads
from rhyme_openrlhf.speculation.text_memory import TextMemory

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]

# Rows there is room for at first; doubled when there are more.
FIRST_ROWS = 64
# Tokens that a step may enter again into grown tables of own text (a table at least): some tens of microseconds.
ENTERED_AGAIN = 2048
# Samples that a step looks at for that.
GROWN_A_STEP = 4
# Samples of a step that helping threads are woken for: with 128 a second thread takes a fifth of the time away, with 64
# less than differs from run to run (docs/histospec.md).
LEAST_HELPED = 128
# No attribute of a request, by address.
NO_ATTRIBUTE = 0
# A draft that is right as a whole with a smaller probability is not worth proposing to anyone.
NO_HOPE = 0.02


@dataclass(frozen=True)
class Cut:
    """What is verified of the drafts of one step: tokens, one draft after the other, and how many each has."""

    flat: Int32s
    lengths: Int64s

    def tokens(self) -> list[list[int]]:
        """The tokens of each draft."""
        return split(self.flat, self.lengths)


@dataclass(frozen=True)
class Drafts(Cut):
    """The drafts of one step: tokens, one draft after the other, and each token's confidence, given those before it.

    Of each draft its length, source (`rows.FROM_...`), tokens matched, and its sample's recent acceptance. The
    arrays are used again for the next step.
    """

    confidences: Float32s
    sources: Int64s
    matches: Int64s
    recents: Int64s


class Came(NamedTuple):
    """Where verified drafts came from.

    Each one's source (`rows.FROM_...`); its number in the last step that was drafted for, -1 if it is of another;
    and by source the tokens accepted.
    """

    sources: list[int]
    numbers: Int64s
    accepted: list[int]


@dataclass
class _Prompt:
    """One prompt's samples. The index is kept because the row holds only addresses."""

    row: int
    rows: list[int] = field(default_factory=list)
    running: int = 0
    index: DraftIndex | None = None


class LiveTexts:
    """All samples of one engine, by row; see the module docstring."""

    def __init__(self, settings: HistoSpecSettings, threads: StepThreads | None = None) -> None:
        """`settings` say which sources there are, how many tokens have to match, and how certain a draft has to be.

        `threads`: what drafts for large steps; None: this process's, as many as the settings say.
        """
        self._threads = threads or step_threads(settings.threads)
        self._shortest = settings.prefix_min
        self._longest = settings.prefix_max
        self._siblings = settings.siblings
        self._window_rule = (settings.window_start, settings.window_step, settings.window_max)
        self._extend_confidence = float(settings.extend_confidence)
        self._stop_confidence = float(settings.stop_confidence)
        self._slabs = Slabs()
        self._samples: Int64s = self._new_samples(FIRST_ROWS)
        self._prompts: Int64s = np.zeros((FIRST_ROWS, columns.PROMPT_COLUMNS), dtype=np.int64)
        self._tables_at = self._samples.ctypes.data, self._prompts.ctypes.data
        self._memory = TextMemory(self._slabs, settings.own_output, self._shortest)
        self._of_prompts = PromptMemory(self._slabs)
        self._free_rows = list(range(FIRST_ROWS))[::-1]
        self._free_prompt_rows = list(range(FIRST_ROWS))[::-1]
        self._by_key: dict[str, _Prompt] = {}
        self._keys: dict[int, str] = {}
        # By row, what its addresses of Python's objects belong to.
        self._bound: dict[int, tuple[Any, ...]] = {}
        # Where a request's dict has STATUS, CHUNK and DRAFT of decoding.py.
        self._places = [0, 0, 0]
        # Samples of the last step.
        self._asked = 0
        # As `append_and_draft` has it.
        self._growing: Int64s = np.zeros(1 + GROWN_A_STEP, dtype=np.int64)
        self.decoding = 0
        """How many samples were found to decode."""
        self._new_results(FIRST_ROWS)

    def install(self, key: str, index: DraftIndex) -> None:
        """Draft for the samples of prompt `key` from `index` too, in place of an earlier one."""
        prompt = self._prompt(key)
        prompt.index = index
        self._prompts[prompt.row, columns.INDEX : columns.TABLE] = index.row
        for row in prompt.rows:
            self._lose_cursor(row)

    def forget(self, key: str) -> None:
        """Drop the index of prompt `key`, if there is one."""
        prompt = self._by_key.get(key)
        if prompt is None:
            return
        self._prompts[prompt.row, columns.INDEX : columns.TABLE] = 0
        prompt.index = None
        self._drop_if_unused(key, prompt)

    def start(self, key: str, prompt_tokens: int, most_tokens: int, window: int) -> int:
        """A sample of prompt `key`, whose prompt has `prompt_tokens` tokens, begins without text; returns its row.

        `most_tokens`: what its text can come to, prompt and response; `window`: tokens that its first draft may have.
        """
        prompt = self._prompt(key)
        if not self._free_rows:
            self._more_rows()
        row = self._free_rows.pop()
        self._samples[row] = 0
        self._samples[row, columns.PROMPT] = prompt.row
        self._samples[row, columns.PROMPT_TOKENS] = prompt_tokens
        self._samples[row, columns.LIMIT] = most_tokens
        self._samples[row, columns.WINDOW] = window
        self._samples[row, columns.RECENT] = FIRST_RECENT
        self._memory.grow(row, self._samples[row], prompt_tokens)
        prompt.rows.append(row)
        prompt.running += 1
        self._keys[row] = key
        return row

    def finish(self, row: int) -> None:
        """The sample gets no more text or drafts."""
        key = self._keys.pop(row)
        self._bound.pop(row, None)
        self._samples[row, [columns.NAME, columns.ATTRIBUTES]] = 0
        prompt = self._by_key[key]
        prompt.running -= 1
        if not self._siblings:
            prompt.rows.remove(row)
            self._memory.drop(row)
            self._free_rows.append(row)
        self._drop_if_unused(key, prompt)

    def window(self, row: int) -> int:
        """Tokens that the sample's next draft may have."""
        return int(self._samples[row, columns.WINDOW])

    def bind(self, row: int, name: str, request: Any) -> None:
        """The sample is vLLM's `request` of that name, the same str that is the key of the dict of rows."""
        tokens = getattr(request, decoding.TOKENS)
        attributes = request.__dict__
        bound = self._bound[row] = name, request, tokens, attributes
        its_columns = [columns.NAME, columns.REQUEST, columns.LIST, columns.ATTRIBUTES]
        self._samples[row, its_columns] = [id(one) for one in bound]
        names = list(attributes)
        self._places = [names.index(name) for name in (decoding.STATUS, decoding.CHUNK, decoding.DRAFT)]

    def draft(self, rows: list[int], texts: list[list[int]], whole: bool = False) -> Drafts:
        """Append to each sample of `rows` what is new in its text, then draft for all of them.

        `texts`: of each sample all tokens so far. A draft is as long as its sample's window, and longer where it is
        certain enough. `whole`: as long as there is room and any hope, because somebody else cuts the drafts.
        """
        self._room_for(len(rows))
        decoding.note_lists(self._samples, self._drafted, id(rows), id(texts))
        return self._draft(len(rows), whole)

    def find_decoding(self, names: list[str], rows: dict[str, int], running: Any) -> int:
        """Which of the bound samples of these names decode; returns how many. `running`: a status.

        `rows`: the row of each name; of those that it does not have, or has as negative, none does.
        """
        self._room_for(len(names))
        self.decoding = decoding.find_decoding(
            self._samples, id(names), id(rows), self._last, self._drafted, id(decoding.STATUS), id(decoding.CHUNK),
            id(running), id(False), *self._places[:2],
        )  # fmt: skip
        return self.decoding

    def draft_decoding(self, whole: bool) -> Drafts:
        """As `draft`, for the samples that were found to decode."""
        return self._draft(self.decoding, whole)

    def draft_and_give(self) -> None:
        """As `draft_decoding`, and give each request its draft."""
        self._run(self.decoding, False, id(decoding.DRAFT))

    def context(self) -> int:
        """Tokens of all samples of the last step, less the last of each, which is still to be computed."""
        return int(self._samples[self._drafted[: self._asked], columns.COUNT].sum()) - self._asked

    def give(self, flat: Int32s, lengths: Int64s) -> None:
        """Give the requests of the last step's samples their drafts: so many tokens of `flat` each."""
        decoding.give_drafts(self._samples, self._drafted, flat, lengths, id(decoding.DRAFT), self._places[-1])

    def _draft(self, asked: int, whole: bool) -> Drafts:
        """For the first `asked` of the rows in `_drafted`, whose lists are known."""
        self._run(asked, whole, NO_ATTRIBUTE)
        total = step.gather(
            self._found, asked, self._window_rule[-1], self._out, self._confidences, self._flat, self._of_flat
        )
        lengths, sources, matches, recents = self._found[: columns.DRAFT_ROWS, :asked]
        return Drafts(self._flat[:total], lengths, self._of_flat[:total], sources, matches, recents)

    def _run(self, asked: int, whole: bool, attribute: int) -> None:
        """Draft, and set that attribute of the requests."""
        extend, stop = (NO_HOPE, NO_HOPE) if whole else (self._extend_confidence, self._stop_confidence)
        helpers = self._threads.helpers if asked >= LEAST_HELPED else 0
        again = False
        while True:
            row = step.append_and_draft(
                self._threads.address, helpers, *self._tables_at, asked, again,
                self._longest, self._shortest, self._siblings, self._window_rule[-1], whole, extend, stop,
                self._drafted, self._out, self._confidences, self._found, self._growing,
                id(int), attribute, self._places[-1],
            )  # fmt: skip
            if row < 0:
                break
            self._memory.grow(row, self._samples[row], decoding.tokens_listed(self._samples, row))
            again = True
        if self._growing[0]:
            self._grow_some()
        self._asked = asked

    def verified(self, judged: Int64s) -> Came:
        """Drafts were verified.

        `judged`: the rows of their samples, then how many tokens of each were verified (at least one), then how many
        accepted. Raises ValueError for impossible numbers.
        """
        drafts = judged.size // 3
        came = np.empty(2 * drafts + columns.COUNT_OF_SOURCES, dtype=np.int64)
        if not note_verified(self._samples, judged, drafts, self._drafted[: self._asked], *self._window_rule, came):
            raise ValueError(f"need 0 <= accepted <= verified and 1 <= verified, got {judged[drafts:].tolist()}")
        return Came(came[:drafts].tolist(), came[drafts : 2 * drafts], came[2 * drafts :].tolist())

    def memory_bytes(self) -> int:
        """Bytes of all texts and tables (indexes not counted: they are mapped)."""
        return self._memory.nbytes() + self._of_prompts.nbytes()

    def _prompt(self, key: str) -> _Prompt:
        prompt = self._by_key.get(key)
        if prompt is None:
            if not self._free_prompt_rows:
                self._more_prompt_rows()
            row = self._free_prompt_rows.pop()
            prompt = self._by_key[key] = _Prompt(row)
            self._prompts[row] = 0
            if self._siblings:
                self._of_prompts.begin(row, self._prompts[row])
        return prompt

    def _lose_cursor(self, row: int) -> None:
        """The sample's prompt has another index: what matched in the earlier one says nothing."""
        cursor = self._samples[row, columns.CURSOR :]
        cursor[LENGTH], cursor[BOUND], cursor[SEEN] = 0, self._longest, 0

    def _drop_if_unused(self, key: str, prompt: _Prompt) -> None:
        if prompt.running:
            return
        for row in prompt.rows:
            self._memory.drop(row)
            self._free_rows.append(row)
        prompt.rows.clear()
        # Entries of rows that others will have must not be found.
        self._of_prompts.drop(prompt.row, self._prompts[prompt.row])
        if prompt.index is None:
            del self._by_key[key]
            self._free_prompt_rows.append(prompt.row)
        elif self._siblings:
            self._of_prompts.begin(prompt.row, self._prompts[prompt.row])

    def _room_for(self, rows: int) -> None:
        if rows > self._drafted.size:
            self._new_results(2 * rows)

    def _new_results(self, rows: int) -> None:
        """Room for the drafts of so many samples."""
        self._drafted: Int64s = np.empty(rows, dtype=np.int64)
        self._last: Int64s = np.full(rows, decoding.GONE)
        self._out = np.empty(rows * self._window_rule[-1], dtype=np.int32)
        self._confidences = np.empty(self._out.size, dtype=np.float32)
        # Without gaps, unlike these two.
        self._flat, self._of_flat = np.empty_like(self._out), np.empty_like(self._confidences)
        self._found = np.empty((columns.STEP_ROWS, rows + 1), dtype=np.int64)

    def _grow_some(self) -> None:
        """Of the samples whose memory should grow: some of their own tables, and one prompt's."""
        count = min(int(self._growing[0]), GROWN_A_STEP)
        self._growing[0] = 0
        again, crowded = 0, None
        for row in self._growing[1 : 1 + count].tolist():
            tokens = int(self._samples[row, columns.COUNT])
            if tokens > self._samples[row, columns.ENOUGH] and (not again or again + tokens <= ENTERED_AGAIN):
                self._memory.grow(row, self._samples[row], tokens + 1)
                again += tokens
            prompt = self._by_key[self._keys[row]]
            if self._siblings and tables.is_crowded(self._prompts[prompt.row]):
                crowded = prompt
        if crowded is not None:
            self._of_prompts.grow(crowded.row, self._prompts[crowded.row])

    def _new_samples(self, rows: int) -> Int64s:
        samples: Int64s = self._slabs.take(np.int64, rows * columns.SAMPLE_COLUMNS)
        samples[:] = 0
        return samples.reshape(rows, columns.SAMPLE_COLUMNS)

    def _more_rows(self) -> None:
        before = len(self._samples)
        if 2 * before > tables.MOST_ROWS:
            raise ValueError(f"an engine has at most {tables.MOST_ROWS} samples at once")
        samples = self._new_samples(2 * before)
        samples[:before] = self._samples
        self._slabs.give(self._samples.ravel())
        self._samples = samples
        self._tables_at = samples.ctypes.data, self._prompts.ctypes.data
        self._free_rows += list(range(before, 2 * before))[::-1]

    def _more_prompt_rows(self) -> None:
        before = len(self._prompts)
        self._prompts = np.concatenate([self._prompts, np.zeros_like(self._prompts)])
        self._tables_at = self._samples.ctypes.data, self._prompts.ctypes.data
        self._free_prompt_rows += list(range(before, 2 * before))[::-1]
