"""The extension of vLLM's worker processes: weight versions, copies of KV blocks, a KV cache that sleeps, n-grams.

vLLM mixes this class into its Worker (`worker_extension_cls`) and calls its methods by `collective_rpc`
(`WorkerCalls` of engine/calls.py). OpenRLHF's own extension is the base, so its NCCL and CUDA IPC paths stay available.

A KV cache sleeps without the weights. vLLM's own sleep puts weights to sleep too, at every level. Its allocator can do
one tag, and KV caches have their own (v1/worker/gpu_worker.py, device_allocator/cumem.py). They keep their addresses,
which CUDA graphs have in them. **Never run on a GPU**; without one the pages go back to the machine
(platform/cpu_memory.py).

Invariants:
- A version is loaded whole or the call raises.
- The worker maps the file of a version, so engines of one node share one copy in memory (weights/segment_file.py).
- A KV cache sleeps and wakes while nothing is computed and no KV block is in use. Both may be called twice.

Checked against vLLM 0.29.0.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import ray
import torch
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from rhyme_openrlhf.engine import proposers
from rhyme_openrlhf.engine.kv_copies import KvCopies
from rhyme_openrlhf.engine.patches import rejection_sampling, resumed_requests, second_runner
from rhyme_openrlhf.latency.profile import hardware_name
from rhyme_openrlhf.weights.buckets import Segment
from rhyme_openrlhf.weights.segment_file import SegmentFiles, tensors

resumed_requests.apply()
rejection_sampling.apply()
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    second_runner.apply()

if gpu_present():
    _Base: Any = WorkerWrap
else:
    from rhyme_openrlhf.platform import cpu_memory, cpu_sampling, cpu_seeds, cpu_shapes
    from rhyme_openrlhf.platform.gloo_broadcast import GlooWorkerWrap

    _Base = GlooWorkerWrap
    cpu_sampling.apply()
    cpu_seeds.apply()
    cpu_shapes.apply()


# Kernels for experts that compute with the checkpoint's layout (vLLM 0.29.0, fused_moe/oracle/unquantized.py).
UNCONVERTED_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})


# vLLM's tag of KV caches in its allocator.
KV_TAG = "kv_cache"


class WorkerExtension(_Base):
    """OpenRLHF's worker extension and ours (`model_runner` and `vllm_config` are vLLM's)."""

    model_runner: Any
    vllm_config: Any

    # --- weights

    def rhyme_load_weights(self, plain_segment: list[Any]) -> int:
        """Load a weight version (`Segment.to_plain()`) into this worker's shard of the model; returns the version.

        Loads each parameter as soon as it has arrived. Raises RuntimeError when the segment lacks a parameter that the
        model has, and SegmentGoneError when the version is removed or overwritten meanwhile.
        """
        segment = Segment.from_plain(plain_segment)
        runner = self.model_runner
        file = self._segment_files.open(segment, self.rhyme_node() if segment.paths else "")
        if gpu_present() and not self._converted():
            loaded = runner.model.load_weights(tensors(file, segment.version))
            missing = not_loaded(runner.get_model(), loaded) if loaded is not None else set()
            if missing:
                raise RuntimeError(f"weight version {segment.version} lacks {len(missing)} parameters: {min(missing)}")
        else:
            # vLLM's CPU linear layers repack their weight at load and drop the original; only a reload restores it.
            self.reload_weights(weights_iterator=tensors(file, segment.version))
        if gpu_present():
            torch.cuda.synchronize()
        file.check(segment.version)
        return segment.version

    @functools.cached_property
    def _segment_files(self) -> SegmentFiles:
        return SegmentFiles()

    def rhyme_node(self) -> str:
        """Return Ray's id of the node this worker runs on, or "" in a process that its engine's actor started."""
        return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""

    def rhyme_process(self) -> tuple[str, int]:
        """Return the node, as `rhyme_node`, and this process's number."""
        return self.rhyme_node(), os.getpid()

    def rhyme_check_broadcast(self) -> None:
        """Raise RuntimeError if OpenRLHF's own transport, which reloads nothing, would load wrong weights here."""
        if gpu_present() and (what := self._converted()):
            raise RuntimeError(
                f"vLLM converts {what} after it loads weights, which OpenRLHF's own transport does not repeat: use "
                "--weights.transport buffer"
            )

    def _converted(self) -> str:
        return converted_weights(self.model_runner.get_model(), self.model_config)

    # --- moves

    @functools.cached_property
    def _kv_copies(self) -> KvCopies:
        return KvCopies(self.model_runner)

    def rhyme_kv_layout(self) -> dict[str, Any] | str:
        """Call `KvCopies.layout`."""
        return self._kv_copies.layout()

    def rhyme_export_kv(self, blocks: list[int], buffer: dict[str, Any], first: int) -> str:
        """Call `KvCopies.export`."""
        return self._kv_copies.export(blocks, buffer, first)

    def rhyme_import_kv(self, blocks: list[int], buffer: dict[str, Any], first: int) -> str:
        """Call `KvCopies.load`."""
        return self._kv_copies.load(blocks, buffer, first)

    def rhyme_import_all(self, copies: list[tuple[list[int], dict[str, Any], int]]) -> list[str]:
        """Call `KvCopies.load`, for each of them."""
        return [self._kv_copies.load(*copy) for copy in copies]

    def rhyme_generator_state(self, request_id: str) -> bytes | None:
        """Call `KvCopies.generator_state`."""
        return self._kv_copies.generator_state(request_id)

    def rhyme_sleep_kv(self) -> None:
        """Give the KV cache's memory up. Raises OSError, or what vLLM's allocator raises."""
        if gpu_present():
            # It waits for the device before it unmaps.
            _allocator().discard((KV_TAG,))
            return
        cpu_memory.release(self.model_runner.kv_caches)

    def rhyme_wake_kv(self) -> None:
        """Take the memory again; nothing is in it. Raises what vLLM's allocator raises if the device has not enough."""
        if gpu_present():
            _allocator().wake_up([KV_TAG])
            torch.cuda.synchronize()

    # --- what it runs on, and n-grams

    def rhyme_look_up_serially(self, serially: bool = True) -> None:
        """Look up n-grams by one thread from now on, or, for comparison, in vLLM's own way."""
        proposers.look_up_serially(self.model_runner, self.vllm_config, serially)

    def rhyme_padded_rows(self) -> list[int]:
        """Return the token counts to which this worker pads a step: sizes of CUDA graphs, or the CPU's shapes.

        The model runner changes the sizes in its own copy of vLLM's configuration; nobody else has them.
        """
        if not gpu_present():
            return list(cpu_shapes.all_sizes())
        return sorted(self.vllm_config.compilation_config.cudagraph_capture_sizes or [])

    def rhyme_hardware(self) -> str:
        """Return the name of what this worker computes on."""
        return hardware_name((torch.cuda.get_device_name(),) if gpu_present() else ())

    def rhyme_attention(self) -> str:
        """Return the names of the attention backends of this worker's layers."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
        return ", ".join(sorted(backends))


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def not_loaded(model: torch.nn.Module, loaded: Iterable[str]) -> set[str]:
    """Return the parameters of a model that are not among those that its `load_weights` named."""
    found = set(loaded)
    for name, module in model.named_modules():
        # vLLM's runner of experts names what the module inside it loaded as its own (fused_moe/runner/moe_runner.py).
        inner = getattr(module, "routed_experts", None)
        if isinstance(inner, torch.nn.Module):
            own = [leaf for leaf, _ in inner.named_parameters() if f"{name}.{leaf}" in found]
            found.update(f"{name}.routed_experts.{leaf}" for leaf in own)
    return {name for name, _ in model.named_parameters()} - found


def converted_weights(model: torch.nn.Module, config: Any) -> str:
    """Return which weights of a model on GPUs vLLM converts after it loads a checkpoint, or "" for none.

    `config` is vLLM's ModelConfig. Converted weights need `reload_weights`, which converts them again.
    """
    if config.quantization is not None:
        return f"weights to {config.quantization}"
    if config.use_mla:
        return "the key-value projection of multi-head latent attention"
    for layer in model.modules():
        backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in UNCONVERTED_EXPERTS:
            return f"the experts' weights for {backend.value}"
    return ""
