"""Data-parallel ranks of a model that only count: upstream's own sharing, DeepSpeed's own rule of accumulation."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from openrlhf.trainer.ray import launcher

from rhyme_openrlhf.training.updates import Updates


class Engine:
    """Stands for a DeepSpeed engine; `applied`: the micro-batches of each optimizer step."""

    zenflow = False
    _is_gradient_accumulation_boundary = None

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        self.micro_steps = self.global_steps = 0
        self.waiting: list[Any] = []
        self.applied: list[list[Any]] = []

    def managed_gradient_accumulation(self) -> bool:
        return True

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation

    def step(self, batch: Any) -> None:
        self.waiting.append(batch)
        if DeepSpeedEngine.is_gradient_accumulation_boundary(self):
            self.global_steps += 1
            self.applied.append(self.waiting)
            self.waiting = []
        self.micro_steps += 1


class Ranks:
    """Upstream's actor group with `ranks` ranks, each of which trains micro-batches of `micro_batch` samples."""

    def __init__(self, ranks: int, micro_batch: int, accumulation: int) -> None:
        self.engines = [Engine(accumulation) for _ in range(ranks)]
        self.micro_batch = micro_batch
        self._buffers: list[list[Any]] = [[] for _ in range(ranks)]

    def train(self, sizes: list[int], name: Any = None) -> None:
        """Do a training step, `name`, on experiences with these numbers of samples."""

        def append(rank: int, chunk: Any) -> None:
            self._buffers[rank] += [name for size in chunk["experience"] for _ in range(size)]

        handlers = [
            NS(execute_batch=NS(remote=lambda method, chunk, first, end, rank=rank: append(rank, chunk)))
            for rank in range(len(self.engines))
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher, "ray", NS(put=lambda value: value))
            group = NS(_actor_handlers=handlers, duplicate_actors=1)
            launcher.RayActorGroup.async_run_method_batch(group, "append", experience=sizes)
        for engine, buffer in zip(self.engines, self._buffers, strict=True):
            # As its data loader: what fills no micro-batch is dropped.
            for _ in range(len(buffer) // self.micro_batch):
                engine.step(name)
            buffer.clear()

    def async_run_method(self, method_name: str) -> list[Any]:
        """Answer what our actors add to upstream's."""
        if method_name == "unchanged":
            return [False] * len(self.engines)
        assert method_name == "updates"
        return [Updates.of(engine) for engine in self.engines]
