"""A `ProfileEngine` actor as plain calls that wait, with a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhyme_openrlhf.latency.grid import Limits, PrefillShape, StepShape
from rhyme_openrlhf.verify.engines import wait


class RemoteEngine:
    """Raises VerifyError where the engine fails or does not answer in time."""

    def __init__(self, actor: Any, limit_s: float) -> None:
        self._actor = actor
        self._limit_s = limit_s

    def limits(self) -> Limits:
        """What the engine can hold."""
        return self._wait(self._actor.limits.remote(), "the engine's limits")

    def padded_rows(self) -> tuple[int, ...]:
        """Token counts to which the engine pads a step."""
        return tuple(self._wait(self._actor.padded_rows.remote(), "the engine's padding"))

    def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]:
        """See `ProfileEngine.decode_steps`."""
        return self._wait(self._actor.decode_steps.remote(shape, steps), f"decode steps of {shape}")

    def prefill(self, shape: PrefillShape) -> float:
        """See `ProfileEngine.prefill`."""
        return self._wait(self._actor.prefill.remote(shape), f"a prefill of {shape}")

    def _wait(self, ref: Any, what: str) -> Any:
        return wait(ref, self._limit_s, what)
