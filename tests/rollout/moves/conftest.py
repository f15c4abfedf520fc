"""One pair of real engines for all tests of moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rollout.moves.engines import SEATS, Engines, LocalEngine


@pytest.fixture(scope="package")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            # Upstream asks Ray, which is not there, for its address unless it is known.
            "RAY_ADDRESS": "not-asked",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="package")
def pair(environment: None) -> Iterator[Engines]:
    found = Engines([LocalEngine(0), LocalEngine(1)])
    for engine in found.engines:
        assert engine.raw
    yield found
    for engine in found.engines:
        engine.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no block in use, no seat held, no request, at either engine."""
    yield
    if "pair" in request.fixturenames:
        for engine in request.getfixturevalue("pair").engines:
            assert engine.scheduler("output_lengths") == {}
            assert engine.scheduler("rooms") == []
            assert engine.scheduler("seats") == SEATS
            assert engine.scheduler("read_counters")["kv_cache"] == 0
            assert engine.raw._here == {}
