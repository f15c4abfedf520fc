"""The policy's side of the weight buffer: pack this rank's buckets of a weight version into Ray's object store.

Each data-parallel rank owns some buckets (`weight_buckets.plan_buckets`, the same plan on every rank). With ZeRO-3
all ranks take part in gathering every parameter, and only the owner copies it. RhymeRL, section 4.2.

Invariant: what is published is what the optimizer just wrote, in the dtype the model is trained in; nothing is cast.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import numpy as np
import ray
import torch

from rhyme_openrlhf.training.weight_buckets import Bucket, Parameter, PublishedBucket, plan_buckets

MEGABYTE = 1024**2


class WeightPublisher:
    """Packs the weights of one rank's model. `model` is the module inside the DeepSpeed engine."""

    def __init__(self, model: torch.nn.Module, zero_stage: int, rank: int, ranks: int, bucket_mb: int) -> None:
        self._parameters = dict(model.named_parameters())
        self._gather = zero_stage == 3
        self._rank = rank
        described = [self._describe(name, parameter) for name, parameter in self._parameters.items()]
        self._plan = plan_buckets(described, bucket_mb * MEGABYTE, ranks)

    def _describe(self, name: str, parameter: torch.nn.Parameter) -> Parameter:
        shape = parameter.ds_shape if self._gather else parameter.shape
        dtype = str(parameter.dtype).removeprefix("torch.")
        return Parameter(name, tuple(shape), dtype, int(np.prod(shape)) * parameter.element_size())

    def publish(self) -> list[PublishedBucket]:
        """Put this rank's buckets into the object store. Collective under ZeRO-3: every rank must call it."""
        published = []
        for bucket in self._plan:
            mine = bucket.rank == self._rank
            if not mine and not self._gather:
                continue
            packed = self._pack(bucket, mine)
            if mine:
                published.append(PublishedBucket(bucket, ray.put(packed)))
        return published

    def _pack(self, bucket: Bucket, mine: bool) -> np.ndarray:
        """One bucket as uint8[nbytes]; on ranks that do not own it, an empty array (they only help to gather)."""
        packed = torch.empty(bucket.nbytes if mine else 0, dtype=torch.uint8)
        for entry in bucket.entries:
            parameter = self._parameters[entry.parameter.name]
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._gather):
                if mine:
                    raw = parameter.detach().contiguous().view(-1).view(torch.uint8)
                    packed[entry.offset : entry.offset + raw.numel()].copy_(raw)
        return packed.numpy()


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
