"""vLLM's configuration from our engines' arguments on a pretended GPU: runner, CUDA graphs, padding."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# A sample without drafts, one with three, some mixed batches, and the one step that FULL graphs are for.
STEPS = [(1, 1, 1), (1, 4, 4), (3, 8, 6), (40, 97, 33), (2, 66, 33)]

# In a process of its own, for which there is a GPU.
PROGRAM = f"""
import dataclasses, json, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import cuda_stand_in
from cuda_stand_in import engine_config, resolve_graphs
cuda_stand_in.install()
from graph_padding import Step, counted
from rhyme_openrlhf.settings.config import DraftingSettings, HistoSpecSettings, RhymeSettings
from rhyme_openrlhf.engine.rows import most_rows
from rhyme_openrlhf.settings.engine import EngineSettings
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings

drafting, plain = RhymeSettings(), RhymeSettings(histospec=HistoSpecSettings(enable=False))
ngram = RhymeSettings(drafting=DraftingSettings(source="ngram"))
second = RhymeSettings(drafting=DraftingSettings(runner="v2-async"))
turns = dataclasses.replace(plain, tp_switch=TpSwitchSettings(enable=True))
steps = [Step(*step) for step in {STEPS!r}]
default = {{"compilation_config": {{}}}}

def sizes(config):
    return list(config.compilation_config.cudagraph_capture_sizes)

def wide(**more):
    room = EngineSettings(max_num_seqs=512, max_num_batched_tokens=8192)
    config = engine_config(dataclasses.replace(drafting, engine=room), **room.arguments(), **more)
    return dict(most=most_rows(config), largest=config.compilation_config.max_cudagraph_capture_size)

def facts(config):
    before = sizes(config)
    resolve_graphs(config)
    return dict(
        v2=config.use_v2_model_runner, scheduling="async" if config.scheduler_config.async_scheduling else "sync",
        mode=config.compilation_config.cudagraph_mode.name, sizes=before, resolved=sizes(config),
    )

def rows(config):
    return dict(sum(counted(config, steps).values(), start=type(next(iter(counted(config, []).values())))()))

found = dict(
    plain=facts(engine_config(plain)), drafting=facts(engine_config(drafting)),
    default=facts(engine_config(drafting, **default)), rows=rows(engine_config(drafting)),
    default_rows=rows(engine_config(drafting, **default)), most=most_rows(engine_config(drafting)),
    wide=wide(), eager=wide(enforce_eager=True),
    # These set which runner all processes use from then on.
    moving=facts(engine_config(plain, moving=True)), turns=facts(engine_config(turns, moving=True)),
    moving_second=facts(engine_config(second, moving=True)), ngram=facts(engine_config(ngram)),
    second=facts(engine_config(second)), second_rows=rows(engine_config(second)),
)
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def on_gpu(starts_python: None) -> dict[str, Any]:
    # What engines of other tests were started with says nothing here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "TORCH_"))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_graphs_of_an_engine_that_drafts_keep_their_sizes(on_gpu: dict[str, Any]) -> None:
    ours = on_gpu["drafting"]
    assert ours["mode"] == on_gpu["ngram"]["mode"] == "PIECEWISE"
    assert ours["sizes"] == ours["resolved"] and {1, 2, 4, 8, 16, 512} <= set(ours["sizes"])
    # What vLLM chooses by itself: if it is no longer so, PIECEWISE is not needed any more.
    assert on_gpu["default"]["mode"] == "FULL_AND_PIECEWISE"
    assert all(size % 33 == 0 for size in on_gpu["default"]["resolved"])


def test_steps_are_padded_little(on_gpu: dict[str, Any]) -> None:
    rows = sum(step[1] for step in STEPS)
    assert on_gpu["rows"]["rows"] == on_gpu["default_rows"]["rows"] == rows
    assert on_gpu["default_rows"]["computed"] == 33 + 33 + 33 + 99 + 66
    assert on_gpu["rows"]["computed"] == 1 + 4 + 8 + 104 + 72
    assert on_gpu["rows"]["PIECEWISE"] == on_gpu["rows"]["steps"] == len(STEPS)


def test_the_second_runner_has_one_graph_for_each_step_with_drafts(on_gpu: dict[str, Any]) -> None:
    ours = on_gpu["second"]
    assert (ours["v2"], ours["scheduling"], ours["mode"]) == (True, "async", "FULL_AND_PIECEWISE")
    assert ours["sizes"] == ours["resolved"]
    assert on_gpu["second_rows"]["FULL"] == on_gpu["second_rows"]["steps"] == len(STEPS)
    assert on_gpu["second_rows"]["computed"] == on_gpu["rows"]["computed"]


def test_rows_follow_the_size_of_the_engine_and_graphs_reach_them(on_gpu: dict[str, Any]) -> None:
    """128 samples; 512 of them, whose rows vLLM's own graphs do not reach; and as many without graphs."""
    assert on_gpu["most"] == on_gpu["drafting"]["sizes"][-1] == on_gpu["second"]["resolved"][-1] == 1024
    assert on_gpu["wide"] == {"most": 2048, "largest": 2048} and on_gpu["eager"] == {"most": 2048, "largest": 0}


def test_engines_whose_samples_move_or_whose_layouts_take_turns_are_as_fast_as_others(on_gpu: dict[str, Any]) -> None:
    fast = [on_gpu[name] for name in ("plain", "moving", "turns", "moving_second")]
    assert {(one["v2"], one["scheduling"]) for one in fast} == {(True, "async")}


def test_padding_is_the_workers(on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM rounds sizes in the worker's configuration alone; what it has there is what a profile must know."""
    from rhyme_openrlhf.engine import worker as worker_extension
    from rhyme_openrlhf.engine.actor_parts import measuring
    from rhyme_openrlhf.settings.config import RhymeSettings

    def config(sizes: list[int]) -> Any:
        return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))

    frontend, worker = on_gpu["default"]["sizes"], on_gpu["default"]["resolved"]
    assert len(frontend) > len(worker)

    async def workers(method: Any) -> list[Any]:
        rank = SimpleNamespace(vllm_config=config(worker))
        return [getattr(worker_extension.WorkerExtension, method.__name__)(rank)]

    for module in (measuring, worker_extension):
        monkeypatch.setattr(module, "gpu_present", lambda: True, raising=False)
    llm = SimpleNamespace(vllm_config=config(frontend))
    engine: Any = SimpleNamespace(llm=llm, workers=workers, rhyme=RhymeSettings())
    assert asyncio.run(measuring.Measuring(engine).padded_rows()) == tuple(worker)
