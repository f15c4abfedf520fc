"""An engine that checks drive: what it sets before vLLM starts, and what it says of itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine.actor import RhymeRolloutActor
from rhyme_openrlhf.engine.actor_parts.answers import EXACT_PRODUCTS, Answers
from rhyme_openrlhf.engine.factory import parts_of_checked
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.verify.engines import EngineFacts


@pytest.mark.parametrize(("dtype", "set_to"), [("float32", "ieee"), ("bfloat16", None)])
def test_products_are_exact_in_fp32_before_the_engine_starts(
    dtype: str, set_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    class Stopped(Exception):
        pass

    async def start(self: Any, _: Any, kwargs: Any, *__: Any) -> None:
        found.append((kwargs["dtype"], os.environ.get("TRITON_F32_DEFAULT")))
        raise Stopped

    # So that what the engine sets is taken back.
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    monkeypatch.setattr(RhymeRolloutActor, "_start", start)
    engine: Any = RhymeRolloutActor.__new__(RhymeRolloutActor)
    ours = {"rhyme": RhymeSettings(), "run_seed": 1, "index": 0, "history_workers": [], "parts": parts_of_checked}
    with pytest.raises(Stopped):
        asyncio.run(engine.__init__(model="m", dtype=dtype, **ours))
    assert found == [(dtype, set_to)]


def test_triton_takes_its_default_from_that_variable(starts_python: None) -> None:
    pytest.importorskip("triton")
    code = "from triton import knobs; print(knobs.language.fp32_default)"
    environment = os.environ | EXACT_PRODUCTS
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["ieee"]


@pytest.mark.parametrize(
    ("asynchronous", "second_runner", "words"),
    [
        (True, True, "model runner V2, asynchronous scheduling"),
        (False, False, "model runner V1, synchronous scheduling"),
    ],
)
def test_it_says_what_vllm_chose(asynchronous: bool, second_runner: bool, words: str) -> None:
    llm = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(dtype="torch.float32"),
            scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
            speculative_config=None,
            use_v2_model_runner=second_runner,
        )
    )
    facts = EngineFacts(**asyncio.run(Answers(SimpleNamespace(llm=llm)).facts()))  # type: ignore[arg-type]
    assert facts.words == words and not facts.speculates


def test_vllm_has_the_property_that_names_the_runner() -> None:
    from vllm.config import VllmConfig

    assert isinstance(VllmConfig.use_v2_model_runner, property)
