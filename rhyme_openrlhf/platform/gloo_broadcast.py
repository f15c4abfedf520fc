"""The engines' end of OpenRLHF's weight broadcast on gloo (see `gloo_sync`), and the broadcast itself.

Apart from the trainer's end, because vLLM's worker processes import this, and DeepSpeed must not be loaded there.
Checked against OpenRLHF 0.11.2 `trainer/ray/vllm_worker_wrap.py`.
"""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.platform import require_no_gpu, shims

shims.install()

import torch  # noqa: E402
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap  # noqa: E402


class GlooBroadcaster:
    """The one method of vLLM's PyNcclCommunicator that OpenRLHF calls, on a gloo process group."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        require_no_gpu("the gloo weight broadcast")
        self._group = stateless_init_torch_distributed_process_group(host, port, rank, world_size, backend="gloo")

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        """Send `tensor` from rank `src` to every other rank, in place. `stream` has no meaning on a CPU."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        self._group.broadcast([tensor.contiguous()], options).wait()


class GlooWorkerWrap(WorkerWrap):
    """OpenRLHF's vLLM worker extension for the gloo broadcast."""

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> None:
        """Join the broadcast group; the arguments are upstream's."""
        rank = torch.distributed.get_rank() + rank_offset
        self._model_update_with_ray = False
        self._model_update_group = GlooBroadcaster(master_address, master_port, rank, world_size)
        self._received: list[tuple[str, torch.Tensor]] = []

    def update_weight(self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool = False) -> None:
        """Receive one parameter; load all of them when the last one (`empty_cache=True`) is there.

        vLLM's CPU linear layers repack their weight at load and drop the original, so parameters cannot be loaded
        one by one as upstream does; `reload_weights` restores, loads and repacks them together.
        """
        if dtype != self.model_config.dtype:
            raise TypeError(f"weight {name} arrives as {dtype}, but the engine runs {self.model_config.dtype}")
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self._received.append((name, weight))
        if empty_cache:
            received, self._received = self._received, []
            self.model_runner.reload_weights(weights_iterator=iter(received))
