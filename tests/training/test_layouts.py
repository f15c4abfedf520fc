"""The bytes of a policy's weights in its engines: by the model's files, or by its configuration where none is here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from rhyme_openrlhf import embedded
from rhyme_openrlhf.training.layouts import weight_bytes

# The embedded model's, as its file has them.
PARAMETERS = 1_017_216


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
def test_a_model_without_files_has_the_bytes_of_its_parameters(dtype: str, bytes_each: int, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(embedded.MODEL)
    assert weight_bytes(config, str(tmp_path), dtype) == PARAMETERS * bytes_each


@pytest.mark.parametrize(
    ("stored", "dtype", "nbytes"),
    [("bfloat16", "float32", 600), ("torch.float32", "bfloat16", 150), (None, "float32", 300)],
)
def test_files_have_the_bytes_of_their_own_format(stored: str | None, dtype: str, nbytes: int, tmp_path: Path) -> None:
    for name, size in (("model-1-of-2.safetensors", 100), ("model-2-of-2.safetensors", 200), ("tokenizer.json", 9)):
        (tmp_path / name).write_bytes(b"\0" * size)
    assert weight_bytes(SimpleNamespace(dtype=stored), str(tmp_path), dtype) == nbytes
