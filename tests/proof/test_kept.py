"""Kept proofs: each of one kind of engine, and of no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rhyme_openrlhf.proof import kept

ENGINE = kept.Subject(
    "NVIDIA H200",
    "580.1",
    {"vllm": "0.29.0"},
    "Qwen3ForCausalLM",
    "bfloat16",
    2,
    "V2, asynchronous",
    "FULL",
    "FLASH_ATTN",
)
OTHERS = {
    "gpu": "NVIDIA A100", "driver": "590.2", "versions": {"vllm": "0.32.0"}, "architecture": "LlamaForCausalLM",
    "dtype": "float16", "ranks": 1, "runner": "V1, synchronous", "graphs": "PIECEWISE", "attention": "TRITON_ATTN",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_proof_is_of_its_engine_alone() -> None:
    assert OTHERS.keys() == {one.name for one in dataclasses.fields(kept.Subject)}
    file = kept.write(ENGINE, "2026-11-28T10:00:00+00:00")
    assert kept.date(ENGINE) == "2026-11-28T10:00:00+00:00" and kept.nearest(ENGINE) == ""
    for name, value in OTHERS.items():
        assert kept.date(dataclasses.replace(ENGINE, **{name: value})) == ""
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    kept.remove(ENGINE)
    kept.remove(ENGINE)
    assert kept.date(ENGINE) == ""


def test_what_is_other_in_the_most_alike_proof_is_named() -> None:
    assert kept.nearest(ENGINE) == ""
    kept.write(dataclasses.replace(ENGINE, driver="590.2", gpu="NVIDIA A100"), "2026-11-28")
    kept.write(dataclasses.replace(ENGINE, driver="590.2"), "2026-11-28")
    assert kept.nearest(ENGINE) == "driver 590.2, now 580.1"
    kept.write(dataclasses.replace(ENGINE, versions={"vllm": "0.32.0"}), "2026-11-28")
    assert kept.nearest(ENGINE) in ("driver 590.2, now 580.1", "other versions")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"subject": 3, "date": "2026"}', '{"date": "2026"}'])
def test_a_broken_file_is_no_proof(text: str) -> None:
    kept.write(ENGINE, "2026-11-28")
    kept.path(ENGINE).write_text(text)
    assert kept.date(ENGINE) == kept.nearest(ENGINE) == ""
