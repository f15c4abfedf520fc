"""A history worker's memory, disk and prompt lengths; the actor's class, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from rhyme_openrlhf.history import worker as worker_module
from rhyme_openrlhf.history.index import DraftIndex, Piece
from rhyme_openrlhf.history.worker import PlainHistoryWorker, PromptRollout, WorkerPlace
from rhyme_openrlhf.prompt_keys import owner, prompt_key, round_key
from rhyme_openrlhf.settings.history import HistorySettings
from rhyme_openrlhf.telemetry.events import HistoryState, Note, RankStability

TOKEN = b"a run's own 16 b"
TOKENS = 4000
# Room for some of forty indexes of 4,000 tokens.
LITTLE = 1_000_000
RECORDER = "recorder"


class Recorder:
    """Stands for the run's recorder."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.write = SimpleNamespace(remote=lambda event, source, at: self.events.append(event))

    def take(self, kind: type) -> list[Any]:
        """The events of a kind since the last call; the others are gone then."""
        events, self.events = self.events, []
        return [event for event in events if isinstance(event, kind)]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    # The tests' own process keeps its priority.
    monkeypatch.setattr(worker_module, "limit_cpus", lambda cpus, nice: "what it has")
    stand_in = Recorder()
    monkeypatch.setattr(worker_module.ray, "get_actor", {RECORDER: stand_in}.__getitem__)
    return stand_in


def a_worker(
    path: Path, memory: int = 10**9, number: int = 0, workers: int = 1,
    checkpoint: tuple[Path, ...] = (), **settings: Any,
) -> PlainHistoryWorker:  # fmt: skip
    place = WorkerPlace(
        number, workers, path / f"{number}.journal", TOKEN, checkpoint, memory, path / "spilled",
        HistorySettings(**settings), RECORDER,
    )  # fmt: skip
    return PlainHistoryWorker(place)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(limited())


def rollout(prompt: str, seed: int, number: int = 0) -> PromptRollout:
    tokens = np.random.default_rng(seed).integers(0, 50_000, TOKENS)
    return PromptRollout(round_key(prompt_key(prompt), number), (Piece([1, 2, 3], tokens, 1.0),), (tokens.size,))


def drafts(index: np.ndarray | None, of: PromptRollout) -> bool:
    (piece,) = of.pieces
    assert index is not None
    return DraftIndex.from_buffer(index).draft(piece.tokens[:8], 7, 3, 8).tokens == piece.tokens[8:16].tolist()  # type: ignore[union-attr]


def test_indexes_beyond_the_memory_are_on_the_disk_and_come_back(tmp_path: Path, recorder: Recorder) -> None:
    async def test() -> None:
        worker = a_worker(tmp_path, LITTLE)
        rollouts = [rollout(f"prompt {n}", n) for n in range(40)]
        await worker.record(1, rollouts)
        (state,) = recorder.take(HistoryState)
        assert (state.step, state.worker, state.prompts, state.resident + state.spilled) == (1, 0, 40, 40)
        assert 0 < state.resident < 40 and state.memory_bytes <= LITTLE
        assert 0 < state.disk_bytes < state.spilled * 16 * TOKENS
        # What was recorded last is needed last: it is on the disk, and comes back when it is announced.
        announced = [one.prompt_key for one in rollouts[-5:]]
        await worker.prepare([*announced, prompt_key("never seen")], 2)
        for one in reversed(rollouts[-10:]):
            assert drafts(await worker.index(one.prompt_key), one)
        assert await worker.index(prompt_key("never seen")) is None
        await worker.record(2, rollouts[:1])
        (state,) = recorder.take(HistoryState)
        assert (state.hits, state.late, state.misses) == (5, 5, 1)
        assert list((tmp_path / "spilled").rglob("*.index"))
        await worker.close()
        assert not (tmp_path / "spilled").exists()
        assert recorder.take(Note) == []

    in_loop(test)


def test_all_rounds_of_an_announced_prompt_come_back(tmp_path: Path, recorder: Recorder) -> None:
    async def test() -> None:
        worker = a_worker(tmp_path, LITTLE)
        conversation = [rollout("conversation", number, number) for number in range(3)]
        await worker.record(1, [*(rollout(f"prompt {n}", n) for n in range(30)), *conversation])
        recorder.take(Note)
        await worker.prepare([prompt_key("conversation")], 2)
        assert all([drafts(await worker.index(one.prompt_key), one) for one in conversation])
        await worker.record(2, [])
        assert recorder.take(HistoryState)[0].hits == 3

    in_loop(test)


