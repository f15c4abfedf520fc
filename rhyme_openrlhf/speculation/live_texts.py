"""What the samples of one engine have written so far, held so that one compiled call drafts for all of them.

Owns the memory that `speculation/draft_step.py` reads: a row and a text for each sample, a row and a table for each
prompt. A finished sample stays, as history of its siblings, until its prompt's last running sample has finished.

Invariants: a row's addresses always belong to arrays that are kept here; text and tables have room for what is
appended before the compiled call sees it; nothing is shared between prompts. One caller at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.cursor import BOUND, LENGTH, SEEN
from rhyme_openrlhf.history.index import DraftIndex
from rhyme_openrlhf.speculation import draft_step as step
from rhyme_openrlhf.speculation import rows as columns
from rhyme_openrlhf.speculation import text_tables as tables
from rhyme_openrlhf.speculation.acceptance import FIRST_RECENT
from rhyme_openrlhf.speculation.python_lists import split
from rhyme_openrlhf.speculation.slabs import Slabs

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]

# Rows there is room for at first; doubled when there are more.
FIRST_ROWS = 64
# Tokens a sample's text has room for at first; doubled when it has more.
FIRST_TOKENS = 256
# Slots in the table of a sample's own text for each token there is room for: half are free, so few are taken over.
SLOTS_PER_TOKEN = 2
# A draft that is right as a whole with a smaller probability is not worth proposing to anyone.
NO_HOPE = 0.02
# Buckets of a prompt's table at first; doubled when it is crowded.
FIRST_BUCKETS = 1024


@dataclass(frozen=True)
class Drafts:
    """The drafts of one step: tokens, one draft after the other, and each token's confidence, given those before it.

    Of each draft its length, source (`rows.FROM_...`), tokens matched, and its sample's recent acceptance. The
    arrays are used again for the next step.
    """

    flat: Int32s
    confidences: Float32s
    lengths: Int64s
    sources: Int64s
    matches: Int64s
    recents: Int64s

    def tokens(self) -> list[list[int]]:
        """The tokens of each draft."""
        return split(self.flat, self.lengths)


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
    """One prompt's samples. The arrays are kept because rows hold only their addresses."""

    row: int
    table: Int64s
    rows: list[int] = field(default_factory=list)
    running: int = 0
    index: DraftIndex | None = None


