"""Moves between two real engines: the moved sample is token for token the unmoved one, and nothing is left behind.

A sample that is about to move is held at its source (`hold_at`) until its move has begun or is over. On a busy machine
the order to move comes late, and the sample would have ended. After each test conftest.py lets all samples go on.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE, MoveRefused, Phase
from tests.moves.engines import SEATS, Engines, answer, grown_to, moved_at, request

PROMPT = list(range(10, 60)) * 2
BOTH = pytest.mark.parametrize("carrier", [RECOMPUTE, KV_TRANSFER])


def unmoved(pair: Engines, folder: Path, asked: Any) -> Any:
    key = repr(asked)
    if key not in pair.unmoved:
        pair.unmoved[key] = answer(pair.run(lambda keeper, mover: keeper.generate(asked, 0), folder))
    return pair.unmoved[key]


@BOTH
@pytest.mark.parametrize("history", [None, "own text drafts"])
def test_a_greedy_sample_goes_there_and_back(pair: Engines, tmp_path: Path, carrier: str, history: str | None) -> None:
    asked = request(PROMPT, history, max_tokens=500)
    expected = unmoved(pair, tmp_path, asked)
    pair.carrier = carrier

    records, output = moved_at(pair, tmp_path, asked, (40, 1), (150, 0), (250, 1))
    assert [record.move.phase for record in records] == [Phase.RUNNING] * 3, [r.move.reason for r in records]
    tokens, log_probs, text, reason = answer(output)
    assert tokens == expected[0] and (text, reason) == expected[2:]
    assert log_probs == pytest.approx(expected[1], abs=1e-4)
    assert not list(tmp_path.iterdir())


@BOTH
def test_a_seeded_sample_draws_on_as_it_would_have(pair: Engines, tmp_path: Path, carrier: str) -> None:
    """Random numbers, penalties (which tell response from prompt) and the lengths asked for all go along."""
    asked = request(
        PROMPT, temperature=1.0, seed=7, top_p=0.95, frequency_penalty=0.4, presence_penalty=0.3,
        repetition_penalty=1.1, min_tokens=250, ignore_eos=False, detokenize=True,
    )  # fmt: skip
    expected = unmoved(pair, tmp_path, asked)
    pair.carrier = carrier

    records, output = moved_at(pair, tmp_path, asked, (50, 1), (150, 0))
    assert [record.move.phase for record in records] == [Phase.RUNNING] * 2, [r.move.reason for r in records]
    tokens, log_probs, text, reason = answer(output)
    assert tokens == expected[0] and (text, reason) == expected[2:] and len(tokens) >= 250
    assert log_probs == pytest.approx(expected[1], abs=1e-4)


@BOTH
def test_a_stop_string_ends_a_moved_sample_where_it_ends_an_unmoved_one(
    pair: Engines, tmp_path: Path, carrier: str
) -> None:
    """It may come in the middle of a step's accepted drafts, and begin at one engine and end at the other."""
    # Penalties keep the model from repeating itself, so that something comes late for the first time.
    varied = {"frequency_penalty": 0.7, "repetition_penalty": 1.1, "detokenize": True, "max_tokens": 300}
    text = unmoved(pair, tmp_path, request(PROMPT, "own text drafts", **varied))[2]
    late = next(text[at : at + 5] for at in range(len(text) // 3, len(text)) if text.find(text[at : at + 5]) == at)
    asked = request(PROMPT, "own text drafts", stop=[late], **varied)
    expected = unmoved(pair, tmp_path, asked)
    assert expected[3] == "stop" and 60 < len(expected[0]) < 300
    pair.carrier = carrier

    records, output = moved_at(pair, tmp_path, asked, (40, 1))
    assert [record.move.phase for record in records] == [Phase.RUNNING], [r.move.reason for r in records]
    tokens, _, text, reason = answer(output)
    assert (tokens, text, reason) == (expected[0], *expected[2:])


def test_the_destination_reads_what_was_carried(pair: Engines, tmp_path: Path) -> None:
    """A KV cache that is wiped on its way makes other tokens: so none of it is computed again."""
    asked = request([*PROMPT, 99], max_tokens=300)
    expected = unmoved(pair, tmp_path, asked)
    pair.carrier = KV_TRANSFER

    async def wipe(method: str) -> None:
        if method == "import_kv":
            (path,) = tmp_path.iterdir()
            path.write_bytes(bytes(path.stat().st_size))

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        pair.engines[0].hold_at(120)
        running = asyncio.create_task(keeper.generate(asked, 0))
        record = await mover.move(await grown_to(keeper, 120), 1, "reallocation")
        assert record.move.phase is Phase.RUNNING and 0 < record.downtime <= record.seconds
        assert record.tokens >= len(PROMPT) + 120
        return await running

    pair.engines[1].before = wipe
    try:
        output = pair.run(test, tmp_path)
    finally:
        pair.engines[1].before = None
        pair.engines[1].now("reset_prefix_cache")
    tokens = answer(output)[0]
    # Where exactly it moved is not in the record: when that is made, the destination may have gone on.
    assert tokens[:120] == expected[0][:120] and tokens != expected[0]


STEPS_AT = {
    "hold_room": 1, "export_kv": 0, "import_kv": 1, "expect_sample": 1, "stop_sample": 0, "start_sample": 1,
}  # fmt: skip


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("method", STEPS_AT)
def test_an_engine_lost_at_any_step_loses_no_sample(pair: Engines, tmp_path: Path, method: str, dies: int) -> None:
    """It is gone before the step is ordered, or (where the step is its own) with its order."""
    asked = request(PROMPT, max_tokens=150)
    expected = unmoved(pair, tmp_path, asked)
    pair.carrier = KV_TRANSFER
    moving = False

    async def die(called: str) -> None:
        if moving and called == method:
            pair.engines[dies].gone = True

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        nonlocal moving
        pair.engines[0].hold_at(60)
        running = asyncio.create_task(keeper.generate(asked, 0))
        sample = await grown_to(keeper, 60)
        pair.engines[STEPS_AT[method]].before = die
        moving = True
        await mover.move(sample, 1, "reallocation")
        pair.engines[0].hold_at(0)
        return await running

    try:
        assert answer(pair.run(test, tmp_path))[0] == expected[0]
    finally:
        for engine in pair.engines:
            engine.purge()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", STEPS_AT)
def test_an_order_that_is_not_answered_in_time_is_taken_back(pair: Engines, tmp_path: Path, method: str) -> None:
    """Each order once late, after it was followed; the next one of that kind is answered."""
    asked = request(PROMPT, max_tokens=150)
    expected = unmoved(pair, tmp_path, asked)
    pair.carrier = KV_TRANSFER
    late = pair.engines[STEPS_AT[method]]

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        pair.engines[0].hold_at(60)
        running = asyncio.create_task(keeper.generate(asked, 0))
        sample = await grown_to(keeper, 60)
        late.hangs_after = method
        record = await mover.move(sample, 1, "reallocation")
        goes_on = method in ("export_kv", "import_kv", "expect_sample")
        assert goes_on or record.move.phase is Phase.CANCELLED
        assert "was not answered within" in record.move.reason
        pair.engines[0].hold_at(0)
        return await running

    try:
        assert answer(pair.run(test, tmp_path, limit_s=1.5))[0] == expected[0]
    finally:
        late.hangs_after = ""


@pytest.mark.parametrize("method", STEPS_AT)
def test_an_abort_while_it_moves_leaves_nothing(pair: Engines, tmp_path: Path, method: str) -> None:
    pair.carrier = KV_TRANSFER

    async def test(keeper: SampleKeeper, mover: Mover) -> None:
        pair.engines[0].hold_at(40)
        running = asyncio.create_task(keeper.generate(request(PROMPT, max_tokens=400), 0))

        async def abort(called: str) -> None:
            if called == method and sample.moving:
                running.cancel()

        sample = await grown_to(keeper, 40)
        pair.engines[STEPS_AT[method]].before = abort
        record = await mover.move(sample, 1, "reallocation")
        # Aborted with its last order, a move may be over before it hears of it.
        assert record.move.phase is Phase.CANCELLED or method == "start_sample"
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0.2)

    try:
        pair.run(test, tmp_path)
    finally:
        for engine in pair.engines:
            engine.before = None


@pytest.mark.parametrize("method", [method for method in STEPS_AT if method != "start_sample"])
def test_a_sample_that_finishes_while_it_moves_is_answered_by_its_source(
    pair: Engines, tmp_path: Path, method: str
) -> None:
    """The order is kept back until the source has nothing more to generate."""
    asked = request(PROMPT, max_tokens=150)
    expected = unmoved(pair, tmp_path, asked)
    pair.carrier = KV_TRANSFER

    async def keep_back(called: str) -> None:
        if called == method and sample is not None and sample.moving:
            await asyncio.to_thread(pair.engines[0].hold_at, 0)
            while await asyncio.to_thread(pair.engines[0].scheduler, "output_lengths"):
                await asyncio.sleep(0.005)

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        nonlocal sample
        pair.engines[0].hold_at(60)
        running = asyncio.create_task(keeper.generate(asked, 0))
        sample = await grown_to(keeper, 60)
        record = await mover.move(sample, 1, "reallocation")
        output, last = await running
        return record, output, last

    sample: Any = None
    for engine in pair.engines:
        engine.before = keep_back if engine is pair.engines[STEPS_AT[method]] else None
    try:
        record, output, last = pair.run(test, tmp_path)
    finally:
        for engine in pair.engines:
            engine.before = None
    assert (record.move.phase, record.move.sample_ended, last) == (Phase.CANCELLED, True, 0)
    assert answer((output, last))[0] == expected[0] and not list(tmp_path.iterdir())


def test_a_full_destination_refuses(pair: Engines, tmp_path: Path) -> None:
    pair.carrier = KV_TRANSFER
    for number in range(SEATS):
        assert pair.engines[1].now("hold_room", f"other-{number}", 1) == ""
    assert "KV blocks are needed" in pair.engines[1].now("hold_room", "other-0", 100_000)

    async def test(keeper: SampleKeeper, mover: Mover) -> None:
        pair.engines[0].hold_at(30)
        running = asyncio.create_task(keeper.generate(request(PROMPT), 0))
        record = await mover.move(await grown_to(keeper, 30), 1, "reallocation")
        assert record.move.phase is Phase.CANCELLED and record.move.reason == "all 0 seats are taken"
        pair.engines[0].hold_at(0)
        await running

    pair.run(test, tmp_path)
    for number in range(SEATS):
        pair.engines[1].now("release_room", f"other-{number}")


def test_a_cache_that_cannot_be_carried_is_recomputed(pair: Engines, tmp_path: Path) -> None:
    asked = request(PROMPT, max_tokens=150)
    expected = unmoved(pair, tmp_path, asked)
    pair.carrier = KV_TRANSFER
    folder = tmp_path / "full"
    folder.mkdir()

    async def lose_buffer(method: str) -> None:
        if method == "import_kv":
            for path in folder.iterdir():
                path.unlink()

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        pair.engines[0].hold_at(60)
        running = asyncio.create_task(keeper.generate(asked, 0))
        record = await mover.move(await grown_to(keeper, 60), 1, "reallocation")
        assert record.move.phase is Phase.RECOMPUTED and "No such file" in record.move.reason
        return await running

    pair.engines[1].before = lose_buffer
    try:
        assert answer(pair.run(test, folder))[0] == expected[0]
    finally:
        pair.engines[1].before = None


def test_what_must_not_move_does_not(pair: Engines, tmp_path: Path) -> None:
    pair.carrier = RECOMPUTE

    async def test(keeper: SampleKeeper, mover: Mover) -> None:
        pair.engines[0].hold_at(30)
        running = asyncio.create_task(keeper.generate(request(PROMPT), 0))
        sample = await grown_to(keeper, 30)
        with pytest.raises(MoveRefused, match="is on engine 0 already"):
            await mover.move(sample, 0, "reallocation")
        pair.engines[1].hold_at(60)
        first = asyncio.create_task(mover.move(sample, 1, "reallocation"))
        await asyncio.sleep(0)
        with pytest.raises(MoveRefused, match="is being moved already"):
            await mover.move(sample, 1, "reallocation")
        assert (await first).move.phase is Phase.RUNNING
        pair.engines[0].hold_at(0)
        pair.engines[0].raw.set_weight_version(3)
        while keeper.engines[0].weight_version != 3:
            await asyncio.sleep(0.01)
        with pytest.raises(MoveRefused, match="engine 1 has weight version 0, engine 0 has 3"):
            await mover.move(sample, 0, "reallocation")
        pair.engines[1].hold_at(0)
        await running

    try:
        pair.run(test, tmp_path)
    finally:
        pair.engines[0].raw.set_weight_version(0)


def test_a_weight_load_voids_what_moves_keep(pair: Engines) -> None:
    """Reservations lose their blocks; a sample that takes one up recomputes."""
    engine = pair.engines[1]
    assert engine.now("hold_room", "r", 100) == ""
    assert len(engine.scheduler("room_blocks", "r")) == 4
    engine.now("pause_generation")
    assert engine.scheduler("room_blocks", "r") == []
    assert "loads weights" in engine.now("hold_room", "q", 100)
    engine.now("resume_generation")
    # What was copied into it is gone: it must not look as if it were there.
    assert "is void" in engine.now("hold_room", "r", 100)
    engine.now("release_room", "r")


def test_many_samples_moved_at_random_come_out_as_if_nothing_had_been(pair: Engines, tmp_path: Path) -> None:
    """More samples than the KV cache holds (so some are preempted), moved at random by both carriers, some aborted."""
    chance = random.Random(5)
    prompts = [[chance.randrange(5, 100) for _ in range(chance.randrange(40, 120))] for _ in range(20)]
    asked = [
        request(prompt, "own text drafts" if i % 2 else None, max_tokens=500 - len(prompt))
        for i, prompt in enumerate(prompts)
    ]

    async def unmoved(keeper: SampleKeeper, mover: Mover) -> list[Any]:
        return await asyncio.gather(*(keeper.generate(one, i % 2) for i, one in enumerate(asked)))

    expected = [answer(output)[0] for output in pair.run(unmoved, tmp_path)]
    pair.records.clear()

    async def moved(keeper: SampleKeeper, mover: Mover) -> list[Any]:
        running = [asyncio.create_task(keeper.generate(one, 0)) for one in asked]
        moves: set[asyncio.Task[Any]] = set()
        await grown_to(keeper, 2)
        while not all(task.done() for task in running):
            samples = [s for s in keeper._samples.values() if s.engine is not None and not s.moving]
            if samples and len(moves) < 4:
                sample = chance.choice(samples)
                pair.carrier = chance.choice([RECOMPUTE, KV_TRANSFER])
                moves.add(asyncio.create_task(mover.move(sample, 1 - (sample.engine or 0), "reallocation")))
                if chance.random() < 0.02:
                    chance.choice(running).cancel()
            await asyncio.sleep(0.01)
            moves = {move for move in moves if not move.done()}
        await asyncio.gather(*moves)
        return await asyncio.gather(*running, return_exceptions=True)

    outputs = pair.run(moved, tmp_path)
    phases = Counter((record.move.phase, record.move.asked_carrier) for record in pair.records)
    assert phases[Phase.RUNNING, KV_TRANSFER] >= 10 and phases[Phase.RUNNING, RECOMPUTE] >= 10, phases
    assert not any(record.move.phase is Phase.LOST for record in pair.records)
    came = [
        (answer(output)[0], want)
        for output, want in zip(outputs, expected, strict=True)
        if not isinstance(output, BaseException)
    ]
    assert len(came) >= 10
    for tokens, want in came:
        assert tokens == want
    assert all(isinstance(output, asyncio.CancelledError) for output in outputs if isinstance(output, BaseException))
