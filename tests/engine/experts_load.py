"""Loads a small GLM-4-MoE's weight version into vLLM's model of it, as on a GPU; prints what is there afterwards.

A program of its own, because vLLM keeps its parallel groups in the process: `python -m tests.engine.experts_load DIR`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from rhyme_openrlhf.engine import worker
from rhyme_openrlhf.weights.node import SegmentStore
from rhyme_openrlhf.weights.publisher import WeightPublisher

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "max_position_embeddings": 128,
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


class Worker(worker.WorkerExtension):
    """The extension around a model of vLLM's whose layers keep their checkpoint's layout, as on a GPU."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self.model_config = config.model_config
        self.model_runner = SimpleNamespace(get_model=lambda: model, model=model)


def vllm_model(folder: Path) -> tuple[torch.nn.Module, Any]:
    """Return vLLM's model of the configuration in `folder`, with weights of no meaning, and vLLM's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64
    ).create_engine_config()
    torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return initialize_model(config), config


def main(folder: Path) -> None:
    """Publish a version of a policy, and load it."""
    policy = AutoModelForCausalLM.from_config(Glm4MoeConfig(**SIZES))
    policy.config.architectures = ["Glm4MoeForCausalLM"]
    policy.config.save_pretrained(folder)
    policy.get_buffer(BIAS).fill_(7.0)
    publisher = WeightPublisher(policy, 2, 1, 1)
    (folder / "segments").mkdir()
    segment = SegmentStore(publisher.buckets, folder / "segments").begin(1)
    publisher.publish(segment, range(len(publisher.buckets)))
    model, config = vllm_model(folder)
    worker.gpu_present = lambda: True
    worker.converted_weights = lambda *_: ""
    torch.cuda.synchronize = lambda: None
    version = Worker(model, config).rhyme_load_weights(segment.to_plain())
    loaded = dict(model.named_parameters())
    experts = loaded["model.layers.1.mlp.experts.routed_experts.w13_weight"]
    print(
        json.dumps(
            {
                "version": version,
                "bias": loaded[BIAS].tolist(),
                "experts": torch.equal(experts, policy.get_parameter("model.layers.1.mlp.experts.gate_up_proj")),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
