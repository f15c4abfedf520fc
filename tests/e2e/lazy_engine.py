"""`rhyme train` with engines that say they loaded weights and did not: what `rhyme verify` has to find.

Its folder must be on PYTHONPATH, so that the engines' processes can import it too.
"""

from __future__ import annotations

import functools
from typing import Any

import ray

from rhyme_openrlhf.engine import arguments
from rhyme_openrlhf.engine.actor import RhymeRolloutActor
from rhyme_openrlhf.engine.worker import WorkerExtension
from rhyme_openrlhf.weights.buckets import Segment


class LazyExtension(WorkerExtension):
    """Reports every version as loaded."""

    def rhyme_load_weights(self, plain_segment: list[Any]) -> int:
        return Segment.from_plain(plain_segment).version


class LazyEngine(RhymeRolloutActor):
    """A rollout actor whose vLLM workers are lazy."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        arguments.WORKER_EXTENSION = f"{LazyExtension.__module__}.{LazyExtension.__qualname__}"
        await super().__init__(*args, **kwargs)


def main(argv: list[str]) -> int:
    """Train with lazy engines."""
    from rhyme_openrlhf.cli import train_ppo_ray
    from rhyme_openrlhf.run import placement

    placement.EngineFactory = functools.partial(placement.EngineFactory, actor=ray.remote(LazyEngine))  # type: ignore
    return train_ppo_ray.main(argv)
