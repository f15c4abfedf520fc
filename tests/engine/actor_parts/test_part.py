"""Orders beside each other, and what excludes them."""

from __future__ import annotations

import asyncio

from rhyme_openrlhf.engine.actor_parts.part import OrdersLock
from tests import virtual_time


async def order(lock: OrdersLock, place: str, told: list[str], go: asyncio.Event) -> None:
    """Of the sample at `place`: said when it has its turn, and over when it may go."""
    async with lock.of(place):
        told.append(place)
        await go.wait()


def test_only_orders_about_the_same_sample_exclude_each_other() -> None:
    async def main() -> None:
        lock, told, go = OrdersLock(), [], asyncio.Event()
        orders = [asyncio.create_task(order(lock, place, told, go)) for place in "abab"]
        await asyncio.sleep(0.01)
        assert told == ["a", "b"]
        go.set()
        await asyncio.gather(*orders)
        assert told == ["a", "b", "a", "b"]

    virtual_time.run(main(), 10)


def test_a_weight_load_waits_for_orders_and_keeps_others_out() -> None:
    async def main() -> None:
        lock, told, go = OrdersLock(), [], asyncio.Event()

        async def load() -> None:
            async with lock.all():
                told.append("load")

        tasks = [asyncio.create_task(order(lock, "a", told, go))]
        await asyncio.sleep(0.01)
        given_up, *loads = [asyncio.create_task(load()) for _ in range(3)]
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(order(lock, "b", told, go)), *loads]
        await asyncio.sleep(0.01)
        assert told == ["a"]
        given_up.cancel()
        await asyncio.sleep(0.01)
        assert told == ["a"]
        go.set()
        await asyncio.gather(*tasks)
        assert sorted(told) == ["a", "b", "load", "load"] and told[1] == "load"

    virtual_time.run(main(), 10)
