"""KV transfer between two nodes: real engines that say they are on different ones, and Ray's own way between actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rhyme_openrlhf.engine.actor_parts.devices import Devices
from rhyme_openrlhf.engine.port import RayEngine
from rhyme_openrlhf.kv.buffer import PREFIX, KvBufferStore, KvLayout, read_rows, write_rows
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, Phase
from rhyme_openrlhf.shared_files import SHARED_MEMORY, owned_prefix
from tests.moves.engines import Engines, answer, grown_to, moved_at, request

PROMPT = list(range(10, 60)) * 2
LAYOUT = KvLayout(3, 2, 8, 6, "bfloat16")


def buffers() -> list[Path]:
    """This process's, in shared memory: the engines' own (the mover's are in the test's folder)."""
    return list(SHARED_MEMORY.glob(owned_prefix(PREFIX) + "*"))


@pytest.fixture
def apart(pair: Engines, starts_cluster: None) -> Iterator[Engines]:
    """The second engine is on another node than the mover and the first."""
    pair.carrier, pair.engines[1].node = KV_TRANSFER, "another"
    yield pair
    pair.engines[1].node = ""
    for engine in pair.engines:
        engine.before = None
    assert not buffers()


def test_a_sample_goes_to_another_node_and_back(apart: Engines, tmp_path: Path) -> None:
    asked = request(PROMPT, max_tokens=500)
    expected = answer(apart.run(lambda keeper, mover: keeper.generate(asked, 0), tmp_path))

    records, output = moved_at(apart, tmp_path, asked, (40, 1), (150, 0))
    assert [record.move.phase for record in records] == [Phase.RUNNING] * 2, [r.move.reason for r in records]
    tokens, log_probs, text, reason = answer(output)
    assert tokens == expected[0] and (text, reason) == expected[2:]
    assert log_probs == pytest.approx(expected[1], abs=1e-4)
    assert not list(tmp_path.iterdir())


def test_the_destination_reads_what_came_from_the_other_node(apart: Engines, tmp_path: Path) -> None:
    """A KV cache that is spoilt where it lands makes other tokens: so none of it is computed again."""
    asked = request([*PROMPT, 98], max_tokens=500)
    expected = answer(apart.run(lambda keeper, mover: keeper.generate(asked, 0), tmp_path))

    async def spoil(method: str) -> None:
        if method == "import_kv":
            (path,) = buffers()
            # Every number is 3.0: far from any key or value.
            path.write_bytes(b"\x40" * path.stat().st_size)

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        apart.engines[0].hold_at(120)
        running = asyncio.create_task(keeper.generate(asked, 0))
        record = await mover.move(await grown_to(keeper, 120), 1, "reallocation")
        assert record.move.phase is Phase.RUNNING
        return await running

    apart.engines[1].before = spoil
    tokens = answer(apart.run(test, tmp_path))[0]
    apart.engines[1].now("reset_prefix_cache")
    assert tokens[:120] == expected[0][:120] and tokens != expected[0]


@pytest.mark.parametrize("time", [1, 2])
def test_a_source_that_is_gone_when_its_rows_are_asked_for_loses_no_sample(
    apart: Engines, tmp_path: Path, time: int
) -> None:
    """The first time it generates on, the second time it has stopped."""
    asked = request(PROMPT, max_tokens=400)
    expected = answer(apart.run(lambda keeper, mover: keeper.generate(asked, 0), tmp_path))
    times = 0

    async def die(method: str) -> None:
        nonlocal times
        times += method == "read_kv_rows"
        apart.engines[0].gone = apart.engines[0].gone or times == time

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        apart.engines[0].hold_at(60)
        running = asyncio.create_task(keeper.generate(asked, 0))
        sample = await grown_to(keeper, 60)
        apart.engines[0].before = die
        record = await mover.move(sample, 1, "reallocation")
        return record, await running

    try:
        record, output = apart.run(test, tmp_path)
        assert record.move.phase is Phase.RECOMPUTED and times == time
        assert answer(output)[0] == expected[0]
    finally:
        for engine in apart.engines:
            engine.purge()
    assert not list(tmp_path.iterdir())


def test_rows_go_from_actor_to_actor(starts_ray: None, starts_cluster: None) -> None:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        source, destination = (ray.remote(num_cpus=0)(Devices).remote(None) for _ in range(2))
        theirs, ours = ray.get([actor.make_kv_buffer.remote(LAYOUT, 9) for actor in (source, destination)])
        theirs.open().copy_(torch.arange(9).view(1, 9, 1, 1, 1))
        fetch = destination.fetch_kv_rows.remote
        assert ray.get(fetch(RayEngine(0, source), theirs, ours, 2, 5)) == ""
        came = ours.open()
        assert torch.equal(came, torch.tensor([0, 0, 2, 3, 4, 0, 0, 0, 0]).view(1, 9, 1, 1, 1).expand_as(came).to(came))
        ray.get(source.remove_kv_buffer.remote(theirs))
        assert "did not come" in ray.get(fetch(RayEngine(0, source), theirs, ours, 2, 5))
        ray.kill(source)
        assert "engine 0 is gone" in ray.get(fetch(RayEngine(0, source), theirs, ours, 2, 5))
        ray.get(destination.remove_kv_buffer.remote(ours))
    finally:
        ray.shutdown()


def test_rows_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    store = KvBufferStore(tmp_path)
    one, other = store.make(LAYOUT, 4), store.make(LAYOUT, 4)
    one.open().copy_(torch.randn(one.open().shape))
    write_rows(other, 1, read_rows(one, 1, 3))
    assert torch.equal(one.open()[:, 1:3], other.open()[:, 1:3]) and not other.open()[:, [0, 3]].any()
    with open(one.path, "r+b") as file:
        file.truncate(100)
    with pytest.raises(OSError, match="ends before block 3"):
        read_rows(one, 1, 3)
    store.remove(other)
    with pytest.raises(OSError):
        write_rows(other, 1, np.zeros((LAYOUT.layers, LAYOUT.block_bytes), np.uint8))
