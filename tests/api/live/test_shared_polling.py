"""Looks that many share: one read a tick, every change told, and an end for all when the store does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Set

from sqlalchemy.exc import OperationalError

from rhyme_openrlhf.api.live.shared_polling import SharedLook, Sleeper

TICK = 0.01
END_SECONDS = 20.0


class Store:
    """A watched source; `looks` are the keys of each look."""

    def __init__(self) -> None:
        self.values = {"a": 1, "b": 1}
        self.looks: list[Set[str]] = []
        self.broken = False

    def look(self, keys: Set[str]) -> dict[str, int]:
        assert threading.current_thread() is not threading.main_thread()
        self.looks.append(keys)
        if self.broken:
            raise OperationalError("look", {}, Exception("gone"))
        return {key: self.values[key] for key in keys}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(END_SECONDS):
        while not condition():
            await asyncio.sleep(TICK)


def ignore(*_: object) -> None:
    pass


def test_all_keys_are_read_in_one_look_and_only_their_watchers_told() -> None:
    async def watch() -> None:
        store = Store()
        shared = SharedLook(store.look, TICK)
        told: list[tuple[str, int]] = []
        with (
            shared.watch("a", lambda value: told.append(("first", value)), ignore),
            shared.watch("a", lambda value: told.append(("second", value)), ignore),
            shared.watch("b", lambda value: told.append(("other", value)), ignore),
        ):
            await until(lambda: len(told) == 3)
            assert set(store.looks) == {frozenset("ab")}
            store.values["a"] = 2
            await until(lambda: len(told) == 5)
            assert sorted(told[3:]) == [("first", 2), ("second", 2)] and shared.value("a") == 2

    asyncio.run(watch())


def test_nothing_is_read_while_nobody_watches_and_no_old_value_is_kept() -> None:
    async def watch() -> None:
        store = Store()
        shared = SharedLook(store.look, TICK)
        for _ in range(2):
            assert shared.value("a") is None
            with shared.watch("a", ignore, ignore):
                await until(lambda: shared.value("a") == 1)
            count = len(store.looks)
            await asyncio.sleep(10 * TICK)
            # One may have been under way.
            assert len(store.looks) <= count + 1

    asyncio.run(watch())


def test_a_look_that_fails_ends_its_watchers_and_the_next_watcher_has_looks_again() -> None:
    async def watch() -> None:
        store = Store()
        shared = SharedLook(store.look, TICK)
        stream = Sleeper()
        store.broken = True
        with shared.watch("a", ignore, stream.end):
            async with asyncio.timeout(END_SECONDS):
                while await stream.look_due():
                    pass
        store.broken = False
        with shared.watch("a", ignore, ignore):
            await until(lambda: shared.value("a") == 1)

    asyncio.run(watch())


def test_what_wakes_a_stream_during_its_look_makes_the_next_look_due() -> None:
    async def sleep() -> None:
        stream = Sleeper()
        assert await stream.look_due()
        stream.wake()
        assert await stream.look_due()
        stream.end()
        assert not await stream.look_due()

    asyncio.run(sleep())
