"""What all engines of one layout reported last, as of a moment: for whoever decides on many nodes in that moment.

Invariant: made once for all nodes, so a look at them takes as long as there are engines, not as nodes times engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rhyme_openrlhf.scheduling.engine_status import EngineStatus, reported_speculation


class LayoutReports:
    """`statuses`: those of one layout that are fresh (`EngineReports.fresh`)."""

    def __init__(self, statuses: Sequence[EngineStatus]) -> None:
        self._by_engine = {status.engine: status for status in statuses}

    def of(self, engines: Sequence[int]) -> list[EngineStatus]:
        """Those of these engines that are there, in this order."""
        return [self._by_engine[engine] for engine in engines if engine in self._by_engine]

    @cached_property
    def contexts(self) -> dict[str, int]:
        """Of each sample, by its place."""
        return {sample.place: sample.context for status in self._by_engine.values() for sample in status.samples}

    @cached_property
    def speculation(self) -> tuple[float, float]:
        """Tokens and draft tokens of a sample's decode step, on those of the engines that have samples."""
        return reported_speculation(status for status in self._by_engine.values() if status.samples)
