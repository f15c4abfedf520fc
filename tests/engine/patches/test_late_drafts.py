"""Drafts for a step that is scheduled already: the step that is computed, and vLLM's own side."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import vllm.config.vllm
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture, UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

from rhyme_openrlhf.drafting.planner import Cut
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.engine.patches import late_drafts, second_runner
from rhyme_openrlhf.engine.patches.late_drafts import Sampled, filled, offer, room_of, sampled_of, tokens_of
from rhyme_openrlhf.engine.patches.second_runner import METHOD, drafts_of

ROOM = 5


def scheduled(room: dict[str, int], prefill: int = 7) -> SchedulerOutput:
    """A step of samples that decode, with room for drafts, and of a prompt."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {name: 1 + places for name, places in room.items()} | {"prompt": prefill}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.scheduled_spec_decode_tokens = {name: [-1] * places for name, places in room.items() if places}
    return output


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, ROOM), st.integers(0, ROOM))))
def test_a_step_has_a_row_for_each_sample_and_each_draft(samples: dict[str, tuple[int, int]]) -> None:
    output = scheduled({name: room for name, (room, _) in samples.items()})
    before = dict(output.num_scheduled_tokens), dict(output.scheduled_spec_decode_tokens)
    drafts = {name: [9] * min(length, room) for name, (room, length) in samples.items() if room}
    step = filled(output, room_of(output), Cut(*core.flatten(list(drafts.values()))))
    given = {name: draft for name, draft in drafts.items() if draft}
    assert {name: len(places) for name, places in step.scheduled_spec_decode_tokens.items()} == {
        name: len(draft) for name, draft in given.items()
    }
    assert drafts_of(step).tokens() == list(given.values())
    assert step.num_scheduled_tokens == {name: 1 + len(drafts.get(name, [])) for name in samples} | {"prompt": 7}
    assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
    # vLLM's scheduler counts with the step as it was scheduled.
    assert (output.num_scheduled_tokens, output.scheduled_spec_decode_tokens) == before


def test_tokens_are_those_that_were_sampled() -> None:
    waited = []
    output: Any = SimpleNamespace(
        copy_event=SimpleNamespace(synchronize=lambda: waited.append(True)),
        num_sampled_tokens_np=np.array([2, 0, 1]),
        sampled_token_ids=np.array([[5, 6, -1], [-1, -1, -1], [7, -1, -1]]),
        model_runner_output=SimpleNamespace(req_ids=["a", "b", "c"]),
    )
    found = tokens_of(output)
    assert (found.requests, found.counts.tolist(), found.tokens.tolist()) == (["a", "b", "c"], [2, 0, 1], [5, 6, 7])
    assert waited


def test_tokens_that_vllm_has_read_are_the_same() -> None:
    found = sampled_of(SimpleNamespace(req_ids=["a", "b", "c"], sampled_token_ids=[[5, 6], [], [7]]))
    assert (found.requests, found.counts.tolist(), found.tokens.tolist()) == (["a", "b", "c"], [2, 0, 1], [5, 6, 7])


class Drafting:
    """Fills a step with its own name, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[str], list[int]]] = []

    def fill(self, output: Any, sampled: Callable[[], Sampled]) -> Any:
        tokens = sampled()
        self.told.append((tokens.requests, tokens.tokens.tolist()))
        return f"filled {output.name}"


class Queues(MultiprocExecutor):
    """vLLM's executor with ranks that are not there: it notes what they are sent, and answers with futures."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config, self.sent = vllm_config, []
        self.output_rank, self.kv_output_aggregator, self.ec_output_aggregator = 0, None, None
        self.answer: ModelRunnerOutput | None = None

    def collective_rpc(self, method: Any, *more: Any, args: Any = (), **named: Any) -> Any:
        self.sent.append((method, args[0]))
        future: Future[Any] = Future()
        future.set_result(None if method == "execute_model" else self.answer)
        return future


def step_of(name: str, tokens: int = 3) -> Any:
    return SimpleNamespace(name=name, total_num_scheduled_tokens=tokens)


def test_ranks_in_other_processes_are_sent_the_step_when_the_tokens_before_it_are_there() -> None:
    drafting, config = Drafting(), SimpleNamespace()
    offer(config, drafting)
    queues = Queues(config)
    for name, sampled in (("first", [[5, 6], [7]]), ("second", [[8], [9]])):
        queues.execute_model(step_of(name), non_block=True)
        queues.answer = ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1}, sampled)
        queues.sample_tokens(None, non_block=True)
    # A step without tokens samples nothing, and one that fails is vLLM's matter.
    queues.execute_model(step_of("empty", 0), non_block=True)
    queues.execute_model(step_of("third"), non_block=True)
    queues.answer = None
    queues.sample_tokens(None, non_block=True)
    queues.execute_model(step_of("fourth"), non_block=True)
    assert drafting.told == [([], []), (["a", "b"], [5, 6, 7]), (["a", "b"], [8, 9]), ([], [])]
    steps = [step for method, step in queues.sent if method == "execute_model"]
    assert [getattr(step, "name", step) for step in steps] == [
        "filled first", "filled second", "empty", "filled third", "filled fourth"
    ]  # fmt: skip


