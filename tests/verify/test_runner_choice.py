"""`--drafting.runner auto`: V2 only where everything was proved with it, and the fastest of what was measured."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.cli.preflight_runner import choose
from rhyme_openrlhf.settings.drafting import V1, V2, V2_ASYNC
from rhyme_openrlhf.verify.record import Engines, Entry

PROOFS = ("lossless-greedy", "lossless-sampled", "weights-buffer")


def entry(*runners: str, ranks: int = 1, **speeds: float) -> Entry:
    proofs = {Engines(runner, "A", ranks).proof(name): "2026-01-02T03:04:05" for runner in runners for name in PROOFS}
    names = {"v1": V1, "v2": V2, "v2_async": V2_ASYNC}
    return Entry("H", {}, proofs, {str(Engines(names[name], "A", ranks)): speed for name, speed in speeds.items()})


def test_without_a_proof_the_first_runner() -> None:
    runner, why = choose(entry(V1, v1=1.0, v2=2.0), "A", 1, "buffer")
    assert runner == V1 and "has not passed with another for A here" in why


@pytest.mark.parametrize("missing", PROOFS)
def test_each_proof_is_needed(missing: str) -> None:
    full = entry(V2)
    lacking = {name: date for name, date in full.proofs.items() if not name.startswith(missing)}
    assert choose(full, "A", 1, "buffer")[0] == V2
    assert choose(Entry("H", {}, lacking), "A", 1, "buffer")[0] == V1


def test_a_proof_is_of_one_architecture_parallel_size_and_transport() -> None:
    proved = entry(V2, V2_ASYNC)
    assert choose(proved, "A", 1, "buffer")[0] == V2_ASYNC
    assert choose(proved, "B", 1, "buffer")[0] == choose(proved, "A", 2, "buffer")[0] == V1
    assert choose(proved, "A", 1, "openrlhf")[0] == V1


def test_the_fastest_of_two_measured_ones() -> None:
    assert choose(entry(V2_ASYNC), "A", 1, "buffer")[0] == V2_ASYNC
    assert choose(entry(V2, V2_ASYNC, v2=1.1, v2_async=1.3), "A", 1, "buffer")[0] == V2_ASYNC
    runner, why = choose(entry(V2, V2_ASYNC, v1=1.4, v2=1.1), "A", 1, "buffer")
    assert runner == V1 and "v1 1.40 times, v2 1.10 times" in why
    # One figure compares nothing, and what is fast but unproved is no choice.
    assert choose(entry(V2, V2_ASYNC, v2=1.3), "A", 1, "buffer")[0] == V2_ASYNC
    assert choose(entry(V2, v1=1.0, v2=1.1, v2_async=9.0), "A", 1, "buffer")[0] == V2
    assert choose(entry(V2, V2_ASYNC, ranks=2, v2=1.0, v2_async=2.0), "A", 2, "buffer")[0] == V2_ASYNC
