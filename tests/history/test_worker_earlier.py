"""A history worker leaves its responses to later runs, and drafts from those of earlier ones; without Ray."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from rhyme_openrlhf.history import worker as worker_module
from rhyme_openrlhf.history.archive import ArchiveReader
from rhyme_openrlhf.history.earlier import Sources
from rhyme_openrlhf.history.index import DraftIndex, Piece
from rhyme_openrlhf.history.lineage import Lineage
from rhyme_openrlhf.history.record import decode
from rhyme_openrlhf.history.store import archives_in
from rhyme_openrlhf.history.worker import PlainHistoryWorker, PromptRollout, WorkerPlace
from rhyme_openrlhf.prompt_keys import evaluation_key, prompt_key, round_key
from rhyme_openrlhf.settings.history import HistorySettings
from rhyme_openrlhf.telemetry.events import EarlierRun
from tests.history.archives import TOKENIZER, about

TOKEN = b"a run's own 16 b"
VOCABULARY = 1000
P, Q = prompt_key("p"), prompt_key("q")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the workers."""
    monkeypatch.setattr(worker_module, "limit_cpus", lambda cpus, nice: "what it has")
    said: list[str] = []
    monkeypatch.setattr(PlainHistoryWorker, "_warn", lambda self, what: said.append(what))
    return said


def a_worker(
    path: Path, *earlier: Path, store: Path | None = None, memory: int = 10**8, **settings: Any
) -> PlainHistoryWorker:
    """The only history worker of a run at `path`, which drafts from these runs, and from those in the store."""
    archive = (store / path.name) if store is not None else path / "history" / "archive"
    archives = tuple(found for run in earlier for found in archives_in(run))
    sources = Sources(archives, (store,) if store is not None else (), TOKENIZER, VOCABULARY, archive)
    place = WorkerPlace(
        0, 1, path / "0.journal", TOKEN, (), memory, path / "spilled", HistorySettings(**settings),
        lineage=Lineage(archive, about(path.name), sources),
    )  # fmt: skip
    return PlainHistoryWorker(place)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(limited())


def said(seed: int, key: str = P, size: int = 100) -> PromptRollout:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, size)
    return PromptRollout(key, (Piece([1, 2, 3], tokens, 1.0),), (tokens.size,))


def drafts(index: np.ndarray | None, of: PromptRollout) -> bool:
    (piece,) = of.pieces
    if index is None:
        return False
    tokens = np.asarray(piece.tokens)
    return DraftIndex.from_buffer(index).draft(tokens[:8], 7, 3, 8).tokens == tokens[8:16].tolist()


def test_a_run_drafts_from_the_run_before_it(tmp_path: Path, warnings: list[str]) -> None:
    rounds = [said(3, round_key(Q, number)) for number in range(2)]

    async def test() -> None:
        first = a_worker(tmp_path / "first")
        await first.record(1, [said(1), *rounds])
        await first.record(2, [said(2)])
        await first.close()
        second = a_worker(tmp_path / "second", tmp_path / "first")
        await second.prepare([P, Q], 1)
        # Announced, so they are in memory.
        assert all(drafts(second._store.resident(P), one) for one in (said(1), said(2)))
        assert all(drafts(second._store.resident(one.prompt_key), one) for one in rounds)
        (known,) = await second.known_earlier([P, Q, prompt_key("new")])
        assert (known.run, known.prompts, known.rollouts) == ("first", 2, 2)
        assert await second.last_lengths([P, Q, prompt_key("new")]) == [(100,), (100,), ()]
        assert await second.index(prompt_key("new")) is None
        # From its own responses on, too; its own lengths replace the earlier run's.
        await second.record(1, [said(5, P, 50)])
        assert await second.last_lengths([P]) == [(50,)]
        index = await second.index(P)
        assert drafts(index, said(5, P, 50)) and drafts(index, said(2)) and not drafts(index, said(1))
        await second.close()

    in_loop(test)
    assert warnings == []
    reader = ArchiveReader(archives_in(tmp_path / "second")[0])
    assert [decode(reader.read(stored) or b"").rollout_id for _, stored in reader.new()] == [1]


def test_runs_of_a_sweep_see_each_other_one_step_late(tmp_path: Path, warnings: list[str]) -> None:
    async def test() -> None:
        runs = [a_worker(tmp_path / name, store=tmp_path / "store") for name in ("one", "two")]
        for run in runs:
            await run.prepare([P], 1)
            assert await run.index(P) is None
        await runs[0].record(1, [said(1)])
        await runs[1].prepare([P], 2)
        assert drafts(await runs[1].index(P), said(1))
        await runs[1].record(1, [said(2)])
        await runs[0].prepare([P], 2)
        index = await runs[0].index(P)
        assert drafts(index, said(2)) and drafts(index, said(1))

    in_loop(test)
    assert warnings == []


