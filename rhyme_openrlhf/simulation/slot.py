"""An engine's place in a run."""

from __future__ import annotations

from rhyme_openrlhf.simulation.engine import Engine


class Slot:
    """An engine and where it stands. `step`: the one it works on or last worked on, 0 before the first.

    `idle_since`: None while it has something to run or begins, and while its devices belong to another layout.
    `counted_busy`: seconds of its engine that are counted to a step. `arriving`: samples on their way to it; `below`:
    its deferred samples, which do not keep it from its next step.
    """

    def __init__(self, place: int, node: int, devices: int, engine: Engine) -> None:
        self.place = place
        self.node = node
        self.devices = devices
        self.engine = engine
        self.step = 0
        self.version = 0
        self.beginning = False
        self.idle_since: float | None = 0.0
        self.stamp = 0
        self.counted_busy = 0.0
        self.arriving = 0
        self.below: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether it has nothing to run, or on its way, but what was deferred."""
        load = self.engine.load
        return not self.arriving and (not load or load == len(self.below))
