"""Samples that arrive at vLLM's real scheduler, with KV blocks that came beside them; without an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from step_overhead import scheduler_of
from vllm import SamplingParams
from vllm.v1.request import Request

from rhyme_openrlhf.engine.messages import ARRIVED, Arrival
from rhyme_openrlhf.engine.scheduler_parts.meter import StatusFigures
from rhyme_openrlhf.engine.scheduler_parts.moves import Moves
from rhyme_openrlhf.kv.buffer import Handover, KvBufferStore, KvLayout, write_handover
from tests.engine.scheduler_parts.test_drafting import block_hasher

RUNNING, PROMPT = 4, list(range(300))


@pytest.fixture
def scheduler() -> Any:
    """One of an engine whose samples move; its workers copy what they are told to."""
    found, figures = scheduler_of("rules", RUNNING, 1024), StatusFigures()
    core = SimpleNamespace(workers=lambda method, copies: [[""] * len(copies)])
    found.moves = Moves(found, core, found.meter, figures, found.drafting)  # type: ignore[arg-type]
    found.parts += [figures, found.moves]
    return found


def add(scheduler: Any, name: str, arrival: Arrival | None = None) -> Any:
    extra = {} if arrival is None else {ARRIVED: arrival.to_plain()}
    parameters = SamplingParams(temperature=1, max_tokens=100, extra_args=extra)
    parameters.update_from_generation_config({}, eos_token_id=None)
    request = Request(name, PROMPT, parameters, None, block_hasher=block_hasher(scheduler))
    scheduler.add_request(request)
    return request


@pytest.mark.parametrize(("said", "taken"), [(302, 302), (0, 0), (10_000, 0)])
def test_an_arrival_computes_what_came_with_it_not_again(scheduler: Any, said: int, taken: int) -> None:
    """And all of it again where what is said to have come is more than its blocks hold."""
    rows, before = -(-303 // scheduler.block_size), scheduler.moves.status()
    assert scheduler.moves.import_rows("room", {}, 0, rows) == ""
    held = scheduler.moves.status()
    assert before["free_seats"] == RUNNING and held["free_seats"] == RUNNING - 1
    assert before["free_tokens"] - held["free_tokens"] == rows * scheduler.block_size
    request = add(scheduler, "arrived", Arrival((7, 8, 9), "room", said))
    assert request.num_computed_tokens == taken
    # The seat is the sample's own now; without its blocks, they are free.
    arrived = scheduler.moves.status()
    assert arrived["free_seats"] == RUNNING
    assert (arrived["free_tokens"] == before["free_tokens"]) == (not taken)
    assert scheduler.schedule().num_scheduled_tokens == {"arrived": 303 - taken}
    assert scheduler.moves.status()["free_seats"] == RUNNING - 1


def test_free_seats_are_those_that_nobody_has(scheduler: Any) -> None:
    for number in range(RUNNING + 2):
        add(scheduler, str(number))
        scheduler.schedule()
        assert scheduler.moves.status()["free_seats"] == max(RUNNING - 1 - number, 0)
    assert [waits for *_, waits in scheduler.moves.status()["samples"]] == [False] * RUNNING + [True] * 2


def test_an_engine_with_nothing_else_to_do_looks_out_for_an_arrival_until_it_is_called(
    scheduler: Any, tmp_path: Path
) -> None:
    store, moves = KvBufferStore(tmp_path), scheduler.moves
    buffer = store.make(KvLayout(1, 1, scheduler.block_size, 8, "float32"), 4)
    waits: list[bool] = []
    # What the loop around it says, one look after the other.
    called = iter([True, False, False])

    def is_called() -> bool:
        try:
            return next(called)
        except StopIteration:
            write_handover(buffer, Handover([7, 8, 9], 0, 0))
            return False

    moves._core.is_called, moves._core.wait_for_calls, moves._core.computes = is_called, waits.append, lambda: False
    add(scheduler, "expected", Arrival((), buffer=buffer.to_plain()))
    assert moves.looks_out() is False and moves.expects("expected") and waits == [False]
    assert moves.looks_out() is True and not moves.expects("expected")
    assert scheduler.requests["expected"].num_output_tokens == 3
