"""Loading weights on a GPU: vLLM's own classes on CPU tensors, and stand-ins for the device."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from rhyme_openrlhf.engine import worker as worker_extension
from rhyme_openrlhf.engine.actor import RhymeRolloutActor
from rhyme_openrlhf.engine.calls import WorkerCalls
from rhyme_openrlhf.engine.worker import KV_TAG, UNCONVERTED_EXPERTS, WorkerExtension, converted_weights, not_loaded
from rhyme_openrlhf.weights.buckets import Bucket, Entry, Parameter, Segment
from rhyme_openrlhf.weights.node import SegmentStore

from vllm.model_executor.layers.fused_moe.oracle import unquantized  # isort: skip
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend  # isort: skip

DENSE = SimpleNamespace(quantization=None, use_mla=False)


def experts(backend: UnquantizedMoeBackend) -> torch.nn.Module:
    """A model with one layer of experts that run on a backend, as vLLM's own method says it."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.unquantized_backend = backend
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = method
    return torch.nn.Sequential(layer)


class Worker(WorkerExtension):
    """A worker whose runner notes how weights come."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.loaded_by: list[str] = []
        self.model_config = DENSE
        loading = SimpleNamespace(load_weights=self._load)
        self.model_runner = SimpleNamespace(get_model=lambda: model, model=loading)

    def _load(self, weights: Any) -> None:
        self.loaded_by.append("load_weights")
        list(weights)

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded_by.append("reload_weights")
        list(weights_iterator)


def stored(folder: Path, version: int, value: float) -> Segment:
    """A version of one parameter, "weight"."""
    bucket = Bucket(0, 64, (Entry(Parameter("weight", (4,), "float32", 16), 0),))
    array = np.full(16, value, dtype=np.float32).view(np.uint8)
    return SegmentStore((bucket,), folder).store(version, [array])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_extension, "gpu_present", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("backend", "by"),
    [
        (UnquantizedMoeBackend.TRITON, "load_weights"),
        (UnquantizedMoeBackend.FLASHINFER_TRTLLM, "reload_weights"),
        (UnquantizedMoeBackend.FLASHINFER_CUTLASS, "reload_weights"),
    ],
)
def test_experts_that_vllm_converts_are_reloaded(backend: UnquantizedMoeBackend, by: str, tmp_path: Path) -> None:
    worker = Worker(experts(backend))
    assert worker.rhyme_load_weights(stored(tmp_path, 3, 1.0).to_plain()) == 3
    assert worker.loaded_by == [by]
    if by == "load_weights":
        worker.rhyme_check_broadcast()
    else:
        with pytest.raises(RuntimeError, match=rf"{backend.value} .*--weights.transport buffer"):
            worker.rhyme_check_broadcast()


def test_a_rank_on_another_node_loads_the_copy_of_its_own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = []
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        segments.append(stored(tmp_path / node, 1, ord(node)))
    told = dataclasses.replace(segments[0], paths=(("b", segments[1].path),))
    loaded = {}
    for node in ("a", "b", ""):
        worker = Worker(torch.nn.Module())
        monkeypatch.setattr(worker, "rhyme_node", lambda node=node: node, raising=False)
        monkeypatch.setattr(
            worker,
            "reload_weights",
            lambda weights_iterator, node=node: loaded.update({node: dict(weights_iterator)["weight"][0].item()}),
        )
        assert worker.rhyme_load_weights(told.to_plain()) == 1
    # A process that the engine's actor started is on the actor's node.
    assert loaded == {"a": ord("a"), "b": ord("b"), "": ord("a")}


def test_an_engine_is_on_the_nodes_of_all_its_ranks() -> None:
    async def ranks(method: Any) -> list[str]:
        assert method is WorkerCalls.rhyme_node
        return ["a", "a", "b", "b"]

    async def processes(method: Any) -> list[str]:
        return [""]

    def nodes(rpc: Any) -> list[str]:
        engine: Any = SimpleNamespace(workers=rpc, node_id=lambda: "a")
        return asyncio.run(RhymeRolloutActor.node_ids(engine))

    assert nodes(ranks) == ["a", "b"] and nodes(processes) == ["a"]


def test_what_else_vllm_converts() -> None:
    dense = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert converted_weights(dense, DENSE) == ""
    assert "fp8" in converted_weights(dense, SimpleNamespace(quantization="fp8", use_mla=False))
    assert "latent attention" in converted_weights(dense, SimpleNamespace(quantization=None, use_mla=True))


@pytest.mark.parametrize("name", ["TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS"])
def test_vllm_converts_the_experts_of_these_backends_alone(name: str) -> None:
    """vLLM's own conversion, which fails here when a later version changes what it does."""
    weights = torch.arange(32.0).reshape(2, 4, 4), torch.arange(16.0).reshape(2, 4, 2)
    config: Any = SimpleNamespace(is_act_and_mul=True)
    after = unquantized.convert_to_unquantized_kernel_format(
        UnquantizedMoeBackend[name], config, weights[0].clone(), weights[1].clone()
    )
    same = all(torch.equal(new, old) for new, old in zip(after, weights, strict=True))
    assert same == (name in UNCONVERTED_EXPERTS)