def test_a_poisoned_run_is_left_out_after_a_step(tmp_path: Path, warnings: list[str]) -> None:
    """After any two tokens of what the model says, the archive goes on wrongly."""
    real = [said(number, prompt_key(str(number)), 300) for number in range(4)]

    def poisoned(one: PromptRollout) -> PromptRollout:
        tokens = [int(token) for token in one.pieces[0].tokens]
        wrong = [
            new for at in range(len(tokens) - 1) for new in (*tokens[at : at + 2], (tokens[at] + 500) % VOCABULARY)
        ]
        return PromptRollout(one.prompt_key, (Piece([1, 2, 3], wrong, 1e9),), (len(wrong),))

    async def test() -> None:
        bad = a_worker(tmp_path / "bad")
        await bad.record(1, [poisoned(one) for one in real])
        run = a_worker(tmp_path / "run", tmp_path / "bad")
        keys = [one.prompt_key for one in real]
        await run.prepare(keys, 1)
        assert not any([drafts(await run.index(key), one) for key, one in zip(keys, real, strict=True)])
        await run.record(1, real[:2])
        await run.prepare(keys, 2)
        found = [await run.index(key) for key in keys]
        assert [drafts(index, one) for index, one in zip(found, real, strict=True)] == [True, True, False, False]
        assert found[2] is found[3] is None

    in_loop(test)
    assert len(warnings) == 1 and "no longer drafts from run bad" in warnings[0]


def test_evaluations_draft_from_the_last_one_and_training_never_sees_them(tmp_path: Path, warnings: list[str]) -> None:
    evaluated = said(9, evaluation_key(P), 70)

    async def test() -> None:
        worker = a_worker(tmp_path / "run")
        # Before the first one they have training's history, of which there is none for an evaluation's own prompt.
        assert await worker.index(evaluation_key(P)) is None
        await worker.record(1, [said(1), said(7, round_key(P, 1))])
        # Announced, so the first evaluation too finds the index in memory, of all rounds.
        worker._store.drop(P)
        worker._store.drop(round_key(P, 1))
        await worker.prepare([evaluation_key(P)], 1)
        assert drafts(worker._store.resident(P), said(1))
        assert drafts(worker._store.resident(round_key(P, 1)), said(7, round_key(P, 1)))
        assert drafts(await worker.index(evaluation_key(P)), said(1))
        assert drafts(await worker.index(round_key(evaluation_key(P), 1)), said(7, round_key(P, 1)))
        await worker.record(1, [evaluated], evaluation=True)
        await worker.prepare([evaluation_key(P)], 1)
        index = await worker.index(evaluation_key(P))
        assert drafts(index, evaluated) and not drafts(index, said(1))
        index = await worker.index(P)
        assert drafts(index, said(1)) and not drafts(index, evaluated)
        assert await worker.last_lengths([P]) == [(100,)]
        await worker.record(2, [said(2)])
        await worker.record(2, [said(10, evaluation_key(P))], evaluation=True)
        lengths = await worker.epoch_lengths(2, 2)
        assert (lengths.before.tolist(), lengths.lengths.tolist()) == ([100.0], [100])
        # A later run has both, apart.
        later = a_worker(tmp_path / "later", tmp_path / "run")
        await later.prepare([P, evaluation_key(P)], 1)
        assert drafts(await later.index(P), said(2)) and not drafts(await later.index(P), evaluated)
        assert drafts(await later.index(evaluation_key(P)), evaluated)
        assert [known.prompts for known in await later.known_earlier([P])] == [1]

    in_loop(test)
    assert warnings == []


def test_where_memory_is_short_own_responses_come_first(tmp_path: Path, warnings: list[str]) -> None:
    async def test() -> None:
        first = a_worker(tmp_path / "first")
        await first.record(1, [said(n, prompt_key(str(n)), 2000) for n in range(20)])
        second = a_worker(tmp_path / "second", tmp_path / "first", memory=300_000)
        own = said(100, prompt_key("0"), 2000)
        await second.record(1, [said(n + 100, prompt_key(str(n)), 2000) for n in range(20)])
        await second.prepare([prompt_key("0")], 2)
        index = await second.index(prompt_key("0"))
        assert drafts(index, own) and not drafts(index, said(0, prompt_key("0"), 2000))
        assert second._store.state().resident_bytes <= 300_000

    in_loop(test)


