"""Engines of one node that share what computes, as several on one CPU do: the more at work, the slower each.

How slow is measured: profiles of an engine with others beside it (`rhyme profile --beside`). Without such profiles
engines are independent and nothing here does anything.

Invariant: a step that has begun keeps its time; the next one has that of as many engines as are at work by then, or of
the next smaller number that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation.engine_kinds import engine_kind
from rhyme_openrlhf.simulation.slot import Slot

if TYPE_CHECKING:
    from rhyme_openrlhf.simulation.run import Run


class Sharing:
    """That of one run. `crowds`: profiles by the number of engines at work at once, from 2 on."""

    def __init__(self, run: Run, crowds: Mapping[int, Profile]) -> None:
        self._run = run
        alone = run.kinds[run.cluster.tensor_parallel]
        self._kinds = {1: alone}
        for number, profile in crowds.items():
            kind = engine_kind(profile, run.cluster, run.features)
            self._kinds[number] = replace(kind, kv_tokens=alone.kv_tokens, transfer=alone.transfer)
        self._crowd: dict[int, int] = {}

    def work_changed(self, slot: Slot, now: float) -> None:
        """The engine has got something to run, or has nothing left."""
        if len(self._kinds) == 1 or slot.place < 0:
            return
        per_node = self._run.cluster.devices // self._run.cluster.tensor_parallel
        own = self._run.slots[slot.node * per_node : (slot.node + 1) * per_node]
        busy = sum(not other.engine.idle for other in own)
        number = max((known for known in self._kinds if known <= busy), default=1)
        if self._crowd.get(slot.node, 1) == number:
            return
        self._crowd[slot.node] = number
        for other in own:
            ended = other.engine.run_until(now) if other is not slot else []
            other.engine.become(self._kinds[number])
            if other is not slot and (ended or not other.engine.idle):
                self._run.ended(other, ended)
            if self._crowd[slot.node] != number:
                # What ended there has changed it again.
                return