class LiveTexts:
    """All samples of one engine, by row; see the module docstring."""

    def __init__(self, settings: HistoSpecSettings) -> None:
        """`settings` say which sources there are, how many tokens have to match, and how certain a draft has to be."""
        self._shortest = settings.prefix_min
        self._longest = settings.prefix_max
        self._own = settings.own_output
        self._siblings = settings.siblings
        self._window_rule = (settings.window_start, settings.window_step, settings.window_max)
        self._extend_confidence = float(settings.extend_confidence)
        self._stop_confidence = float(settings.stop_confidence)
        self._slabs = Slabs()
        self._samples: Int64s = self._new_samples(FIRST_ROWS)
        self._prompts: Int64s = np.zeros((FIRST_ROWS, columns.PROMPT_COLUMNS), dtype=np.int64)
        self._texts: list[Int32s | None] = [None] * FIRST_ROWS
        self._own_tables: list[Int32s | None] = [None] * FIRST_ROWS
        self._free_rows = list(range(FIRST_ROWS))[::-1]
        self._free_prompt_rows = list(range(FIRST_ROWS))[::-1]
        self._by_key: dict[str, _Prompt] = {}
        self._keys: dict[int, str] = {}
        # Samples of the last step.
        self._asked = 0
        self._rows: list[int] | None = None
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
        self._grow(row, FIRST_TOKENS)
        prompt.rows.append(row)
        prompt.running += 1
        self._keys[row] = key
        return row

    def finish(self, row: int) -> None:
        """The sample gets no more text or drafts."""
        key = self._keys.pop(row)
        prompt = self._by_key[key]
        prompt.running -= 1
        if not self._siblings:
            prompt.rows.remove(row)
            self._free(row)
        self._drop_if_unused(key, prompt)

    def window(self, row: int) -> int:
        """Tokens that the sample's next draft may have."""
        return int(self._samples[row, columns.WINDOW])

    def draft(self, rows: list[int], texts: list[list[int]], whole: bool = False) -> Drafts:
        """Append to each sample of `rows` what is new in its text, then draft for all of them.

        `texts`: of each sample all tokens so far. A draft is as long as its sample's window, and longer where it is
        certain enough. `whole`: as long as there is room and any hope, because somebody else cuts the drafts. The same
        list of `rows` as in the last step, which nobody may have changed, is not read again.
        """
        asked = len(rows)
        if asked > self._drafted.size:
            self._new_results(2 * asked)
            self._rows = None
        extend, stop = (NO_HOPE, NO_HOPE) if whole else (self._extend_confidence, self._stop_confidence)
        number, total = 0, -1
        known, self._rows = rows is self._rows, rows
        while total < 0:
            number, total = step.append_and_draft(
                self._samples.ctypes.data, self._prompts.ctypes.data, asked, known, id(rows), id(texts), number,
                self._longest, self._shortest, self._siblings, self._window_rule[-1], whole, extend, stop,
                self._drafted, self._out, self._confidences, self._found,
            )  # fmt: skip
            if total < 0:
                self._make_room(rows, texts, number)
        self._asked = asked
        lengths, sources, matches, recents = self._found[:, :asked]
        return Drafts(self._out[:total], self._confidences[:total], lengths, sources, matches, recents)

    def verified(self, judged: Int64s) -> Came:
        """Drafts were verified.

        `judged`: the rows of their samples, then how many tokens of each were verified (at least one), then how many
        accepted. Raises ValueError for impossible numbers.
        """
        drafts = judged.size // 3
        came = np.empty(2 * drafts + columns.COUNT_OF_SOURCES, dtype=np.int64)
        if not step.note_verified(
            self._samples, judged, drafts, self._drafted[: self._asked], *self._window_rule, came
        ):
            raise ValueError(f"need 0 <= accepted <= verified and 1 <= verified, got {judged[drafts:].tolist()}")
        return Came(came[:drafts].tolist(), came[drafts : 2 * drafts], came[2 * drafts :].tolist())

    def memory_bytes(self) -> int:
        """Bytes of all texts and tables (indexes not counted: they are mapped)."""
        arrays = [*self._texts, *self._own_tables, *(prompt.table for prompt in self._by_key.values())]
        return sum(array.nbytes for array in arrays if array is not None)

    def _prompt(self, key: str) -> _Prompt:
        prompt = self._by_key.get(key)
        if prompt is None:
            if not self._free_prompt_rows:
                self._more_prompt_rows()
            row = self._free_prompt_rows.pop()
            prompt = self._by_key[key] = _Prompt(row, np.empty(0, dtype=np.int64))
            self._prompts[row] = 0
            if self._siblings:
                self._new_table(prompt, FIRST_BUCKETS)
        return prompt

    def _new_table(self, prompt: _Prompt, buckets: int) -> None:
        if prompt.table.size:
            self._slabs.give(prompt.table)
        prompt.table = self._slabs.take(np.int64, tables.table_size(buckets))
        prompt.table[:] = 0
        row = self._prompts[prompt.row]
        row[columns.TABLE : columns.TABLE_ENTERED + 1] = prompt.table.ctypes.data, buckets, 0

    def _lose_cursor(self, row: int) -> None:
        """The sample's prompt has another index: what matched in the earlier one says nothing."""
        cursor = self._samples[row, columns.CURSOR :]
        cursor[LENGTH], cursor[BOUND], cursor[SEEN] = 0, self._longest, 0

    def _drop_if_unused(self, key: str, prompt: _Prompt) -> None:
        if prompt.running:
            return
        for row in prompt.rows:
            self._free(row)
        prompt.rows.clear()
        if prompt.index is None:
            if prompt.table.size:
                self._slabs.give(prompt.table)
            del self._by_key[key]
            self._free_prompt_rows.append(prompt.row)
        elif self._siblings:
            # Entries of rows that others will have must not be found.
            self._new_table(prompt, FIRST_BUCKETS)

    def _free(self, row: int) -> None:
        for arrays in (self._texts, self._own_tables):
            array = arrays[row]
            if array is not None:
                self._slabs.give(array)
            arrays[row] = None
        self._free_rows.append(row)

    def _new_results(self, rows: int) -> None:
        """Room for the drafts of so many samples."""
        self._drafted: Int64s = np.empty(rows, dtype=np.int64)
        self._out = np.empty(rows * self._window_rule[-1], dtype=np.int32)
        self._confidences = np.empty(self._out.size, dtype=np.float32)
        self._found = np.empty((columns.DRAFT_ROWS, rows), dtype=np.int64)

    def _make_room(self, rows: list[int], texts: list[list[int]], number: int) -> None:
        """For the new tokens of the samples of a step from `number` on, and in tables that are crowded."""
        for row, text in zip(rows[number:], texts[number:], strict=True):
            if len(text) > self._samples[row, columns.CAPACITY]:
                self._grow(row, len(text))
        for prompt in self._by_key.values():
            self._grow_table(prompt)

    def _grow(self, row: int, needed: int) -> None:
        """Room for `needed` tokens in the text of `row`, and a table of its own text that fits."""
        sample = self._samples[row]
        capacity = max(FIRST_TOKENS, int(sample[columns.CAPACITY]))
        while capacity < needed:
            capacity *= 2
        count = int(sample[columns.COUNT])
        text, earlier = self._slabs.take(np.int32, capacity), self._texts[row]
        if earlier is not None:
            text[:count] = earlier[:count]
            self._slabs.give(earlier)
        self._texts[row] = text
        sample[columns.TEXT], sample[columns.CAPACITY] = text.ctypes.data, capacity
        if self._own:
            table, earlier = self._slabs.take(np.int32, capacity * SLOTS_PER_TOKEN), self._own_tables[row]
            if earlier is not None:
                self._slabs.give(earlier)
            table[:] = 0
            tables.follow_own(text, table.ctypes.data, table.size - 1, count, self._shortest)
            self._own_tables[row] = table
            sample[columns.OWN_TABLE], sample[columns.OWN_SLOTS] = table.ctypes.data, table.size

    def _grow_table(self, prompt: _Prompt) -> None:
        row = self._prompts[prompt.row]
        if not tables.is_crowded(row):
            return
        buckets = int(row[columns.TABLE_BUCKETS])
        while row[columns.TABLE_ENTERED] > tables.ENTRIES_PER_BUCKET * buckets:
            buckets *= 2
        self._new_table(prompt, buckets)
        for sample in prompt.rows:
            text = self._texts[sample]
            assert text is not None
            count, start = self._samples[sample, [columns.COUNT, columns.PROMPT_TOKENS]].tolist()
            tables.enter_siblings(row, text[:count], sample, max(1, start), self._shortest)

    def _new_samples(self, rows: int) -> Int64s:
        samples: Int64s = self._slabs.take(np.int64, rows * columns.SAMPLE_COLUMNS)
        samples[:] = 0
        return samples.reshape(rows, columns.SAMPLE_COLUMNS)

    def _more_rows(self) -> None:
        before = len(self._texts)
        if 2 * before > tables.MOST_ROWS:
            raise ValueError(f"an engine has at most {tables.MOST_ROWS} samples at once")
        samples = self._new_samples(2 * before)
        samples[:before] = self._samples
        self._slabs.give(self._samples.ravel())
        self._samples = samples
        self._texts += [None] * before
        self._own_tables += [None] * before
        self._free_rows += list(range(before, 2 * before))[::-1]

    def _more_prompt_rows(self) -> None:
        before = len(self._prompts)
        self._prompts = np.concatenate([self._prompts, np.zeros_like(self._prompts)])
        self._free_prompt_rows += list(range(before, 2 * before))[::-1]


def compile_step() -> None:
    """Compile a step, or load it from Numba's cache: seconds that no decode step should have to wait."""
    texts = LiveTexts(HistoSpecSettings())
    row = texts.start("", 0, 2, 1)
    texts.draft([row], [[0]]).tokens()
    texts.verified(np.array([row, 1, 1]))
