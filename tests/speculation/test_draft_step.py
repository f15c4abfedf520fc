"""Numba's cache of compiled code is of the code that is here."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import ModuleType

import pytest
from vllm.v1.spec_decode import ngram_proposer

from rhyme_openrlhf.history import addresses, cursor, lookup, walk
from rhyme_openrlhf.latency import curve, step_kernels
from rhyme_openrlhf.rollout import ngram_worker
from rhyme_openrlhf.speculation import (
    acceptance,
    append_step,
    budget,
    decoding,
    draft_step,
    likely_next,
    planner,
    position_acceptance,
    proposals,
    python_lists,
    rows,
    shared_words,
    slabs,
    step_parts,
    text_tables,
    trying,
    window,
)

INDEX = (addresses, lookup)
TABLES = (addresses, likely_next, rows)


@pytest.mark.parametrize(
    ("caller", "called"),
    [
        (lookup, (addresses,)),
        (cursor, INDEX),
        (walk, INDEX),
        (text_tables, TABLES),
        (likely_next, (addresses,)),
        (python_lists, (addresses,)),
        (decoding, (python_lists, rows)),
        (append_step, (text_tables, python_lists)),
        (draft_step, (text_tables, cursor, walk, acceptance, window)),
        (slabs, (shared_words,)),
        (step_parts, (append_step, decoding, draft_step, shared_words)),
        (trying, (budget,)),
        (planner, (acceptance, trying)),
        (position_acceptance, (acceptance,)),
        (proposals, (position_acceptance, trying)),
        (step_kernels, (curve,)),
        (ngram_worker, (ngram_proposer,)),
    ],
)
def test_a_change_of_what_is_called_changes_the_caller(caller: ModuleType, called: tuple[ModuleType, ...]) -> None:
    """A caller that names all that its callees call changes with it; those name theirs in turn."""
    found = 0
    for module in called:
        found = zlib.crc32(Path(str(module.__file__)).read_bytes(), found)
    assert found == caller.CALLED_SOURCES, f"write CALLED_SOURCES = {found} into {caller.__file__}"
