"""OpenRLHF's own weight broadcast (trainer rank 0 to every engine worker), on gloo instead of NCCL.

Only used with `--weights.transport openrlhf` on a machine without a GPU, so that OpenRLHF's own way can run and be
measured there. On a CPU its NCCL communicator is silently disabled, and engines would load uninitialised memory.
Checked against OpenRLHF 0.11.2 `trainer/ray/ppo_actor.py`.
"""

from __future__ import annotations

import socket

from rhyme_openrlhf.platform.gloo_broadcast import GlooBroadcaster  # first: installs the shims

import ray  # isort: skip
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

GROUP = "openrlhf"


class GlooActorPPOTrainer(ActorPPOTrainer):
    """ActorPPOTrainer whose link to the engines is a gloo group of rank 0 and all engine workers."""

    def _init_vllm_sync_group(self, backend: str) -> None:
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        workers = self.args.vllm.tensor_parallel_size
        world_size = self.args.vllm.num_engines * workers + 1
        joined = [
            engine.init_process_group.remote(
                host, port, i * workers + 1, world_size, GROUP, backend="gloo", use_ray=False
            )
            for i, engine in enumerate(self.vllm_engines)
        ]
        self._model_update_group = GlooBroadcaster(host, port, 0, world_size)
        ray.get(joined)
