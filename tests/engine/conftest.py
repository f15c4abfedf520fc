"""Real vLLM engines on the embedded model in fp32, driven from a test as plain function calls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.latency.profile import to_text
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.engine import CpuSettings
from tests.latency import formula

ENGINE_TIMEOUT_S = 300


class RunningEngine:
    """One vLLM engine with our plug-ins; its event loop runs in a thread of its own."""

    def __init__(self, settings: RhymeSettings, tensor_parallel_size: int = 1) -> None:
        os.environ.update(
            {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
            | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1"}
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.llm = self.call(self._start(settings, tensor_parallel_size))

    async def _start(self, settings: RhymeSettings, tensor_parallel_size: int) -> Any:
        import vllm

        from rhyme_openrlhf.engine.arguments import WORKER_EXTENSION, speculation_arguments
        from rhyme_openrlhf.engine.patches import single_tokens
        from rhyme_openrlhf.platform.cpu_arguments import cpu_engine_arguments

        arguments = {
            "model": str(embedded.MODEL),
            "max_model_len": 640,
            "max_num_seqs": 64,
            "enforce_eager": True,
            "tensor_parallel_size": tensor_parallel_size,
            "worker_extension_cls": WORKER_EXTENSION,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 1,
            **speculation_arguments(settings),
        }
        llm = vllm.AsyncLLMEngine.from_engine_args(
            vllm.AsyncEngineArgs(**cpu_engine_arguments(arguments, settings.cpu))
        )
        single_tokens.install(llm)
        return llm

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(ENGINE_TIMEOUT_S)

    def scheduler(self, method: str, *arguments: Any) -> Any:
        from rhyme_openrlhf.engine.patches.core_channel import call_scheduler

        return self.call(call_scheduler(self.llm, method, *arguments))

    def install(self, key: str, index: np.ndarray, folder: Any) -> str:
        path = folder / key
        index.tofile(path)
        return self.scheduler("install_history", key, str(path))

    def generate(self, prompts: list[list[int]], parameters: list[Any]) -> list[Any]:
        """The final output of each prompt, in order."""

        async def one(number: int) -> Any:
            generator = self.llm.generate(
                {"prompt_token_ids": prompts[number]}, parameters[number], request_id=f"{id(parameters)}-{number}"
            )
            return [output async for output in generator][-1].outputs[0]

        async def every() -> list[Any]:
            return await asyncio.gather(*(one(number) for number in range(len(prompts))))

        return self.call(every())

    def stop(self) -> None:
        async def shut_down() -> None:
            self.llm.shutdown()

        self.call(shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(scope="session")
def plain_engine(starts_engine: None) -> Iterator[RunningEngine]:
    """Speculation off."""
    engine = RunningEngine(RhymeSettings(histospec=HistoSpecSettings(enable=False)))
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def history_engine(starts_engine: None) -> Iterator[RunningEngine]:
    """Speculation on, from history alone: what is drafted is what the test put there, in every decode step."""
    settings = HistoSpecSettings(
        own_output=False, siblings=False, shared_tokens=0, extend_confidence=1.0, stop_confidence=0.0
    )
    every = DraftingSettings(probe_share=0)
    engine = RunningEngine(RhymeSettings(histospec=settings, drafting=every, cpu=CpuSettings(kv_cache_mb=128)))
    yield engine
    engine.stop()


@pytest.fixture(scope="module", params=["fixed rules", "planned"])
def combined_engine(request: pytest.FixtureRequest, starts_engine: None) -> Iterator[RunningEngine]:
    """History and the embedded draft model; the passes run wherever history does not serve all samples."""
    drafting = DraftingSettings(source="history+draft_model", model=str(embedded.DRAFT_MODEL), probe_share=0)
    engine = RunningEngine(RhymeSettings(drafting=drafting, cpu=CpuSettings(kv_cache_mb=128)))
    if request.param == "planned":
        assert engine.scheduler("install_profile", to_text(formula.profile())) == ""
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def default_engine(starts_engine: None) -> Iterator[RunningEngine]:
    """Speculation on, default settings, and every source of drafts."""
    settings = HistoSpecSettings(shared_tokens=262144)
    engine = RunningEngine(RhymeSettings(histospec=settings, cpu=CpuSettings(kv_cache_mb=128)))
    yield engine
    engine.stop()