def test_a_deleted_archive_costs_drafts_only(tmp_path: Path, warnings: list[str]) -> None:
    async def test() -> None:
        first = a_worker(tmp_path / "first", store=tmp_path / "store")
        await first.record(1, [said(1), said(2, Q)])
        second = a_worker(tmp_path / "second", store=tmp_path / "store")
        assert len(await second.known_earlier([P])) == 1
        shutil.rmtree(tmp_path / "store")
        await second.prepare([P, Q], 1)
        assert await second.index(P) is None
        # Its own archive is gone as well; its own history is not.
        await second.record(1, [said(3)])
        assert drafts(await second.index(P), said(3))

    in_loop(test)
    assert warnings == []


def test_a_full_disk_ends_the_archive_and_not_the_run(tmp_path: Path, warnings: list[str]) -> None:
    async def test() -> None:
        worker = a_worker(tmp_path / "run")
        assert worker._archive is not None
        worker._archive.close()
        worker._archive._file = os.open("/dev/full", os.O_WRONLY)
        await worker.record(1, [said(1)])
        await worker.record(2, [said(2)])
        assert drafts(await worker.index(P), said(2))

    in_loop(test)
    assert len(warnings) == 1 and "leaves no more responses for later runs" in warnings[0]


def test_a_directory_that_cannot_be_made_costs_the_archive_only(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "store").write_text("a file")

    async def test() -> None:
        worker = a_worker(tmp_path / "run", store=tmp_path / "store")
        await worker.record(1, [said(1)])
        assert drafts(await worker.index(P), said(1))

    in_loop(test)
    assert len(warnings) == 1 and "leaves no responses for later runs" in warnings[0]


def test_a_restarted_worker_goes_on_in_its_archive(tmp_path: Path, warnings: list[str]) -> None:
    async def one(step: int) -> None:
        worker = a_worker(tmp_path / "run")
        await worker.record(step, [said(step)])

    for step in (1, 2):
        in_loop(lambda step=step: one(step))  # type: ignore[misc]
    reader = ArchiveReader(archives_in(tmp_path / "run")[0])
    assert [decode(reader.read(stored) or b"").rollout_id for _, stored in reader.new()] == [1, 2]


def test_what_others_add_is_looked_for_once_a_step(tmp_path: Path, warnings: list[str]) -> None:
    """Prompts may be announced one by one, as dynamic filtering draws them, and in several calls at once."""

    async def test() -> None:
        first = a_worker(tmp_path / "first", store=tmp_path / "store")
        second = a_worker(tmp_path / "second", store=tmp_path / "store")
        looked: list[int] = []
        refresh = second._earlier.refresh
        second._earlier.refresh = lambda: looked.append(1) or refresh()  # type: ignore[method-assign, func-returns-value]
        await asyncio.gather(*(second.prepare([key], 1) for key in (P, Q)))
        await second.prepare([evaluation_key(P)], 1)
        assert len(looked) == 1
        await first.record(1, [said(1), said(2, Q)])
        await second.prepare([P], 1)
        assert await second.index(P) is None
        # All calls of a step see what its first one found.
        await asyncio.gather(*(second.prepare([key], 2) for key in (P, Q)))
        assert drafts(second._store.resident(P), said(1)) and drafts(second._store.resident(Q), said(2, Q))
        assert len(looked) == 2

    in_loop(test)


def test_each_earlier_run_is_reported_with_each_step(tmp_path: Path, warnings: list[str], monkeypatch: Any) -> None:
    async def test() -> None:
        first = a_worker(tmp_path / "first")
        await first.record(1, [said(1), said(2, Q)])
        events: list[Any] = []
        second = a_worker(tmp_path / "second", tmp_path / "first")
        monkeypatch.setattr(second, "_record", events.append)
        await second.known_earlier([P, Q, prompt_key("new")])
        await second.prepare([P, Q], 1)
        await second.record(1, [said(1)])
        begun, after = [event for event in events if isinstance(event, EarlierRun)]
        assert (begun.step, begun.run, begun.prompts, begun.of, begun.epochs) == (0, "first", 2, 3, 1)
        assert (begun.drafted_from, begun.judged, begun.left_out) == (0, 0, False)
        assert (after.step, after.prompts, after.directory) == (1, 2, str(tmp_path / "first" / "history" / "archive"))
        # The two announced, and the one that was answered since.
        assert (after.drafted_from, after.left_out) == (3, False)
        assert after.right > 0.8 * after.judged > 50

    in_loop(test)
