"""The loop that watches engines goes on after a look that fails."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.moves.home_watch import HomeWatch
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings
from rhyme_openrlhf.telemetry.events import Note
from tests import virtual_time
from tests.moves.fakes import OnDevices


def test_a_look_that_fails_is_told_once_and_the_next_one_comes() -> None:
    """Else devices that another layout has are never handed back, and the next step waits at engines that sleep."""
    plan = LayoutPlan(2, 1, (Tail(1, 2),))
    settings = dataclasses.replace(RhymeSettings(), tp_switch=TpSwitchSettings(enable=True, status_s=0.02))
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        raise ZeroDivisionError("a fault of the policy")

    async def main() -> list[Any]:
        events: list[Any] = []
        mover: Any = None
        keeper = SampleKeeper({number: OnDevices(lambda _: "") for number in range(3)}, 0.001)
        watch = HomeWatch(settings, plan, keeper, mover, events.append, lambda: 1, lambda: True)
        assert watch.switcher is not None
        watch.switcher.look = look  # type: ignore[method-assign]
        await watch.open({})
        await asyncio.sleep(0.2)
        watch.close()
        return events

    events = virtual_time.run(main(), 10)
    assert len(looks) > 3
    assert events == [
        Note("warning", "no sample was moved by itself in this look: ZeroDivisionError: a fault of the policy")
    ]
