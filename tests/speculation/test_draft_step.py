"""Numba's cache of the compiled step is of the code that is here."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import ModuleType

import pytest

from rhyme_openrlhf.history import lookup
from rhyme_openrlhf.speculation import acceptance, addresses, budget, draft_step, likely_next, planner, window


@pytest.mark.parametrize(
    ("caller", "called"),
    [(draft_step, (lookup, acceptance, addresses, likely_next, window)), (planner, (acceptance, budget))],
)
def test_a_change_of_what_is_called_changes_the_caller(caller: ModuleType, called: tuple[ModuleType, ...]) -> None:
    found = 0
    for module in called:
        found = zlib.crc32(Path(str(module.__file__)).read_bytes(), found)
    assert found == caller.CALLED_SOURCES, f"write CALLED_SOURCES = {found} into {caller.__file__}"
