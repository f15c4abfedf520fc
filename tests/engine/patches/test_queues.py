"""Queues and seats in the installed vLLM's own scheduler, which schedules requests and runs no model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from step_overhead import scheduler_of
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rhyme_openrlhf.engine.patches import queues

SEATS = 2


@pytest.fixture
def scheduler() -> Any:
    """Three requests that wait for two seats; a third seat is held."""
    made = scheduler_of("vllm", SEATS + 1, 512)
    queues.hold_seats(made, 1)
    for name in ("a", "b", "c"):
        add(made, name)
    return made


def add(scheduler: Any, name: str) -> Any:
    parameters = SamplingParams(temperature=1, max_tokens=100)
    parameters.update_from_generation_config({}, eos_token_id=None)
    scheduler.add_request(Request(name, [1, 2, 3], parameters, None))
    return scheduler.requests[name]


def step(scheduler: Any) -> list[str]:
    """Run a step in which each scheduled request samples a token; returns these requests."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    places = {name: place for place, name in enumerate(names)}
    scheduler.update_from_output(output, ModelRunnerOutput(names, places, [[7] for _ in names]))
    return sorted(names)


def test_seats_that_are_held_are_given_to_nobody(scheduler: Any) -> None:
    assert queues.seats(scheduler) == SEATS
    queues.hold_seats(scheduler, 1)
    assert queues.seats(scheduler) == 1 and step(scheduler) == ["a"] == step(scheduler)
    queues.hold_seats(scheduler, -1)
    assert step(scheduler) == ["a", "b"]


def test_what_was_taken_out_is_in_no_step_until_it_is_put_back(scheduler: Any) -> None:
    requests = dict(scheduler.requests)
    assert step(scheduler) == ["a", "b"]
    assert queues.take_out(scheduler, requests["a"]) is True
    assert queues.take_out(scheduler, requests["c"]) is False
    assert step(scheduler) == ["b"]
    queues.put_back(scheduler, requests["c"])
    assert step(scheduler) == ["b", "c"]
    assert queues.take_out(scheduler, requests["b"]) is True
    queues.put_back(scheduler, requests["a"])
    assert step(scheduler) == ["a", "c"]


def test_a_preempted_request_is_taken_out_and_recomputed_first_of_all(scheduler: Any) -> None:
    step(scheduler)
    request = scheduler.requests["a"]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    assert queues.take_out(scheduler, request) is False
    assert step(scheduler) == ["b", "c"]
    queues.hold_seats(scheduler, -1)
    add(scheduler, "d")
    queues.put_back(scheduler, request)
    assert step(scheduler) == ["a", "b", "c"]


def test_a_request_that_waits_with_kv_blocks_comes_first_and_leaves_all_queues(scheduler: Any) -> None:
    """As engine/scheduler_parts/moves.py makes one: KV blocks that hold the tokens but the last."""

    def arrived(name: str) -> Any:
        request = Request(name, [1] * 40, SamplingParams(max_tokens=9), None)
        (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        manager.req_to_blocks[name] = scheduler.kv_cache_manager.block_pool.get_new_blocks(-(-40 // manager.block_size))
        request.num_computed_tokens = 39
        scheduler.add_request(request)
        queues.put_first(scheduler, request)
        return request

    first, _ = arrived("first"), arrived("second")
    queues.hold_seats(scheduler, 1)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"second": 1}
    queues.hold_seats(scheduler, -1)

    assert queues.take_out(scheduler, first) is False
    assert "first" not in scheduler.schedule().num_scheduled_tokens
    scheduler.finish_requests("second", RequestStatus.FINISHED_ABORTED)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    queues.put_back(scheduler, first)
    # Others wait without blocks.
    add(scheduler, "d")
    assert scheduler.schedule().num_scheduled_tokens["first"] == 1


def test_a_request_that_gave_its_kv_blocks_up_waits_as_any_other(scheduler: Any) -> None:
    request = Request("late", [1] * 40, SamplingParams(max_tokens=9), None)
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    manager.req_to_blocks["late"] = scheduler.kv_cache_manager.block_pool.get_new_blocks(-(-40 // manager.block_size))
    request.num_computed_tokens = 39
    scheduler.add_request(request)
    queues.put_first(scheduler, request)
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
    queues.gave_up_kv(scheduler, request)
    assert next(iter(scheduler.waiting)) is request
    assert scheduler.get_request_counts() == (0, 4)
    assert scheduler.schedule().num_scheduled_tokens == {"late": 40, "a": 3}
    # A request that is in no queue stays in none.
    other = scheduler.requests["b"]
    queues.take_out(scheduler, other)
    queues.gave_up_kv(scheduler, other)
    assert scheduler.get_request_counts() == (2, 1)
