"""Draft indexes that an engine holds while it generates for prompts and their rounds."""

from __future__ import annotations

import asyncio

from rhyme_openrlhf.engine.actor_parts.histories import Histories
from rhyme_openrlhf.prompt_keys import round_key


class Feed:
    """Stands for the engine's feed. `hang`: keys whose worker never answers."""

    def __init__(self, hang: tuple[str, ...] = ()) -> None:
        self.hang = hang
        self.fetched: list[str] = []
        self.held: set[str] = set()

    async def install(self, key: str) -> None:
        self.fetched.append(key)
        if key in self.hang:
            await asyncio.Event().wait()
        self.held.add(key)

    async def forget(self, key: str) -> None:
        await asyncio.sleep(0)
        self.held.discard(key)


def in_flight(feed: Feed) -> Histories:
    return Histories(feed)  # type: ignore[arg-type]


def test_each_round_is_fetched_once_however_many_samples_get_there() -> None:
    async def main() -> None:
        feed = Feed()
        histories = in_flight(feed)
        await histories.begin("k")
        assert feed.held == {"k"}
        keys = []
        for number in (0, 1, 2, 0, 0, 1):
            key, fetch = histories.round("k", number)
            assert fetch is not None
            await fetch
            keys.append(key)
        assert keys == [round_key("k", number) for number in (0, 1, 2, 0, 0, 1)]
        assert feed.fetched == [round_key("k", number) for number in range(3)]
        await histories.end("k")
        assert feed.held == set()

    asyncio.run(main())


def test_a_duplicate_prompt_shares_the_history_until_both_have_ended() -> None:
    async def main() -> None:
        feed = Feed()
        histories = in_flight(feed)
        await histories.begin("k")
        await histories.begin("k")
        await histories.end("k")
        assert feed.held == {"k"}
        await histories.end("k")
        assert (feed.held, feed.fetched) == (set(), ["k"])

    asyncio.run(main())


def test_a_worker_that_hangs_holds_nothing_up() -> None:
    async def main() -> None:
        feed = Feed(hang=("k",))
        histories = in_flight(feed)
        fetch = histories.begin("k")
        await asyncio.sleep(0)
        await asyncio.wait_for(histories.end("k"), 20)
        assert fetch.cancelled()

    asyncio.run(main())


def test_a_prompt_that_comes_again_while_it_is_forgotten_keeps_its_history() -> None:
    async def main() -> None:
        feed = Feed()
        histories = in_flight(feed)
        await histories.begin("k")
        ending = asyncio.create_task(histories.end("k"))
        await asyncio.sleep(0)
        again = histories.begin("k")
        await ending
        await again
        assert feed.held == {"k"}

    asyncio.run(main())


def test_nothing_is_fetched_for_a_request_outside_of_a_call() -> None:
    async def main() -> None:
        feed = Feed()
        histories = in_flight(feed)
        assert [histories.round("k", number) for number in range(2)] == [("k", None), (round_key("k", 1), None)]
        assert feed.fetched == []

    asyncio.run(main())