class Runner:
    """A runner of this process: it notes what it does, and its steps sample one token."""

    def __init__(self, done: list[str]) -> None:
        self.block_tables = SimpleNamespace(apply_staged_writes=lambda: done.append("blocks"))
        self._done = done

    def __getattr__(self, name: str) -> Any:
        if name not in second_runner.UPDATES:
            raise AttributeError(name)
        return lambda step: self._done.append(f"{name} {step.name}")


class Alone(UniProcExecutor):
    """vLLM's executor with a worker that is not there."""

    def __init__(self, vllm_config: Any, done: list[str]) -> None:
        self.vllm_config, self._sampled = vllm_config, done
        self.driver_worker = SimpleNamespace(worker=SimpleNamespace(model_runner=Runner(done)))

    def collective_rpc(self, method: Any, *more: Any, args: Any = (), **named: Any) -> Any:
        self._sampled.append(method if args[0] is None else f"{method} {getattr(args[0], 'name', args[0])}")
        future: Future[Any] = Future()
        if args[0] is not None:
            future.set_result(None)
            return future
        event = SimpleNamespace(synchronize=lambda: self._sampled.append("wait"))
        output = SimpleNamespace(
            copy_event=event, num_sampled_tokens_np=np.array([1]), sampled_token_ids=np.array([[5]]),
            model_runner_output=SimpleNamespace(req_ids=["a"]),
        )  # fmt: skip
        return AsyncOutputFuture(output, single_value=True)


def test_a_runner_of_this_process_takes_in_a_step_before_the_tokens_are_waited_for() -> None:
    done: list[str] = []
    drafting, config = Drafting(), SimpleNamespace()
    offer(config, drafting)
    alone = Alone(config, done)
    for name in ("first", "second"):
        alone.execute_model(step_of(name), non_block=True)
        alone.sample_tokens(None, non_block=True)
    assert drafting.told == [([], []), (["a"], [5])]
    second = done[done.index("sample_tokens") + 1 :]
    updates = [f"{update} second" for update in second_runner.UPDATES]
    assert second == [*updates, "blocks", "wait", "execute_model filled second", "sample_tokens"]


def test_states_are_updated_once_for_each_step() -> None:
    updated: list[str] = []
    update = second_runner._once(lambda runner, step: updated.append(step.name))
    step, other = step_of("ahead"), step_of("other")
    runner = SimpleNamespace(block_tables=SimpleNamespace(apply_staged_writes=lambda: None))
    for name in second_runner.UPDATES:
        setattr(runner, name, functools.partial(update, runner))
    second_runner.update_ahead(runner, step)
    assert updated == ["ahead"] * len(second_runner.UPDATES)
    # As `execute_model` does; also with the copy that has the drafts.
    for name in second_runner.UPDATES:
        getattr(runner, name)(step)
        getattr(runner, name)(copy.copy(step))
        getattr(runner, name)(other)
    assert updated[len(second_runner.UPDATES) :] == ["other"] * len(second_runner.UPDATES)


def test_an_executor_that_nobody_drafts_for_keeps_nothing() -> None:
    late_drafts.apply()
    queues = Queues(SimpleNamespace())
    queues.execute_model(step := step_of("only"), non_block=True)
    queues.sample_tokens(None, non_block=True)
    assert queues.sent[0] == ("execute_model", step) and queues.rhyme_sampled is None


@pytest.mark.parametrize(
    ("backend", "newer", "fills"),
    [("uni", "1", True), ("mp", "1", True), ("ray", "1", True), ("ray", "0", False), ("external_launcher", "1", False)],
)
def test_an_executor_that_cannot_fill_steps_is_known(
    monkeypatch: pytest.MonkeyPatch, backend: str, newer: str, fills: bool
) -> None:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", newer)
    config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
    assert late_drafts.fills(config) == fills


def test_a_filled_step_goes_to_other_processes_with_its_drafts() -> None:
    output = scheduled({"a": 2, "b": 3})
    sent = pickle.loads(pickle.dumps(filled(output, room_of(output), Cut(*core.flatten([[7], [8, 9]])))))
    assert drafts_of(sent).tokens() == [[7], [8, 9]] and sent.total_num_scheduled_tokens == 2 + 3 + 7


def test_vllm_has_what_is_patched() -> None:
    late_drafts.apply()
    late_drafts.apply()
    # In a process that is sent the configuration, this comes with it.
    late_drafts.prepared("v2-async")
    word = pickle.loads(pickle.dumps({"rhyme_runner": late_drafts.RunnerName("v2-async")}))
    assert word == {"rhyme_runner": "v2-async"} and json.dumps(word)
    assert METHOD in get_args(vllm.config.vllm.NgramGPUTypes)
    for executor in (UniProcExecutor, MultiprocExecutor):
        # Both are wrapped once.
        executed: Any = executor.execute_model
        assert not hasattr(executed.__wrapped__, "__wrapped__")
        assert list(inspect.signature(executed).parameters)[1] == "scheduler_output"
        assert "grammar_output" in inspect.signature(executor.sample_tokens).parameters
    # Executors of Ray's actors are the one of processes.
    assert not {"execute_model", "sample_tokens"} & vars(RayExecutorV2).keys() and issubclass(
        RayExecutorV2, MultiprocExecutor
    )
