"""One pair of real engines for all tests of moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rhyme_openrlhf.engine.calls import SampleCalls
from tests.moves.engines import SEATS, VARIABLES, Engines, LocalEngine, variables


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of each test in this folder."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def pair(starts_engine: None) -> Iterator[Engines]:
    with variables():
        found = Engines([LocalEngine(index) for index in (0, 1)])
        for engine in found.engines:
            assert engine.raw
    yield found
    for engine in found.engines:
        engine.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no block in use, no seat held, no request, at either engine; and no sample is held any more."""
    yield
    if "pair" in request.fixturenames:
        for engine in request.getfixturevalue("pair").engines:
            engine.hold_at(0)
            assert engine.scheduler("output_lengths") == {}
            assert engine.scheduler("rooms") == []
            assert engine.scheduler("seats") == SEATS
            assert engine.scheduler("read_counters")["kv_cache"] == 0
            assert engine.raw.parts[SampleCalls].here == {}
