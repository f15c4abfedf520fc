"""Which weights generated which tokens of a response."""

from __future__ import annotations

from types import SimpleNamespace as NS

from rhyme_openrlhf.telemetry.sample_rounds import Round


def test_tokens_are_counted_by_the_weights_that_generated_them() -> None:
    one = Round(engine=0, weight_version=3, context=10)
    one.end(3, NS(token_ids=range(7), finish_reason="stop"))
    assert one.tokens_by_version() == {3: 7}
    one.loads = [(4, 2), (6, 5)]
    assert one.tokens_by_version() == {3: 2, 4: 3, 6: 2}
