"""The history worker on real Ray, and an engine's feed from it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from rhyme_openrlhf.engine.actor_parts.histories import PREFIX, HistoryFeed  # noqa: E402
from rhyme_openrlhf.engine.calls import SchedulerDrafting  # noqa: E402
from rhyme_openrlhf.history.index import DraftIndex, Piece  # noqa: E402
from rhyme_openrlhf.history.worker import PromptRollout  # noqa: E402
from rhyme_openrlhf.history.workers import last_lengths, start_history_workers, stop_history_workers  # noqa: E402
from rhyme_openrlhf.prompt_keys import owner, prompt_key  # noqa: E402
from rhyme_openrlhf.settings.history import HistorySettings  # noqa: E402
from rhyme_openrlhf.shared_files import SHARED_MEMORY, owned_prefix  # noqa: E402
from rhyme_openrlhf.telemetry.events import HistoryState, Note  # noqa: E402


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, starts_ray: None) -> Iterator[list[Any]]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield start_history_workers(HistorySettings(workers=2, cpus_per_worker=0), tmp_path_factory.mktemp("history"))
    ray.shutdown()


class Scheduler:
    """Stands for the engine core: reads an index file while it is there, as the real one maps it."""

    def __init__(self, answer: str = "") -> None:
        self.answer = answer
        self.indexes: dict[str, DraftIndex] = {}

    async def call(self, method: Any, key: str, path: str = "") -> str:
        if method is SchedulerDrafting.forget_history:
            del self.indexes[key]
        else:
            self.indexes[key] = DraftIndex.from_buffer(np.fromfile(path, dtype=np.uint8))
        return self.answer


def record(workers: list[Any], prompt: str, tokens: list[int], step: int) -> str:
    key = prompt_key(prompt)
    rollout = PromptRollout(key, (Piece([1, 2, 3], tokens, 1.0),), (len(tokens),))
    ray.get(workers[owner(key, len(workers))].record.remote(step, [rollout]))
    return key


def test_what_was_recorded_comes_back_as_drafts(workers: list[Any]) -> None:
    scheduler = Scheduler()
    feed = HistoryFeed(workers, scheduler.call, timeout_s=30)
    keys = [record(workers, f"prompt {n}", [10 + n, 11 + n, 12 + n, 13 + n], step=1) for n in range(6)]

    async def install_all() -> None:
        await asyncio.gather(*(feed.install(key) for key in [*keys, prompt_key("never seen")]))

    asyncio.run(install_all())
    assert set(scheduler.indexes) == set(keys)
    assert scheduler.indexes[keys[2]].draft([1, 2, 3], 7, 3, 8).tokens == [12, 13, 14, 15]
    assert sum(ray.get([worker.prompts.remote() for worker in workers])) == 6
    asyncio.run(feed.forget(keys[2]))
    assert keys[2] not in scheduler.indexes
    assert feed.take_problems() == []
    assert not list(SHARED_MEMORY.glob(owned_prefix(PREFIX) + "*"))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition`, through calls that fail while an actor is away."""
    deadline = time.time() + 60
    while time.time() < deadline:
        try:
            if condition():
                return
        except ray.exceptions.RayError:
            pass
        time.sleep(0.1)
    pytest.fail(f"waited 60 s for {what}")


