"""The policy's side of the weight buffer: write this rank's buckets of a weight version into the node's segment.

Every rank has the same buckets (`buckets.plan_buckets`) and is told which of them it writes. With ZeRO-3 all
ranks take part in gathering every bucket, and only its writers copy it. On a GPU the copies are made on a stream of
their own into pinned memory, so a rank that copies one bucket already gathers the next. RhymeRL, section 4.2.

Invariants: what is published is what the optimizer just wrote, in the dtype the model is trained in. Nothing is cast
but LoRA's adapters, which are added to the weights that they change. A bucket is marked as there only when its copies
are done; `publish` returns when all copies of this rank are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import deepspeed
import numpy as np
import torch
from peft.tuners.lora import LoraLayer

from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.weights.buckets import Parameter, Segment, Span, lay_out, plan_buckets
from rhyme_openrlhf.weights.segment_file import SegmentFile, SegmentFiles, view

MEGABYTE = 1024**2
# Buckets whose gathered parameters a GPU holds: one is copied to the host while the next one is gathered.
IN_FLIGHT = 2


@dataclass(frozen=True)
class _Copied:
    """A bucket whose copies were started. Its gathered parameters must live until `done`, which is None on a CPU."""

    file: SegmentFile
    span: Span
    sources: list[torch.Tensor]
    done: Any

    @property
    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())

    def finish(self, version: int) -> None:
        """Wait for the copies, then mark the bucket as there."""
        if self.done is not None:
            self.done.synchronize()
        self.file.mark(self.span.first, self.span.end, version)


@dataclass(frozen=True)
class _Published:
    """A tensor of the model that engines have; under LoRA, `lora` is PEFT's layer whose adapters change it.

    Engines know no adapters: they get the sum, in the dtype of the frozen parameter, as PEFT merges it.
    """

    parameter: torch.Tensor
    lora: Any = None

    @property
    def parts(self) -> list[torch.Tensor]:
        """Return what must be gathered for `tensor`; a buffer is whole on every rank."""
        if not isinstance(self.parameter, torch.nn.Parameter):
            return []
        adapters = [] if self.lora is None else [p for name, p in self.lora.named_parameters() if "lora_" in name]
        return [self.parameter, *adapters]

    def tensor(self) -> torch.Tensor:
        """Return the values that engines load, without a gradient."""
        values = self.parameter.detach()
        if self.lora is not None:
            with torch.no_grad():
                for adapter in self.lora.active_adapters:
                    values = values + self.lora.get_delta_weight(adapter).to(values)
        return values


def published_parameters(model: torch.nn.Module) -> dict[str, _Published]:
    """Return what engines load, by the names of the model without PEFT: parameters, and buffers that are saved.

    A checkpoint has the latter too, and vLLM may have a parameter for one (GLM-4-MoE's `e_score_correction_bias`).
    """
    layers = {id(one.get_base_layer().weight): one for one in model.modules() if isinstance(one, LoraLayer)}
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): _Published(
            parameter, layers.get(id(parameter))
        )
        for name, parameter in [*model.named_parameters(), *buffers]
        if ".lora_" not in name
    }


class WeightPublisher:
    """Writes the weights of one rank's model. `model` is the module inside the DeepSpeed engine."""

    def __init__(self, model: torch.nn.Module, zero_stage: int, ranks: int, bucket_mb: int) -> None:
        self._published = published_parameters(model)
        self._gather = zero_stage == 3
        described = [self._describe(name, published.parameter) for name, published in self._published.items()]
        self.buckets = plan_buckets(described, bucket_mb * MEGABYTE, ranks)
        self._entries, self._spans = lay_out(self.buckets)
        self._files = SegmentFiles()
        self._stream: Any = None

    def _describe(self, name: str, parameter: torch.Tensor) -> Parameter:
        partitioned = self._gather and isinstance(parameter, torch.nn.Parameter)
        shape = parameter.ds_shape if partitioned else parameter.shape
        dtype = str(parameter.dtype).removeprefix("torch.")
        return Parameter(name, tuple(shape), dtype, int(np.prod(shape)) * parameter.element_size())

    def publish(self, segment: Segment | None, mine: Collection[int]) -> None:
        """Write buckets `mine` into this node's segment. Collective under ZeRO-3: every rank must call it.

        `segment` is None on a node without one, whose ranks only help to gather.
        """
        version = -1 if segment is None else segment.version
        file = None if segment is None else self._files.open(segment)
        copied: deque[_Copied] = deque()
        for number, (bucket, span) in enumerate(zip(self.buckets, self._spans, strict=True)):
            if number not in mine and not self._gather:
                continue
            published = [self._published[entry.parameter.name] for entry in bucket.entries]
            parts = [part for one in published for part in one.parts]
            with deepspeed.zero.GatheredParameters(parts, enabled=self._gather):
                if file is not None and number in mine:
                    copied.append(self._copy(file, span, [one.tensor() for one in published]))
            while copied and (len(copied) == IN_FLIGHT or copied[0].is_done):
                copied.popleft().finish(version)
        for last in copied:
            last.finish(version)

    def _copy(self, file: SegmentFile, span: Span, gathered: list[torch.Tensor]) -> _Copied:
        """Start to copy a bucket; without a GPU it is copied when this returns."""
        targets = [view(file, entry) for entry in self._entries[span.first : span.end]]
        if not gpu_present():
            for target, source in zip(targets, gathered, strict=True):
                target.copy_(source)
            return _Copied(file, span, [], None)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # A copy from device to host is asynchronous only between contiguous tensors.
            sources = [source.contiguous() for source in gathered]
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Copied(file, span, sources, done)


def fixed_sequence_log_probs(actor: Any, token_ids: list[int], ring_attn_group: Any = None) -> list[float]:
    """Return the log-probability of each token after the first, by OpenRLHF's `Actor` in training, at temperature 1.

    `score` of an engine must agree for the same tokens: this is the check that a weight sync arrived. The actor is
    called rather than the model inside it, because ring attention needs the parameters that the actor sets.
    """
    sequence = torch.tensor([token_ids], device=next(actor.model.parameters()).device)
    rollout_temperature, actor.temperature = actor.temperature, 1.0
    actor.eval()
    try:
        with torch.no_grad():
            log_probs = actor(
                sequence,
                attention_mask=torch.ones_like(sequence),
                return_logprobs=True,
                ring_attn_group=ring_attn_group,
            )
    finally:
        actor.train()
        actor.temperature = rollout_temperature
    scores: list[float] = log_probs[0].float().tolist()
    return scores
