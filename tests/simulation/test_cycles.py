"""While a simulation runs, garbage in cycles is not searched for; so a run must not make any."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rhyme_openrlhf.simulation.cycles import not_searched
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.workload import drawn
from tests.simulation.test_run import CLUSTER, PROFILES, SHAPE


@pytest.fixture
def searched_by_hand() -> Iterator[None]:
    gc.disable()
    # Not through everything that the other tests have made.
    gc.freeze()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "features",
    [
        Features("sync", switching="history"),
        Features(reallocation=True, cooldown=5, interval=0.3, speculation="budget"),
        Features("pipeline", rank_groups=4, two_tier=True, outliers=True, defer=True, interval=0.3),
    ],
    ids=lambda features: str(features.trainer),
)
@pytest.mark.usefixtures("searched_by_hand")
def test_a_run_drops_nothing_that_is_in_a_cycle(features: Features) -> None:
    found = []
    for _ in range(2):
        run = Run(drawn(SHAPE, 6, 32, 4, 2, 5), CLUSTER, features, PROFILES)
        gc.collect()
        run.go()
        found.append(gc.collect())
    # What is only made once, by the first, is no run's.
    assert found[1] == 0


def test_the_search_is_as_it_was() -> None:
    for on in (False, True):
        (gc.enable if on else gc.disable)()
        with pytest.raises(KeyError), not_searched():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == on
