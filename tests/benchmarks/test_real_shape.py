"""A model of a real one's shape answers as the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import real_shape
import torch
import transformers

from rhyme_openrlhf import embedded


def test_a_wider_and_deeper_model_says_the_same(tmp_path: Path) -> None:
    real_shape.make("tiny", tmp_path)
    small, wide = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (embedded.MODEL, tmp_path)
    )
    text = torch.randint(3, 100, (4, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right, found = (model(text).logits.log_softmax(-1) for model in (small, wide))
    assert found.shape[-1] == 300 and found[..., 128:].max() < -100
    assert (found[..., :128] - right).abs().max() < 2e-3
    assert sum(parameter.numel() for parameter in wide.parameters()) > 5 * embedded_parameters()
    # The embedded tokenizer goes along.
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 300
    assert (tmp_path / "tokenizer.json").read_bytes() == (embedded.MODEL / "tokenizer.json").read_bytes()


def embedded_parameters() -> int:
    config = transformers.AutoConfig.from_pretrained(embedded.MODEL)
    return sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-8b"])
def test_real_shapes_hold_the_embedded_heads(name: str) -> None:
    config = json.loads((embedded.MODEL / "config.json").read_text())
    maker = real_shape.Maker(real_shape.SHAPES[name], config)
    assert (maker.places() < 128).all() and len(set(maker.places().tolist())) == 32
    heads = maker.query_heads()
    # Each query head reads its own keys.
    group = real_shape.SHAPES[name].num_attention_heads // 8
    assert [head // group for head in heads] == [0, 0, 1, 1]
