"""The rows that hold all of a step's samples and prompts, and what the compiled step says of each draft.

Compiled code sees two int64 tables, one row a sample and one a prompt, with the columns below; arrays are there by
their addresses (`history/addresses.py`).
"""

from __future__ import annotations

from rhyme_openrlhf.history.cursor import CURSOR_COLUMNS
from rhyme_openrlhf.history.lookup import INDEX_COLUMNS

# A sample: its text, how many tokens it has, and room for how many; the most it can come to have; tokens of its
# prompt; the table of its own text; the sample's prompt; where the match in its own text goes on, and its length; up to
# where the sibling was followed; that sibling, where the match in it goes on, and its length; its window; how its last
# drafts fared (acceptance.py); the source of the last one, and its place among those of its step; the hash of its last
# tokens; Python's objects of it, by their addresses: the list of its tokens, its request, the request's name (0:
# none is known, decoding.py), and the dict of its attributes; tokens past which its memory should grow; and its cursor
# in the prompt's index (history/cursor.py).
(
    TEXT, COUNT, CAPACITY, LIMIT, PROMPT, OWN_TABLE, OWN_SLOTS, OWN_AT, OWN_LENGTH, FOLLOWED, SIBLING, SIBLING_AT,
    SIBLING_LENGTH, WINDOW, RECENT, SOURCE, NUMBER, PROMPT_TOKENS, HASH, LIST, REQUEST, NAME, ATTRIBUTES, ENOUGH,
    CURSOR,
) = range(25)  # fmt: skip
SAMPLE_COLUMNS = 32  # four cache lines
assert CURSOR + CURSOR_COLUMNS <= SAMPLE_COLUMNS
# A prompt: its draft index (history/lookup.py; no tokens: none); the siblings' tables, the newest first, each with its
# buckets (0: there is none); what was entered into the newest; the slots of what mostly followed a token; and, while a
# step is divided, how many of its samples are this prompt's (step_parts.py; 0 otherwise).
INDEX = 0
TABLE, TABLE_BUCKETS = range(INDEX_COLUMNS, INDEX_COLUMNS + 2)
TABLES, TABLE_COLUMNS = 4, 2
TABLE_ENTERED = TABLE + TABLES * TABLE_COLUMNS
VOTES = TABLE_ENTERED + 1
HERE = VOTES + 1
PROMPT_COLUMNS = 24  # three cache lines
assert HERE < PROMPT_COLUMNS

# Sources as the call returns them.
NO_SOURCE, FROM_HISTORY, FROM_SIBLINGS, FROM_OWN = range(4)
COUNT_OF_SOURCES = 4
# What the call says of each draft, by row of its result.
LENGTHS, SOURCES, MATCHES, RECENTS = range(4)
DRAFT_ROWS = 4
# And what it works by (step_parts.py): its samples in order of their prompts, by row and by number, and whether each
# should get more memory; of each part its first place in that order, up to where it was appended, and what it is at.
ORDERED, NUMBERS, GROWS, BEGINS, REACHED, STATUS = range(DRAFT_ROWS, DRAFT_ROWS + 6)
STEP_ROWS = DRAFT_ROWS + 6
