"""What a run's models need of memory, planned before it starts: pure but for reading a model's `config.json`.

Estimates, and said to be: weights, gradients and optimizer states by the ZeRO paper's 16 bytes a parameter (Rajbhandari
et al. 2020, section 3.1), keys and values by the model's shape. Activations, CUDA graphs and buffers are not in them.
Sizes in bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Adam in mixed precision: weights and gradients in 16 bits; master weights, momentum and variance in 32.
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12
# A configuration is some kilobytes.
_LARGEST_CONFIG = 1_000_000
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder as far as memory goes. `name` as profiles call it (`profiling/subject.py`)."""

    name: str
    parameters: int
    layers: int
    kv_heads: int
    head_size: int

    def kv_bytes(self, tensor_parallel: int, number_bytes: int = WEIGHT_BYTES) -> int:
        """Keys and values of one token in all layers, on one GPU."""
        return 2 * self.layers * max(self.kv_heads // tensor_parallel, 1) * self.head_size * number_bytes


@dataclass(frozen=True)
class Layout:
    """What of a run's settings decides: GPUs of the policy, ZeRO, engines, and how many tokens are under way."""

    policy_gpus: int
    zero_stage: int
    adam_offload: bool
    with_reference: bool
    tensor_parallel: int
    samples_per_engine: float
    longest: int
    history_gb: float


@dataclass(frozen=True)
class Need:
    """`size` bytes of `what`, on each `where`."""

    what: str
    where: str
    size: float


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a Hugging Face configuration; None where it is not one of a dense decoder with gated layers."""
    try:
        if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        hidden, layers, heads = (
            int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        inner, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        size = int(config.get("head_dim") or hidden // heads)
        architecture = str(config["architectures"][0])
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return None
    attention = 2 * hidden * heads * size + 2 * hidden * kv_heads * size
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = layers * (attention + 3 * hidden * inner + 2 * hidden) + embeddings + hidden
    name = f"{architecture} {layers}x{hidden} heads {heads}/{kv_heads} vocabulary {vocabulary}"
    return ModelShape(name, parameters, layers, kv_heads, size)


def read_shape(model: str) -> ModelShape | None:
    """The shape of a model directory, or of a model of the hub that this user has downloaded before; None: not known.

    `model` is checked (`spec_paths`): a directory below the roots, or a name.
    """
    folder = _downloaded(model) if _HUB_NAME.fullmatch(model) else Path(model)
    if folder is None or not folder.is_absolute():
        return None
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_LARGEST_CONFIG))
    except (OSError, ValueError):
        return None
    return model_shape(config) if isinstance(config, dict) else None


def _downloaded(name: str) -> Path | None:
    """The newest snapshot in the hub's cache (huggingface_hub's layout: models--OWNER--NAME/snapshots/REVISION)."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    found = cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")
    return max((one.parent for one in found), key=lambda one: one.stat().st_mtime, default=None)


def needs(shape: ModelShape, layout: Layout) -> list[Need]:
    """What is needed where, the trainer first."""
    size, ranks = shape.parameters, layout.policy_gpus
    weights = WEIGHT_BYTES * size / (ranks if layout.zero_stage >= 3 else 1)
    gradients = GRADIENT_BYTES * size / (ranks if layout.zero_stage >= 2 else 1)
    states = OPTIMIZER_BYTES * size / (ranks if layout.zero_stage >= 1 else 1)
    found = [Need("Policy: weights, gradients" + ("" if layout.adam_offload else ", Adam"), "GPU of the policy", 0.0)]
    found[0] = Need(found[0].what, found[0].where, weights + gradients + (0.0 if layout.adam_offload else states))
    if layout.adam_offload:
        found.append(Need("Adam, offloaded", "policy process, main memory", states))
    if layout.with_reference:
        found.append(Need("Reference model", "GPU of the reference", weights))
    kv_bytes = shape.kv_bytes(layout.tensor_parallel)
    found += [
        Need("Engine: weights", "GPU of an engine", WEIGHT_BYTES * size / layout.tensor_parallel),
        Need(
            "KV cache, all its samples at full length", "GPU of an engine",
            kv_bytes * layout.samples_per_engine * layout.longest,
        ),
    ]  # fmt: skip
    if layout.history_gb:
        found.append(Need("History, at most", "node with a history worker", layout.history_gb * 1024**3))
    return found
