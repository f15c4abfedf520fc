"""Numba's cache of the compiled step is of the code that is here."""

from __future__ import annotations

import zlib
from pathlib import Path

from rhyme_openrlhf.history import lookup
from rhyme_openrlhf.speculation import addresses, draft_step, likely_next


def test_a_change_of_what_is_called_changes_the_caller() -> None:
    found = 0
    for module in (lookup, addresses, likely_next):
        found = zlib.crc32(Path(module.__file__).read_bytes(), found)
    assert found == draft_step.CALLED_SOURCES, f"write CALLED_SOURCES = {found} into {draft_step.__file__}"
