"""The pace at which engines are looked at: the calls and samples of a second do not grow without end."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.training.rollout_watch import ENGINES_A_SECOND, POLL_SECONDS, look_seconds


@pytest.mark.parametrize("engines", [1, ENGINES_A_SECOND, ENGINES_A_SECOND + 1, 512, 4096])
def test_a_second_has_a_bounded_number_of_engine_samples(engines: int) -> None:
    assert look_seconds(engines) >= POLL_SECONDS
    assert engines / look_seconds(engines) <= ENGINES_A_SECOND
    # And none is looked at less often than that needs.
    assert look_seconds(engines) <= POLL_SECONDS + engines / ENGINES_A_SECOND