def test_responses_that_alone_are_over_the_memory_are_kept_and_told_once(tmp_path: Path, recorder: Recorder) -> None:
    async def test() -> None:
        worker = a_worker(tmp_path, LITTLE // 4)
        rollouts = [rollout(f"prompt {n}", n) for n in range(40)]
        await worker.record(1, rollouts)
        for one in rollouts:
            assert drafts(await worker.index(one.prompt_key), one)
        (warning,) = recorder.take(Note)
        assert (
            "history worker 0 holds 0.0 GB of responses alone, above its share of --history.memory_gb" in warning.text
        )
        assert await worker.prompts() == 40

    in_loop(test)


def test_a_restarted_worker_builds_its_indexes_before_they_are_asked_for(tmp_path: Path, recorder: Recorder) -> None:
    one = rollout("again", 3)

    async def first() -> None:
        await a_worker(tmp_path).record(1, [one])

    async def second() -> None:
        worker = a_worker(tmp_path)
        assert await worker.prompts() == 1
        # As urgent as the building of what was read, and given after it.
        await worker.report_ranks(1, await worker.epoch_lengths(1, 1))
        assert drafts(await worker.index(one.prompt_key), one)
        await worker.record(2, [])
        (state,) = recorder.take(HistoryState)
        assert (state.hits, state.late) == (1, 0)

    in_loop(first)
    recorder.take(Note)
    in_loop(second)


def test_an_index_is_of_the_newest_responses_while_they_arrive(tmp_path: Path, recorder: Recorder) -> None:
    async def test() -> None:
        worker = a_worker(tmp_path)
        old, new = rollout("p", 1), rollout("p", 2)
        await worker.record(1, [old])
        arriving = asyncio.create_task(worker.record(2, [new, *(rollout(f"prompt {n}", n) for n in range(5))]))
        await asyncio.sleep(0)  # it begins
        await worker.prompts()  # given after its responses, and as urgent
        assert drafts(await worker.index(new.prompt_key), new)
        await arriving

    in_loop(test)


@pytest.mark.parametrize("rollouts", [1, 2])
def test_as_many_rollouts_as_asked_for_are_drafted_from(tmp_path: Path, recorder: Recorder, rollouts: int) -> None:
    async def test() -> None:
        worker = a_worker(tmp_path, rollouts=rollouts)
        epochs = [rollout("p", seed) for seed in range(3)]
        for step, one in enumerate(epochs):
            await worker.record(step, [one])
        index = await worker.index(epochs[0].prompt_key)
        assert [drafts(index, one) for one in epochs] == [False, rollouts == 2, True]

    in_loop(test)


def test_ranks_of_an_epoch_are_of_all_workers_together_also_after_a_resume(tmp_path: Path, recorder: Recorder) -> None:
    """Eight prompts whose lengths keep their order but for the shortest, which becomes the longest."""
    lengths = {f"prompt {n}": 10 * n for n in range(1, 9)}

    async def record_epoch(workers: list[PlainHistoryWorker], step: int) -> None:
        for prompt, length in lengths.items():
            key = prompt_key(prompt)
            await workers[owner(key, len(workers))].record(step, [PromptRollout(key, (), (length, length))])

    async def test() -> None:
        two = [a_worker(tmp_path / "first", number=number, workers=2) for number in range(2)]
        await record_epoch(two, step=1)
        saved = tuple(tmp_path / f"history-{number}-of-2" for number in range(2))
        for worker, path in zip(two, saved, strict=True):
            await worker.save(path, 1)
        three = [a_worker(tmp_path / "resumed", number=number, workers=3, checkpoint=saved) for number in range(3)]
        lengths["prompt 1"] = 500
        for workers in (two, three):
            await record_epoch(workers, step=2)
            await workers[0].report_ranks(2, *[await worker.epoch_lengths(2, 2) for worker in workers])
            (event,) = recorder.take(RankStability)
            assert (event.epoch, event.prompts, event.responses, event.groups) == (2, 8, 16, 8)
            # The one that became the longest moved up; all others moved down by one group.
            assert (event.accurate, event.migrated) == (14 / 16, 1 / 16)
            assert event.correlation < 1
            key = prompt_key("prompt 1")
            known = await workers[owner(key, len(workers))].median_lengths([key, "unknown"])
            assert known == [((1, 10.0), (2, 500.0)), ()]

    in_loop(test)


def test_nothing_is_recorded_of_a_first_epoch(tmp_path: Path, recorder: Recorder) -> None:
    async def test() -> None:
        worker = a_worker(tmp_path)
        await worker.record(1, [rollout("p", 1)])
        await worker.report_ranks(1, await worker.epoch_lengths(1, 1))
        assert recorder.take(RankStability) == []

    in_loop(test)


def test_a_recorder_that_is_gone_loses_the_record_and_nothing_else(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(name: str) -> Any:
        raise ValueError(f"no actor {name}")

    monkeypatch.setattr(worker_module.ray, "get_actor", gone)

    async def test() -> None:
        worker, rollouts = a_worker(tmp_path, LITTLE // 4), [rollout(f"prompt {n}", n) for n in range(40)]
        # It warns of its memory.
        await worker.record(1, rollouts)
        assert await worker.prompts() == 40

    in_loop(test)
    assert recorder.events == []
