"""Adaptive tensor parallelism that cannot be is refused with the reason, and one that can says what it takes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import preflight, preflight_layouts, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.cli.preflight_models import PreflightError, check_model
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.options import OPTION
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings
from rhyme_openrlhf.training import layouts

pytest.importorskip("openrlhf")


def asked(folder: Path, *flags: str, on_gpus: bool = False) -> str:
    args = upstream.parse([*arguments(str(folder)), "--tp_switch.enable", *flags])
    return preflight_layouts.check_layouts(args, check_model("", args.actor.model_name_or_path), on_gpus)[1]


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with memory for four engines; the real machine's load plays no part."""
    monkeypatch.setattr(layouts, "free_bytes", lambda: 64 << 30)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--vllm.num_engines", "1"], "needs two devices"),
        (["--vllm.num_engines", "3"], "--tp_switch.size 2 does not divide the 3 devices"),
        (["--vllm.num_engines", "3", "--tp_switch.size", "3"], "does not divide the model's 4 attention heads"),
        (["--train.async_enable"], "--train.async_enable only in the streaming pipeline"),
        (["--weights.transport", "openrlhf"], "--weights.transport buffer"),
        (["--latency.profile", "none"], "step times of all layouts .*--latency.profile is none"),
        (["--tp_switch.profile", "none"], "step times of all layouts .*--tp_switch.profile is none"),
        (["--cpu.kv_cache_mb", "900000"], "do not fit: .*lower --cpu.kv_cache_mb and --tp_switch.kv_cache_mb to"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(tmp_path: Path, flags: list[str], says: str) -> None:
    with pytest.raises(PreflightError, match=says) as error:
        asked(tmp_path, "--vllm.num_engines", "2", *flags)
    assert "\n" not in str(error.value)


def test_the_plan_is_told(tmp_path: Path) -> None:
    said = asked(tmp_path, "--vllm.num_engines", "2", "--cpu.kv_cache_mb", "64")
    assert said.startswith("layouts: 2 engines of tensor parallelism 1 with ") and "64 MB of KV cache" in said
    # Each of two ranks has one of two KV heads: half the bytes for as many tokens.
    assert "1 of 2 with " in said and " and 32 MB, and " in said
    unmeasured = ["--no-histospec.enable", "--latency.profile", "none", "--tp_switch.samples", "4"]
    assert asked(tmp_path, "--vllm.num_engines", "2", *unmeasured)


@pytest.mark.usefixtures("roomy")
def test_without_the_flag_there_is_one_layout(tmp_path: Path) -> None:
    args = upstream.parse(arguments(str(tmp_path)))
    config = check_model("", args.actor.model_name_or_path)
    assert preflight_layouts.check_layouts(args, config, False) == (None, "")
    args.tp_switch.enable, args.vllm.num_engines, args.tp_switch.kv_cache_mb = True, 4, 20
    plan, _ = layouts.planned_layouts(args, config, False)
    assert plan == LayoutPlan(4, 1, (Tail(2, 2, 20),), args.cpu.kv_cache_mb)


GPU = ("--tp_switch.device_mb", "80000", "--vllm.gpu_memory_utilization", "0.9", "--tp_switch.reserve_mb", "3000")


def test_on_gpus_it_says_that_it_has_never_been_run(tmp_path: Path) -> None:
    """72,000 MB: 6,000 for vLLM twice; of what is left two parts to the aligned engines, one to the tail's ranks."""
    said, never = asked(tmp_path, "--vllm.num_engines", "2", *GPU, on_gpus=True).splitlines()
    assert never == layouts.NEVER_RUN and "never been run on a GPU" in never
    assert "6,000 MB on each for their processes" in said
    assert said.endswith("72,000 MB of each GPU's 80,000 MB are for engines (--vllm.gpu_memory_utilization)")
    assert "never on a GPU" in fields(TpSwitchSettings)[0].metadata[OPTION].help


# Engines sleep between rollouts in colocated runs only.
COLOCATED = (
    "--train.colocate_all", "--actor.num_gpus_per_node", "4", "--ref.num_gpus_per_node", "4", "--vllm.num_engines", "4",
    "--algo.kl.init_coef", "0.01", "--vllm.enable_sleep",
)  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--vllm.gpu_memory_utilization", "0.05"], "alone do not fit so often, or raise --vllm.gpu_memory_util"),
        (["--tp_switch.aligned_kv_cache_mb", "70000"], "lower --tp_switch.aligned_kv_cache_mb and --tp_switch.kv_ca"),
        ([*COLOCATED, "--tp_switch.kv_caches", "turns"], "does not go with --vllm.enable_sleep"),
        (
            [*COLOCATED, "--tp_switch.aligned_kv_cache_mb", "50000", "--tp_switch.kv_cache_mb", "50000"],
            "only the layout that runs has its KV cache.*does not go with --vllm.enable_sleep",
        ),
    ],
)
def test_what_cannot_be_on_gpus_is_refused_with_the_reason(tmp_path: Path, flags: list[str], says: str) -> None:
    with pytest.raises(PreflightError, match=says) as error:
        asked(tmp_path, "--vllm.num_engines", "2", *GPU, *flags, on_gpus=True)
    assert "\n" not in str(error.value)