def test_a_dead_worker_costs_drafts_and_nothing_else(workers: list[Any], tmp_path: Path) -> None:
    (worker,) = start_history_workers(HistorySettings(workers=1, cpus_per_worker=0), tmp_path)
    key = record([worker], "lost", [5, 6, 7, 8], step=1)
    ray.kill(worker, no_restart=True)

    def dead() -> bool:
        try:
            ray.get(worker.prompts.remote(), timeout=10)
        except ray.exceptions.ActorDiedError:
            return True
        return False

    wait_until(dead, "the history worker to be gone")
    scheduler = Scheduler()
    feed = HistoryFeed([worker], scheduler.call, timeout_s=20)
    asyncio.run(feed.install(key))
    assert scheduler.indexes == {}
    assert feed.take_problems()[0].startswith("history worker 0 failed: ")
    # Planning by lengths goes on without the lengths of its prompts.
    owned = {owner(other, 2): other for other in map(prompt_key, "abcdefgh")}
    known = PromptRollout(owned[1], (), (7, 30))
    ray.get(workers[0].record.remote(1, [known]))
    missed: list[Exception] = []
    asked = [owned[0], owned[1], owned[1]]
    assert last_lengths([worker, workers[0]], asked, 20, missed.append) == [(), (7, 30), (7, 30)]
    assert [type(error) for error in missed] == [ray.exceptions.ActorDiedError]
    assert last_lengths([], [key], timeout_s=20) == [()]


def test_a_worker_that_dies_has_its_history_again(workers: list[Any], tmp_path: Path) -> None:
    (worker,) = start_history_workers(HistorySettings(workers=1, cpus_per_worker=0), tmp_path)
    key = record([worker], "again", [5, 6, 7, 8], step=1)
    process = ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: ray.get(worker.prompts.remote(), timeout=10) == 1, "the history worker to be restarted")
    scheduler = Scheduler()
    asyncio.run(HistoryFeed([worker], scheduler.call, timeout_s=30).install(key))
    assert scheduler.indexes[key].draft([1, 2, 3], 7, 3, 8).tokens == [5, 6, 7, 8]
    record([worker], "other", [5, 6, 7, 8], step=2)
    assert ray.get(worker.prompts.remote()) == 2


