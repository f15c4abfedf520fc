"""A handover is whole or not there; and an engine needs no order to go on with what is handed over to it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.kv.buffer import Handover, KvBufferStore, KvLayout, read_handover, write_handover
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, Phase
from tests.moves.engines import Engines, answer, grown_to, request

PROMPT = list(range(10, 60)) * 2


def test_a_handover_is_read_as_it_was_written_and_never_in_part(tmp_path: Path) -> None:
    store = KvBufferStore(tmp_path)
    buffer = store.make(KvLayout(2, 1, 4, 2, "float32"), 8)
    path, offset = buffer.path, buffer.handover_offset
    assert read_handover(buffer) is None
    handed = Handover(list(range(200_000, 200_032)), 30, 8, 4, bytes(range(256)) * 20)
    write_handover(buffer, handed)
    assert read_handover(buffer) == handed
    # The blocks before it are as they were, and the file is no longer than its owner made it.
    assert not any(Path(path).read_bytes()[:offset]) and os.stat(path).st_size == buffer.file_bytes
    with pytest.raises(OSError, match="has no room for a handover"):
        write_handover(buffer, Handover([1] * 30_000, 1, 1))
    assert read_handover(buffer) == handed
    # Before its length, which is written last, nothing is there.
    other = store.make(buffer.layout, 8)
    with open(other.path, "r+b") as file:
        file.seek(offset + 8)
        file.write(b"half of a handover")
    assert read_handover(other) is None
    store.remove(buffer)
    assert read_handover(buffer) is None
    with pytest.raises(FileNotFoundError):
        write_handover(buffer, handed)


def test_what_comes_before_its_beginning_is_known_is_held_back() -> None:
    """Of the expected request alone, in order, and dropped with it."""
    from rhyme_openrlhf.engine.messages import Progress
    from rhyme_openrlhf.engine.patches.resumed_outputs import ResumedOutputs

    processed: list[tuple[str, int]] = []
    texts: dict[str, list[int]] = {"A": [], "B": []}

    class Detokenizer:
        def __init__(self, name: str) -> None:
            self.update = lambda tokens, stop: texts[name].extend(tokens)

    class Processor:
        request_states: dict[str, Any] = {}
        external_req_ids: dict[str, list[str]] = {}

        def add_request(self, request: Any) -> None:
            state = SimpleNamespace(
                request_id=request.request_id,
                detokenizer=Detokenizer(request.request_id),
                logprobs_processor=SimpleNamespace(logprobs=None),
            )
            self.request_states[request.request_id] = state
            self.external_req_ids[request.external_req_id] = [request.request_id]

        def process_outputs(self, outputs: list[Any]) -> Any:
            for output in outputs:
                processed.append((output.request_id, output.token))
                self.request_states[output.request_id].detokenizer.update([output.token], False)
            return SimpleNamespace(reqs_to_abort=["A"] if outputs and outputs[-1].token == 9 else [])

    processor = Processor()
    outputs = ResumedOutputs(SimpleNamespace(output_processor=processor))
    outputs.hold("a")
    for name in ("a", "b"):
        processor.add_request(SimpleNamespace(request_id=name.upper(), external_req_id=name))

    def make(name: str, token: int) -> Any:
        return SimpleNamespace(request_id=name, token=token)

    processor.process_outputs([make("A", 7), make("B", 1)])
    processor.process_outputs([make("A", 8)])
    assert processed == [("B", 1)] and texts["A"] == []
    processor.process_outputs([make("A", 9)])
    assert outputs.release("a", Progress((5, 6))) == ["A"]
    assert texts["A"] == [5, 6, 7, 8, 9]
    # From now on as any other; and of one that is gone there is nothing to release.
    processor.process_outputs([make("A", 1)])
    assert texts["A"][-1] == 1
    outputs.hold("c")
    processor.add_request(SimpleNamespace(request_id="C", external_req_id="c"))
    del processor.request_states["C"]
    processor.process_outputs([make("B", 2)])
    assert outputs.release("c", Progress()) == []


@pytest.mark.parametrize("until", ["runs", "has ended"])
def test_a_sample_that_is_handed_over_goes_on_without_an_order(pair: Engines, tmp_path: Path, until: str) -> None:
    """The order to start is kept back until the sample runs there, or is over in the engine core: nothing lacks."""
    asked = request(PROMPT, max_tokens=200, detokenize=True)
    pair.carrier = KV_TRANSFER
    expected = answer(pair.run(lambda keeper, mover: keeper.generate(asked, 0), tmp_path))
    lengths: list[dict[str, int]] = []

    async def keep_back(method: str) -> None:
        if method == "start_sample":
            while not lengths or (until == "has ended" and lengths[-1]):
                found = await asyncio.to_thread(pair.engines[1].scheduler, "output_lengths")
                if found or lengths:
                    lengths.append(found)
                await asyncio.sleep(0.01)

    async def test(keeper: Any, mover: Any) -> Any:
        # Held until it has moved: on a busy machine it would have ended at its source.
        pair.engines[0].hold_at(60)
        running = asyncio.create_task(keeper.generate(asked, 0))
        sample = await grown_to(keeper, 60)
        pair.engines[1].before = keep_back
        record = await mover.move(sample, 1, "reallocation")
        assert record.move.phase is Phase.RUNNING, record.move.reason
        return await running

    try:
        came = answer(pair.run(test, tmp_path))
    finally:
        pair.engines[1].before = None
    assert lengths and came[0] == expected[0] and came[2:] == expected[2:]
    assert came[1] == pytest.approx(expected[1], abs=1e-4)
