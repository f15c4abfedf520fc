"""Reports of all engines of a layout, merged once."""

from __future__ import annotations

from rhyme_openrlhf.moves.engine_reports import LayoutReports
from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus, SampleStatus

BUSY, IDLE = DecodeMean(3, 300, 6, 0.01), DecodeMean(1, 100, 0, 0.01)


def status(
    engine: int, contexts: dict[str, int], decode: DecodeMean | None = None, gained: float = 1.0
) -> EngineStatus:
    samples = tuple(SampleStatus(place, context) for place, context in contexts.items())
    return EngineStatus(engine, samples, 1, 1, 0, True, 1, 2048, tokens_per_step=gained, decode=decode)


def test_engines_are_found_in_the_order_asked_for() -> None:
    one, other = status(4, {"a": 10, "b": 20}, BUSY, 2.0), status(2, {"c": 30}, IDLE)
    reports = LayoutReports([one, other, status(7, {}, BUSY, 9.0)])
    assert reports.of([2, 3, 4]) == [other, one]
    assert reports.contexts == {"a": 10, "b": 20, "c": 30}
    # An engine without samples says nothing of how samples decode now.
    assert reports.speculation == (7 / 4, 6 / 4)