def test_a_worker_without_a_place_for_its_journal_works(workers: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (worker,) = start_history_workers(HistorySettings(workers=1, cpus_per_worker=0), tmp_path / "file")
    record([worker], "again", [5, 6, 7, 8], step=1)
    assert ray.get(worker.prompts.remote()) == 1


def test_a_checkpoint_brings_history_back_to_any_number_of_workers(workers: list[Any], tmp_path: Path) -> None:
    two = start_history_workers(HistorySettings(workers=2, cpus_per_worker=0), tmp_path / "first")
    keys = [record(two, f"prompt {n}", [10 + n, 11 + n, 12 + n], step=3) for n in range(6)]
    record(two, "of a step that was not completed", [1, 2, 3], step=4)
    saved = [tmp_path / "history-0-of-2", tmp_path / "history-1-of-2"]
    ray.get([worker.save.remote(path, 3) for worker, path in zip(two, saved, strict=True)])
    saved.append(tmp_path / "deleted since")
    for number in (1, 2, 3):
        started = start_history_workers(
            HistorySettings(workers=number, cpus_per_worker=0), tmp_path / str(number), saved
        )
        # Waits for the processes too: starting them takes longer than a prompt waits for its index.
        assert sum(ray.get([worker.prompts.remote() for worker in started])) == 6
        scheduler = Scheduler()
        feed = HistoryFeed(started, scheduler.call, timeout_s=30)
        for key in keys:
            asyncio.run(feed.install(key))
        assert sorted(scheduler.indexes) == sorted(keys)
        for worker in started:
            ray.kill(worker)


def test_a_worker_that_does_not_answer_is_given_up(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    @ray.remote
    class Slow:
        def index(self, key: str) -> None:
            if key != "known":
                time.sleep(60)

    slow = Slow.options(num_cpus=0, max_concurrency=8).remote()
    feed = HistoryFeed([slow], Scheduler().call, timeout_s=0.5)
    ray.get(slow.index.remote("known"))

    async def install(*keys: str) -> None:
        await asyncio.gather(*(feed.install(key) for key in keys))

    started = time.time()
    asyncio.run(install("any", "other"))
    assert time.time() - started < 20
    said = ["history worker 0 did not answer within 0.5 s: its prompts go on without drafts from history"]
    assert feed.take_problems() == said
    # Said once, until it has answered in between.
    asyncio.run(install("any"))
    assert feed.take_problems() == []
    # The short limit is for what is not answered.
    with monkeypatch.context() as patient:
        patient.setattr(feed, "_timeout_s", 60.0)
        asyncio.run(HistoryFeed.install(feed, "known"))
    asyncio.run(install("any"))
    assert feed.take_problems() == said
    ray.kill(slow)


@pytest.fixture(scope="module")
def notes(workers: list[Any]) -> Any:
    """Stands for the run's recorder."""

    @ray.remote
    class Notes:
        def __init__(self) -> None:
            self.events: list[Any] = []

        def write(self, event: Any, source: str, at: float) -> None:
            assert source == "history"
            self.events.append(event)

        def take(self) -> list[Any]:
            return self.events

    return Notes.options(num_cpus=0, name="notes").remote()


def taken(notes: Any) -> list[Any]:
    events: list[Any] = ray.get(notes.take.remote())
    return events


def big(prompt: str, seed: int) -> PromptRollout:
    tokens = np.random.default_rng(seed).integers(0, 50_000, 4000)
    return PromptRollout(prompt_key(prompt), (Piece([1, 2, 3], tokens, 1.0),), (tokens.size,))


def drafts(index: np.ndarray, rollout: PromptRollout) -> bool:
    (piece,) = rollout.pieces
    return DraftIndex.from_buffer(index).draft(piece.tokens[:8], 7, 3, 8).tokens == piece.tokens[8:16].tolist()


def test_a_full_disk_is_told_once_and_indexes_are_built_again(notes: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    settings = HistorySettings(cpus_per_worker=0, memory_gb=0.001, spill_dir=str(tmp_path / "disk"))
    (worker,) = start_history_workers(settings, tmp_path / "history", (), "notes")
    rollouts = [big(f"prompt {n}", n) for n in range(40)]
    ray.get(worker.record.remote(1, rollouts))
    found = ray.get([worker.index.remote(rollout.prompt_key) for rollout in rollouts])
    assert all(map(drafts, found, rollouts))
    # The worker does not wait for its messages to arrive, but they arrive in their order.
    ray.get(worker.record.remote(2, rollouts[:1]))
    wait_until(lambda: any(isinstance(event, HistoryState) and event.step == 2 for event in taken(notes)), "step 2")
    warnings = [event.text for event in taken(notes) if isinstance(event, Note)]
    assert len(warnings) == 1 and "history worker 0 cannot write draft indexes to" in warnings[0]
    stop_history_workers([worker])
    ray.kill(worker)


def test_a_refused_index_is_noted(workers: list[Any]) -> None:
    key = record(workers, "refused", [5, 6, 7, 8], step=3)
    feed = HistoryFeed(workers, Scheduler(answer="draft index refused: why").call, timeout_s=30)
    asyncio.run(feed.install(key))
    assert feed.take_problems() == ["draft index refused: why"]


def test_no_worker_means_no_history() -> None:
    feed = HistoryFeed([], Scheduler().call, timeout_s=1)
    asyncio.run(feed.install("any"))
    assert feed.take_problems() == []


def test_index_files_are_removed_even_when_the_scheduler_fails(workers: list[Any], tmp_path: Path) -> None:
    key = record(workers, "fails", [5, 6, 7, 8], step=3)

    async def broken(*_: Any) -> str:
        raise OSError("no")

    feed = HistoryFeed(workers, broken, timeout_s=30)
    asyncio.run(feed.install(key))
    assert "could not be written" in feed.take_problems()[0]
    assert not list(SHARED_MEMORY.glob(owned_prefix(PREFIX) + "*"))


def test_index_files_of_an_engine_that_was_killed_are_removed_by_the_next() -> None:
    left = SHARED_MEMORY / f"{PREFIX}-{os.getpid()}-1-abc"
    left.touch()
    HistoryFeed([], Scheduler().call, timeout_s=1)
    assert not left.exists()
