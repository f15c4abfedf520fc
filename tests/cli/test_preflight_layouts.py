"""Adaptive tensor parallelism that cannot be is refused with the reason, and one that can says what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhyme_openrlhf.cli import preflight, preflight_layouts, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.cli.preflight_models import PreflightError, check_model
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.training import layouts

pytest.importorskip("openrlhf")


def asked(folder: Path, *flags: str) -> str:
    args = upstream.parse([*arguments(str(folder)), "--tp_switch.enable", *flags])
    return preflight_layouts.check_layouts(args, check_model("", args.actor.model_name_or_path))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--vllm.num_engines", "1"], "needs two devices"),
        (["--vllm.num_engines", "3"], "--tp_switch.size 2 does not divide the 3 devices"),
        (["--vllm.num_engines", "3", "--tp_switch.size", "3"], "does not divide the model's 4 attention heads"),
        (["--train.async_enable"], "--train.async_enable only in the streaming pipeline"),
        (["--weights.transport", "openrlhf"], "--weights.transport buffer"),
        (["--latency.profile", "none"], "step times of both layouts .*--latency.profile is none"),
        (["--tp_switch.profile", "none"], "step times of both layouts .*--tp_switch.profile is none"),
        (["--cpu.kv_cache_mb", "900000"], "do not fit: .*lower --cpu.kv_cache_mb and --tp_switch.kv_cache_mb by"),
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


def test_without_the_flag_there_is_one_layout(tmp_path: Path) -> None:
    args = upstream.parse(arguments(str(tmp_path)))
    config = check_model("", args.actor.model_name_or_path)
    assert preflight_layouts.check_layouts(args, config) == "" and layouts.layout_plan(args, config) is None
    args.tp_switch.enable, args.vllm.num_engines, args.tp_switch.kv_cache_mb = True, 4, 20
    assert layouts.layout_plan(args, config) == LayoutPlan(4, 1, 2, 2, 20)


def test_other_checks_know_it(tmp_path: Path) -> None:
    argv = [*arguments(str(tmp_path)), "--vllm.num_engines", "2", "--tp_switch.enable", "--drafting.source", "ngram"]
    with pytest.raises(PreflightError, match="goes with no moves"):
        preflight.check(upstream.parse(argv))
