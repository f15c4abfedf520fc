"""What is added to vLLM's worker processes: loading a weight version from shared memory; what they run on.

vLLM mixes this class into its Worker (`worker_extension_cls`) and calls its methods by `collective_rpc`. OpenRLHF's
own extension is the base, so its NCCL and CUDA IPC paths stay available. Checked against vLLM 0.29.0.

Invariants: a version is loaded whole or the call raises; the worker maps the file, so engines of one node share one
copy in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import torch
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from rhyme_openrlhf.profiling.subject import hardware_name
from rhyme_openrlhf.rollout import rejection_sampling
from rhyme_openrlhf.rollout.moves import resumed_requests
from rhyme_openrlhf.rollout.moves.moving_worker import MovingWorker
from rhyme_openrlhf.rollout.moves.sleeping_worker import SleepingWorker
from rhyme_openrlhf.rollout.ngram_worker import NgramWorker
from rhyme_openrlhf.training.weight_buckets import Segment

resumed_requests.apply()
rejection_sampling.apply()

if gpu_present():
    _Base: Any = WorkerWrap
else:
    from rhyme_openrlhf.platform import cpu_sampling, cpu_seeds, cpu_shapes
    from rhyme_openrlhf.platform.gloo_broadcast import GlooWorkerWrap

    _Base = GlooWorkerWrap
    cpu_sampling.apply()
    cpu_seeds.apply()
    cpu_shapes.apply()


class WorkerExtension(MovingWorker, SleepingWorker, NgramWorker, _Base):
    """OpenRLHF's worker extension plus the weight buffer, moves and n-grams."""

    def rhyme_load_weights(self, plain_segment: list[Any]) -> int:
        """Load a weight version (`Segment.to_plain()`) into this worker's shard of the model; returns the version.

        Raises RuntimeError when the segment lacks a parameter that the model has.
        """
        segment = Segment.from_plain(plain_segment)
        runner = self.model_runner
        expected = {name for name, _ in runner.get_model().named_parameters()}
        if gpu_present():
            loaded = runner.model.load_weights(segment_tensors(segment))
            missing = expected - set(loaded) if loaded is not None else set()
            if missing:
                raise RuntimeError(f"weight version {segment.version} lacks {len(missing)} parameters: {min(missing)}")
            torch.cuda.synchronize()
        else:
            # vLLM's CPU linear layers repack their weight at load and drop the original; only a reload restores it.
            runner.reload_weights(weights_iterator=segment_tensors(segment))
        return segment.version

    def rhyme_padded_rows(self) -> list[int]:
        """Return the token counts to which this worker pads a step: sizes of CUDA graphs, or the CPU's shapes.

        The model runner changes the sizes in its own copy of vLLM's configuration; nobody else has them.
        """
        if not gpu_present():
            return list(cpu_shapes.all_sizes())
        return sorted(self.vllm_config.compilation_config.cudagraph_capture_sizes or [])

    def rhyme_hardware(self) -> str:
        """The name of what this worker computes on."""
        return hardware_name((torch.cuda.get_device_name(),) if gpu_present() else ())


def segment_tensors(segment: Segment) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of a segment as a view into the mapped file (read only: copy before writing)."""
    data = torch.from_file(segment.path, shared=False, size=segment.nbytes, dtype=torch.uint8)
    for entry in segment.entries:
        parameter = entry.parameter
        raw = data[entry.offset : entry.offset + parameter.nbytes]
        yield parameter.name, raw.view(getattr(torch, parameter.dtype)).view(parameter.shape)
