"""Python's search for garbage is left out, and afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rhyme_openrlhf.garbage import kept_for_good, not_searched


def test_the_search_is_as_it_was() -> None:
    for on in (False, True):
        (gc.enable if on else gc.disable)()
        with pytest.raises(KeyError), not_searched():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == on


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_what_is_kept_is_not_searched_again() -> None:
    before = gc.get_freeze_count()
    with kept_for_good():
        assert not gc.isenabled()
        cycle: list[object] = []
        cycle.append(cycle)
    assert gc.isenabled() and gc.get_freeze_count() > before
    assert not any(found is cycle for generation in range(3) for found in gc.get_objects(generation))
