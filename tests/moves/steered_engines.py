"""Real engines that a test steers from outside: one holds samples until it may go on, one dies at a moment of a move.

A held sample has not ended when the test gets to its move, however slow the test's process is beside the engine's. An
engine that kills itself does so between two of its own instructions: what was done by then is done, what comes behind
it never is. So no test has to hit a moment. This folder must be on the engine process's path, where a package named
`tests` is another one's.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from rhyme_openrlhf.engine.actor import RhymeRolloutActor
from rhyme_openrlhf.engine.patches import queues
from rhyme_openrlhf.engine.scheduler import (
    AsyncEngineScheduler,
    EngineScheduler,
    LateEngineScheduler,
    scheduler_class,
)
from rhyme_openrlhf.engine.scheduler_parts.moves import Moves

PAUSE_S = 0.002


class Held:
    """A scheduler that schedules no sample that has reached the tokens of `hold_at`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hold_at = 0
        self.calls["hold_at"] = self.hold_at

    def hold_at(self, tokens: int) -> None:
        """Hold samples at `tokens` response tokens; 0 lets all go on."""
        self._hold_at = tokens

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = [one for one in self.running if self._hold_at and one.num_output_tokens >= self._hold_at]
        if not held:
            return super().schedule(*args, **kwargs)
        # Their seats stay theirs.
        self.running = [one for one in self.running if one not in held]
        queues.hold_seats(self, len(held))
        try:
            scheduled = super().schedule(*args, **kwargs)
        finally:
            self.running = held + self.running
            queues.hold_seats(self, -len(held))
        if not scheduled.total_num_scheduled_tokens:
            time.sleep(PAUSE_S)
        return scheduled


class HeldScheduler(Held, EngineScheduler):
    """The run's own."""


class HeldLateScheduler(Held, LateEngineScheduler):
    """The run's own with drafts and asynchronous scheduling."""


class HeldAsyncScheduler(Held, AsyncEngineScheduler):
    """The run's own with asynchronous scheduling."""


def held_scheduler(vllm_config: Any, **kwargs: Any) -> EngineScheduler:
    """Return an engine's scheduler, as the run's own is chosen."""
    kinds: tuple[type[EngineScheduler], ...] = (HeldScheduler, HeldAsyncScheduler, HeldLateScheduler)
    of_run = scheduler_class(vllm_config)
    return next(kind for kind in kinds if kind.__bases__[1] is of_run)(vllm_config=vllm_config, **kwargs)


class HeldEngine(RhymeRolloutActor):
    """The run's engine with that scheduler."""

    def plugins(self) -> dict[str, Any]:
        found = super().plugins() | {"scheduler_cls": f"{Path(__file__).stem}.{held_scheduler.__name__}"}
        if os.environ.get("RHYME_TEST_RUNNER") == "undrafted":
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
            found["async_scheduling"] = True
        return found


class DyingMoves(Moves):
    """The run's own; `die_at` names the moment, the others call `_moment` where they are."""

    _dies_at = ""

    def die_at(self, moment: str) -> None:
        """Kill this process when it gets there."""
        self._dies_at = moment

    def _moment(self, name: str) -> None:
        if name == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    # --- as a destination

    def hold_room(self, name: str, tokens: int) -> str:
        refused = super().hold_room(name, tokens)
        self._moment("room is held")
        return refused

    def import_rows(self, name: str, buffer: dict[str, Any], first: int, end: int) -> str:
        problem = super().import_rows(name, buffer, first, end)
        self._moment("blocks are staged")
        return problem

    def expects(self, request_id: str) -> bool:
        expected = super().expects(request_id)
        if expected:
            self._moment("sample is expected")
        return expected

    def _go_on(self, request: Any, arrival: Any) -> None:
        self._moment("sample is handed over to it")
        super()._go_on(request, arrival)
        self._moment("sample has gone on")

    def take_first_token(self, request_id: str) -> float | None:
        at = super().take_first_token(request_id)
        if at is not None:
            self._moment("sample has a token")
        return at

    # --- as a source

    def export_full(self, request_id: str, buffer: dict[str, Any]) -> tuple[int, str] | None:
        exported = super().export_full(request_id, buffer)
        self._moment("blocks are copied out")
        return exported

    def stop_sample(
        self, request_id: str, buffer: dict[str, Any] | None = None, first: int = 0, hand_over: bool = False
    ) -> dict[str, Any] | None:
        self._moment("sample is to stop")
        stopped = super().stop_sample(request_id, buffer, first, hand_over)
        if stopped is not None and hand_over and not stopped["problem"]:
            self._moment("sample is handed over")
        return stopped


class DyingScheduler(HeldScheduler):
    """The run's own with those moves."""

    moves_part = DyingMoves

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls["die_at"] = self.moves.die_at  # type: ignore[union-attr]


class DyingEngine(RhymeRolloutActor):
    """The run's engine with that scheduler."""

    def plugins(self) -> dict[str, Any]:
        return super().plugins() | {"scheduler_cls": f"{Path(__file__).stem}.{DyingScheduler.__name__}"}
