"""A real engine whose core kills itself at a named moment of a move: between two of its own instructions.

So no test has to hit a moment from outside: what was done by then is done, what comes behind it never is. Its folder
must be on the engine process's path, where a package named `tests` is another one's.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from rhyme_openrlhf.config import RhymeSettings
from rhyme_openrlhf.rollout.moves.movable_engine import MovableEngine
from rhyme_openrlhf.rollout.moves.moving_scheduler import MovingHistoryScheduler


class DyingScheduler(MovingHistoryScheduler):
    """The run's own; `die_at` names the moment, the others call `_moment` where they are."""

    CALLABLE = (*MovingHistoryScheduler.CALLABLE, "die_at")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dies_at = ""

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


class DyingEngine(MovableEngine):
    """The run's engine with that scheduler."""

    @staticmethod
    def plugins(rhyme: RhymeSettings) -> dict[str, Any]:
        return MovableEngine.plugins(rhyme) | {"scheduler_cls": f"{Path(__file__).stem}.{DyingScheduler.__name__}"}