def test_a_gpu_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    """The machine that starts the run has none here."""
    with pytest.raises(PreflightError, match="how much memory the run's GPUs have .*--tp_switch.device_mb"):
        asked(tmp_path, "--vllm.num_engines", "2", on_gpus=True)


def test_what_shares_a_gpu_finds_room(tmp_path: Path) -> None:
    """Five processes of a fifth each, as OpenRLHF asks Ray for: policy, reference model, engines of three layouts."""
    assert asked(tmp_path, *COLOCATED, "--tp_switch.sizes", "2,4", *GPU, on_gpus=True)
    critic = ["--critic.model_name_or_path", "critic", "--algo.advantage.estimator", "gae"]
    critic += ["--critic.num_gpus_per_node", "4"]
    with pytest.raises(PreflightError, match="room for 5 .* be 6: engines of 3 layouts, actor, reference, critic"):
        asked(tmp_path, *COLOCATED, *critic, "--tp_switch.sizes", "2,4", *GPU, on_gpus=True)


@pytest.mark.usefixtures("roomy")
def test_engines_on_gpus_get_their_sizes(tmp_path: Path) -> None:
    """vLLM takes `gpu_memory_utilization` of the device for granted at its start, also where it sizes nothing by it."""
    args = upstream.parse([*arguments(str(tmp_path)), "--tp_switch.enable", "--vllm.num_engines", "4", *GPU])
    args.tp_switch.sizes = "2,4"
    config = check_model("", args.actor.model_name_or_path)
    plan, _ = layouts.planned_layouts(args, config, True)
    assert plan.both_awake and plan.sizes == (1, 2, 4)
    given = [layouts.engine_arguments(plan, layout) for layout in range(3)]
    assert [one["kv_cache_memory_bytes"] for one in given] == [size * 1024**2 for size in plan.kv_sizes]
    assert sum(one["gpu_memory_utilization"] for one in given) == pytest.approx(0.9, abs=0.001)
    assert not any("enable_cumem_allocator" in one for one in given)
    args.tp_switch.kv_caches = "turns"
    plan, _ = layouts.planned_layouts(args, config, True)
    assert all(layouts.engine_arguments(plan, at)["enable_cumem_allocator"] for at in range(3))
    # Two KV heads: over two ranks and over four, one on each.
    assert plan.kv_sizes[1] == plan.kv_sizes[2] == pytest.approx(plan.kv_sizes[0] / 2, abs=1)
    # Engines without GPUs are sized by settings.
    without, _ = layouts.planned_layouts(args, config, False)
    assert layouts.engine_arguments(without, 1) == {}
    assert layouts.layout_settings(RhymeSettings(), without, 1).cpu.kv_cache_mb == without.tails[0].kv_mb


def test_vllm_takes_these_arguments() -> None:
    """Names that vLLM does not know would end the engines."""
    from vllm import AsyncEngineArgs

    plan = LayoutPlan(2, 1, (Tail(1, 2, 10),), 20, False, (0.5, 0.25))
    known = {field.name for field in fields(AsyncEngineArgs)}
    assert set(layouts.engine_arguments(plan, 1)) <= known


def test_a_draft_model_is_refused(tmp_path: Path, starts_python: None) -> None:
    """Nothing plans its memory; moves and reallocation have none to plan."""
    drafting = ["--drafting.source", "draft_model", "--drafting.model", str(embedded.DRAFT_MODEL)]
    argv = [*arguments(str(tmp_path)), "--vllm.num_engines", "2", *drafting]
    with pytest.raises(PreflightError, match="does not go with --tp_switch.enable yet"):
        preflight.check(upstream.parse([*argv, "--tp_switch.enable"]))
    preflight.check(upstream.parse([*argv, "--reallocation.enable"]))
