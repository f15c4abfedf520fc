"""Padding changes how many shapes there are, and nothing else."""

from __future__ import annotations

import pytest
import torch
import vllm._custom_ops as custom_ops
from hypothesis import given
from hypothesis import strategies as st
from vllm.platforms import current_platform

from rhyme_openrlhf.platform import cpu_shapes

# vLLM 0.29.0, model_executor/layers/utils.py: create_onednn_mm(weight.t(), 32)
KEPT_BY_VLLM = 32


@given(st.integers(1, 5000))
def test_padding_only_adds(rows: int) -> None:
    padded = cpu_shapes.padded_rows(rows)
    assert rows <= padded < rows + (16 if rows <= 256 else rows / 4)


def test_there_are_no_more_shapes_than_vllm_keeps() -> None:
    assert len({cpu_shapes.padded_rows(rows) for rows in range(1, cpu_shapes.MOST_ROWS + 1)}) <= KEPT_BY_VLLM


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 300, 2049])
def test_products_stay_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    current_platform.import_kernels()
    monkeypatch.setattr(custom_ops, "onednn_mm", custom_ops.onednn_mm)
    weight, x, bias = torch.randn(24, 40), torch.randn(rows, 24), torch.randn(40)
    handler = custom_ops.create_onednn_mm(weight, KEPT_BY_VLLM)
    cpu_shapes.apply()
    out = custom_ops.onednn_mm(handler, x, bias)
    assert out.shape == (rows, 40) and out.is_contiguous()
    torch.testing.assert_close(out, x @ weight + bias)
    cube = custom_ops.onednn_mm(handler, x.reshape(rows, 1, 24), None)
    torch.testing.assert_close(cube, (x @ weight).reshape(rows, 1, 40))