def test_vllms_worker_reloads_as_we_ask() -> None:
    """Fails when vLLM changes what this was written from (0.29.0, 0.32.0)."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker as GpuWorker

    assert "weights_iterator" in inspect.signature(GPUModelRunner.reload_weights).parameters
    # Its own, or the first runner's.
    v2 = RunnerV2.reload_weights
    by_v1 = "GPUModelRunnerV1.reload_weights(self" in inspect.getsource(v2)
    assert by_v1 or "weights_iterator" in inspect.signature(v2).parameters
    # vLLM refuses an extension that has a name of its worker.
    ours = {name for name in dir(WorkerExtension) if "rhyme" in name or name == "_converted"}
    assert not ours & set(dir(GpuWorker))


def test_on_a_gpu_only_the_kv_cache_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator import cumem

    told: list[Any] = []
    allocator = SimpleNamespace(
        discard=lambda tags: told.append(("discard", tags)), wake_up=lambda tags: told.append(("wake_up", tags))
    )
    monkeypatch.setattr(worker_extension, "gpu_present", lambda: True)
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", staticmethod(lambda: allocator))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("synchronize"))
    worker = WorkerExtension()
    worker.rhyme_sleep_kv()
    worker.rhyme_wake_kv()
    assert told == [("discard", (KV_TAG,)), ("wake_up", [KV_TAG]), "synchronize"]


def test_vllms_allocator_sleeps_as_we_ask() -> None:
    """Fails when vLLM changes what this was written from (0.29.0)."""
    from vllm.device_allocator.cumem import CuMemAllocator

    assert list(inspect.signature(CuMemAllocator.discard).parameters) == ["self", "tags"]
    assert list(inspect.signature(CuMemAllocator.wake_up).parameters) == ["self", "tags"]


def test_a_router_whose_bias_is_a_buffer_and_its_experts_are_loaded(tmp_path: Path, starts_python: None) -> None:
    """GLM-4-MoE: Transformers saves the bias as a buffer, vLLM has a parameter; and vLLM names experts in two ways."""
    command = [sys.executable, str(Path(__file__).with_name("experts_load.py")), str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-2000:]
    assert json.loads(found.stdout.splitlines()[-1]) == {"version": 1, "bias": [7.0] * 4, "experts": True}


@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        ([], set()),
        (["experts.w2"], {"experts.routed_experts.w2"}),
        (["gate.weight"], {"gate.weight"}),
        (["experts.w1", "experts.w2"], {"experts.routed_experts.w1", "experts.routed_experts.w2"}),
    ],
)
def test_what_was_not_loaded_is_known_by_either_name(left_out: list[str], missing: set[str]) -> None:
    runner, inner = torch.nn.Module(), torch.nn.Module()
    for leaf in ("w1", "w2"):
        inner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(1)))
    runner.routed_experts = inner
    model = torch.nn.ModuleDict({"experts": runner, "gate": torch.nn.Linear(1, 1, bias=False)})
    named = {"experts.w1", "experts.w2", "gate.weight"} - set(left_out)
    assert not_loaded(model, named) == missing
    own = {name.replace("experts.w", "experts.routed_experts.w") for name in named}
    assert not_loaded(model, own) == missing
