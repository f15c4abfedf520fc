"""What a run's models need of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.memory_plan import Layout, ModelShape, model_shape, needs, read_shape

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
}  # fmt: skip
LAYOUT = Layout(8, 3, False, True, 2, 16.0, 1000, 0.5)


def test_the_shape_is_that_of_the_weights() -> None:
    shape = read_shape(str(embedded.MODEL))
    assert shape is not None
    weights = (embedded.MODEL / "model.safetensors").stat().st_size
    # 16 bits a number, and a header.
    assert shape.parameters * 2 == pytest.approx(weights, rel=0.01)
    qwen = model_shape(QWEN3_8B)
    assert qwen is not None and qwen.parameters == pytest.approx(8.19e9, rel=0.001)
    assert qwen.kv_bytes(1) == 2 * 36 * 8 * 128 * 2 and qwen.kv_bytes(16) == 2 * 36 * 128 * 2


@pytest.mark.parametrize("config", [{}, {"hidden_size": "x"}, {**QWEN3_8B, "num_experts": 128}, {"architectures": []}])
def test_what_is_no_dense_decoder_has_no_shape(config: dict[str, object]) -> None:
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


def test_stages_and_offloading_share_the_sixteen_bytes() -> None:
    shape = ModelShape("m", 1000, 2, 4, 8)

    def policy(stage: int, offload: bool = False) -> float:
        return needs(shape, Layout(8, stage, offload, False, 1, 1.0, 1, 0.0))[0].size

    assert [policy(stage) for stage in range(4)] == [16000, 5500, 3750, 2000]
    assert policy(3, offload=True) == 500
    by_name = {need.what: need.size for need in needs(shape, LAYOUT)}
    assert by_name["Reference model"] == 250 and by_name["Engine: weights"] == 1000
    assert by_name["KV cache, all its samples at full length"] == 2 * 2 * 2 * 8 * 2 * 16 * 1000
    assert by_name["History, at most"] == 2**29
