"""One thread, most urgent first."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rhyme_openrlhf.history.work_queue import Urgency, WorkQueue


def test_the_most_urgent_goes_first_and_equals_in_order() -> None:
    order: list[str] = []

    async def main() -> None:
        queue = WorkQueue("test")
        hold = threading.Event()
        first = queue.give(Urgency.LATER, lambda: hold.wait(20))
        await asyncio.sleep(0)
        given = [
            (Urgency.LATER, "l1"),
            (Urgency.KEPT, "k1"),
            (Urgency.ASKED, "a"),
            (Urgency.KEPT, "k2"),
            (Urgency.LATER, "l2"),
            (Urgency.COMING, "c"),
        ]
        work = [queue.give(urgency, lambda name=name: order.append(name)) for urgency, name in given]  # type: ignore[misc]
        # The first is running already, or was the first given: it is not preempted.
        hold.set()
        await asyncio.gather(first, *work)

    asyncio.run(main())
    assert order == ["a", "k1", "k2", "c", "l1", "l2"]


def test_results_and_errors_reach_who_asked_and_work_goes_on() -> None:
    def fails() -> None:
        raise OSError("full")

    async def main() -> None:
        queue = WorkQueue("test")
        failed = queue.give(Urgency.KEPT, fails)
        given_up = queue.give(Urgency.KEPT, lambda: 1)
        given_up.cancel()
        assert await queue.give(Urgency.KEPT, lambda: 7) == 7
        with pytest.raises(OSError, match="full"):
            await failed

    asyncio.run(main())


def test_only_one_piece_of_work_runs_at_a_time() -> None:
    running = []
    most = []

    def work() -> None:
        running.append(1)
        most.append(len(running))
        threading.Event().wait(0.005)
        running.pop()

    async def main() -> None:
        queue = WorkQueue("test")
        await asyncio.gather(*(queue.give(Urgency.KEPT, work) for _ in range(8)))

    asyncio.run(main())
    assert max(most) == 1
