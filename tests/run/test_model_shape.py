"""The size of a model's weights and KV cache by its configuration, against Transformers' models and vLLM's caches."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.run.model_shape import is_hybrid, model_shape, read_shape
from tests.run.model_configurations import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    MIXTRAL_8X7B,
    QWEN2_MOE,
    QWEN3_8B,
    QWEN3_30B_A3B,
)


def test_the_shape_is_that_of_the_weights() -> None:
    shape = read_shape(str(embedded.MODEL))
    assert shape is not None
    weights = (embedded.MODEL / "model.safetensors").stat().st_size
    # 16 bits a number, and a header.
    assert shape.parameters * 2 == pytest.approx(weights, rel=0.01)
    qwen = model_shape(QWEN3_8B)
    assert qwen is not None and qwen.parameters == pytest.approx(8.19e9, rel=0.001)
    assert qwen.kv_bytes(1) == 2 * 36 * 8 * 128 * 2 and qwen.kv_bytes(16) == 2 * 36 * 128 * 2


@pytest.mark.parametrize(
    "config", [{}, {"hidden_size": "x"}, {**QWEN3_8B, "moe_num_experts": 64}, {"architectures": []}]
)
def test_what_is_no_known_decoder_has_no_shape(config: dict[str, object]) -> None:
    assert model_shape(config) is None


def test_a_downloaded_model_is_found_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_shape("Qwen/Qwen3-8B") is None and read_shape(str(tmp_path)) is None
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_8B))
    assert read_shape("Qwen/Qwen3-8B") == model_shape(QWEN3_8B)
    (snapshot / "config.json").write_text("[1")
    assert read_shape("Qwen/Qwen3-8B") is None


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (DEEPSEEK_V2_LITE, 15.7), (QWEN3_30B_A3B, 30.5), (MIXTRAL_8X7B, 46.7), (QWEN2_MOE, 1.347), (DEEPSEEK_V3, 671.0)
    ],
    ids=lambda one: one.get("model_type") if isinstance(one, dict) else str(one),
)  # fmt: skip
def test_experts_and_latent_attention_have_the_parameters_of_the_real_model(
    config: dict[str, Any], billions: float
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == pytest.approx(billions * 1e9, rel=0.01)
    # As the hub's file has it, and as Transformers writes it, with names of its own.
    for form in (config, {**kind.to_dict(), "architectures": config["architectures"]}):
        shape = model_shape(form)
        assert shape is not None and shape.parameters == pytest.approx(parameters, rel=0.001)


@pytest.mark.parametrize(
    "config",
    [DEEPSEEK_V2_LITE, QWEN3_30B_A3B, MIXTRAL_8X7B],
    ids=lambda config: config["model_type"],
)
def test_a_token_takes_what_vllm_reserves_for_it(config: dict[str, Any], tmp_path: Path, starts_python: None) -> None:
    pytest.importorskip("vllm")
    from vllm import AsyncEngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    from rhyme_openrlhf.latency.profile import kv_bytes_per_token

    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = AsyncEngineArgs(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096)
    model = arguments.create_model_config()
    kind = MLAAttentionSpec if model.use_mla else FullAttentionSpec
    shape = read_shape(str(tmp_path))
    assert shape is not None
    for ranks in (1, 2, 8):
        parallel = SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1)
        heads = model.get_num_kv_heads(parallel)
        page = kind(block_size=16, num_kv_heads=heads, head_size=model.get_head_size(), dtype=model.dtype)
        expected = page.page_size_bytes * model.get_total_num_hidden_layers() // 16
        assert shape.kv_bytes(ranks) == kv_bytes_per_token(model.hf_config, "bfloat16", ranks) == expected


@pytest.mark.parametrize(
    "changed", [{"index_topk": 2048}, {"moe_layer_freq": [0, 1]}, {"interleave_moe_layer_step": 2}], ids=str
)
def test_what_would_be_counted_wrongly_has_no_shape(changed: dict[str, Any]) -> None:
    assert model_shape({**DEEPSEEK_V2_LITE, **changed}) is None


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        (QWEN3_8B, False),
        ({**QWEN3_8B, "layer_types": ["full_attention", "sliding_attention"]}, False),
        ({**QWEN3_8B, "layer_types": ["full_attention", "linear_attention"]}, True),
        ({"text_config": {"layer_types": ["linear_attention"]}}, True),
        ({**QWEN3_8B, "mamba_d_state": 128}, True),
        ({**QWEN3_8B, "linear_attn_config": {"kda_layers": [1, 2, 3]}}, True),
    ],
)
def test_layers_with_a_state_make_a_model_hybrid(config: dict[str, object], hybrid: bool) -> None:
    assert is_hybrid(config) is hybrid


def test_a_configuration_that_was_made_to_do_harm_has_no_shape(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert read_shape(str(tmp_path)) is None
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert read_shape(str(tmp_path)) is None
    for changed in ({"num_hidden_layers": 10**15, "num_experts": 8}, {"hidden_size": 1e400}, {"layer_types": 5}):
        assert model_shape({**QWEN3_8B, **changed}) is None
