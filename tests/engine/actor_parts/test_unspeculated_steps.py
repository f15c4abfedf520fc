"""A run's first engine measures an engine without speculation before it starts: only where it has to."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.latency import measure as latency_measure
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import StepShape
from rhyme_openrlhf.latency.profile import Subject
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.engine import CpuSettings
from rhyme_openrlhf.settings.latency import LatencySettings
from rhyme_openrlhf.settings.run import RunSettings
from tests import nvml
from tests.engine.actors import an_actor
from tests.latency import formula

pytest.importorskip("vllm")
from rhyme_openrlhf.engine.actor_parts import unspeculated_steps
from rhyme_openrlhf.engine.arguments import speculation_arguments
from rhyme_openrlhf.platform.cpu_arguments import cpu_engine_arguments

ARGUMENTS = {"model": str(embedded.MODEL), "dtype": "bfloat16", "tensor_parallel_size": 1}
SUBJECT = Subject("Qwen3ForCausalLM 4x128 heads 4/2 vocabulary 128", "Pretended GPU", "bfloat16", 1)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a GPU, and no profile kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(unspeculated_steps, "gpu_present", lambda: True)
    nvml.install(monkeypatch, tmp_path)


def keep(profile: profiles.Profile) -> None:
    path = profiles.folder() / profiles.file_name(SUBJECT)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiles.write(profile, path)


def test_the_first_engine_of_a_model_measures_and_the_kept_profile_saves_it(a_gpu: None) -> None:
    assert unspeculated_steps.are_wanted(RhymeSettings(), 0, ARGUMENTS)
    assert not unspeculated_steps.are_wanted(RhymeSettings(), 1, ARGUMENTS)
    # A profile of a version that did not measure them is completed.
    keep(formula.profile(subject=SUBJECT))
    assert unspeculated_steps.are_wanted(RhymeSettings(), 0, ARGUMENTS)
    keep(formula.profile(subject=SUBJECT, unspeculated=formula.unspeculated(0.8)))
    assert not unspeculated_steps.are_wanted(RhymeSettings(), 0, ARGUMENTS)


@pytest.mark.parametrize(
    "settings",
    [
        {"latency": LatencySettings("none")},
        {"latency": LatencySettings("profile.json")},
        {"histospec": HistoSpecSettings(enable=False)},
        {"drafting": DraftingSettings(probe_share=0)},
        {"run": RunSettings(reproducible=True)},
    ],
    ids=str,
)
def test_a_run_that_measures_no_gain_or_no_profile_does_not(a_gpu: None, settings: dict[str, Any]) -> None:
    assert not unspeculated_steps.are_wanted(RhymeSettings(**settings), 0, ARGUMENTS)


def test_without_a_gpu_vllm_runs_both_engines_alike() -> None:
    import vllm

    def chosen(settings: RhymeSettings) -> tuple[Any, ...]:
        arguments = {**ARGUMENTS, "max_model_len": 256, "enforce_eager": False, **speculation_arguments(settings)}
        config = vllm.AsyncEngineArgs(**cpu_engine_arguments(arguments, CpuSettings())).create_engine_config()
        graphs = config.compilation_config.cudagraph_mode
        return config.scheduler_config.async_scheduling, config.use_v2_model_runner, graphs

    without = chosen(RhymeSettings(histospec=HistoSpecSettings(enable=False)))
    assert chosen(RhymeSettings()) == without
    assert not unspeculated_steps.are_wanted(RhymeSettings(), 0, ARGUMENTS)


def test_an_engine_measures_one_without_speculation_and_then_speculates(
    starts_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly = unspeculated_steps.UNSPECULATED_QUICKLY
    few = dataclasses.replace(quickly, grid=dataclasses.replace(quickly.grid, running=(1, 4), contexts=(32,)), rounds=1)
    monkeypatch.setattr(unspeculated_steps, "UNSPECULATED_QUICKLY", few)
    # Other tests may delay one of so few steps, and a delayed point would be left out.
    monkeypatch.setattr(latency_measure, "undelayed", list)
    monkeypatch.setattr(unspeculated_steps, "are_wanted", lambda *_: True)
    with an_actor() as actor:
        found = actor.call(actor.raw.unspeculated())
        assert found.problem == "" and [point.running for point in found.steps] == [1, 4]
        assert all(point.drafts == 0 and point.seconds > 0 for point in found.steps)
        assert actor.raw.rhyme.histospec.enable
        assert actor.raw.llm.vllm_config.speculative_config.num_speculative_tokens == 32
        assert actor.call(actor.raw.decode_steps(StepShape(2, 32, 3), 2))


def test_a_start_that_fails_is_a_sentence_and_ends_what_started() -> None:
    ended = []
    engine = SimpleNamespace(engine=SimpleNamespace(llm=SimpleNamespace(shutdown=lambda: ended.append(1))))

    async def failing() -> None:
        raise RuntimeError("Engine core initialization failed\nno memory left")

    assert asyncio.run(unspeculated_steps.measured(engine, failing)) == ((), "no memory left") and ended == [1]
    without = SimpleNamespace(engine=SimpleNamespace())
    assert asyncio.run(unspeculated_steps.measured(without, failing)).problem == "no memory left"


def test_several_ranks_are_awaited_until_their_memory_is_free_and_several_nodes_are_not_measured() -> None:
    """A rank that is Ray's actor ends some time after the engine core."""
    rank = subprocess.Popen(["sleep", "600"])
    nodes = ["a", "a"]

    async def ranks(method: Any) -> list[tuple[str, int]]:
        return [(node, rank.pid) for node in nodes]

    async def nothing() -> None: ...

    def shut_down() -> None:
        def end() -> None:
            rank.kill()
            rank.wait()

        threading.Timer(0.5, end).start()

    engine = SimpleNamespace(engine=SimpleNamespace(llm=SimpleNamespace(shutdown=shut_down), workers=ranks))
    nodes[1] = "b"
    assert asyncio.run(unspeculated_steps.measured(engine, nothing)).problem == "its ranks are on several nodes"
    assert not psutil.pid_exists(rank.pid)
