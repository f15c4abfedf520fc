"""Drafts for a step that is scheduled already: the step that is computed, and vLLM's own side."""

from __future__ import annotations

import inspect
import json
import pickle
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import vllm.config.vllm
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import async_utils, model_runner

from rhyme_openrlhf.drafting.planner import Cut
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.engine.patches import late_drafts
from rhyme_openrlhf.engine.patches.late_drafts import filled, offer, sampled_of, tokens_of
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
    step = filled(output, Cut(*core.flatten(list(drafts.values()))))
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


def test_a_configuration_carries_the_drafting() -> None:
    config, drafting = VllmConfig(), object()
    offer(config, drafting)  # type: ignore[arg-type]
    assert getattr(config, late_drafts.LATE) is drafting


def test_vllm_has_what_is_patched() -> None:
    late_drafts.apply()
    late_drafts.apply()
    # In a process that is sent the configuration, this comes with it.
    late_drafts.prepared("v2-async")
    word = pickle.loads(pickle.dumps({"rhyme_runner": late_drafts.RunnerName("v2-async")}))
    assert word == {"rhyme_runner": "v2-async"} and json.dumps(word)
    runner = model_runner.GPUModelRunner
    assert METHOD in get_args(vllm.config.vllm.NgramGPUTypes)
    decided = inspect.getsource(VllmConfig)
    assert decided.count("self.speculative_config.method not in get_args(NgramGPUTypes)") == 2
    # Both are wrapped once.
    executed, sampled = inspect.unwrap(runner.execute_model), inspect.unwrap(runner.sample_tokens)
    assert runner.execute_model.__wrapped__ is executed or runner.execute_model.__wrapped__.__wrapped__ is executed
    assert list(inspect.signature(executed).parameters)[1] == "scheduler_output"
    assert "dummy_run" in inspect.signature(executed).parameters
    assert "AsyncOutput(" in inspect.getsource(sampled) and "return async_output" in inspect.getsource(sampled)
    output = inspect.getsource(async_utils.AsyncOutput)
    for name in ("copy_event", "num_sampled_tokens_np", "sampled_token_ids", "model_runner_output"):
        assert f"self.{name}" in output
    # Room is kept behind each scheduled step, as a list that is not changed.
    kept = inspect.getsource(AsyncScheduler._update_after_schedule)
    assert "request.spec_token_ids = self._spec_token_placeholders" in kept
