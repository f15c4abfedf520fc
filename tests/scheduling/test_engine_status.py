"""Engines' mean figures per decode step."""

from __future__ import annotations

from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus, reported_speculation, speculation


def test_speculation_is_that_of_the_steps() -> None:
    assert speculation([]) == (1.0, 0.0) and speculation([(0, 5.0, 9)]) == (1.0, 0.0)
    assert speculation([(3, 2.0, 6), (1, 1.0, 0)]) == (7 / 4, 6 / 4)
    # A decode step gives at least one token, although its counters are read some steps apart.
    assert speculation([(3, 0.9, 0)]) == (1.0, 0.0)


def test_an_engine_without_a_timed_step_says_nothing() -> None:
    def status(decode: DecodeMean | None, gained: float) -> EngineStatus:
        return EngineStatus(0, (), 1, 1, 0, True, 1, 2048, tokens_per_step=gained, decode=decode)

    reports = [status(DecodeMean(3, 300, 6, 0.01), 2.0), status(None, 9.0), status(DecodeMean(1, 100, 0, 0.01), 1.0)]
    assert reported_speculation(reports) == (7 / 4, 6 / 4)
