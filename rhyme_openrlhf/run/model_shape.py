"""The sizes of a model that decide its memory, read from its `config.json`: pure but for reading that file.

It knows decoders with gated feed-forward layers: dense ones and ones with experts (Mixtral, Qwen, DeepSeek, GLM). It
also knows multi-head latent attention (DeepSeek V2 and V3), whose KV cache has one compressed row a token.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.regular_files import read_regular

# Weights, keys and values: 16 bits a number.
WEIGHT_BYTES = 2
# What configurations call the number of experts of a layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Layers with experts that are neither all, nor all after the first, nor every n-th (Llama 4, Jamba).
_OTHER_PLACES = ("interleave_moe_layer_step", "expert_layer_period")
# A configuration is some kilobytes.
_LARGEST_CONFIG = 1_000_000
# Far more than any model has, and few enough to look at each.
_MOST_LAYERS = 10_000
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Words in the kinds of layers (Transformers 5) that keep a state of the whole text in place of keys and values.
_RECURRENT_LAYERS = ("linear", "mamba", "hybrid", "recurrent")
# What configurations of such models have beside, where they do not list their layers' kinds.
_RECURRENT_SIZES = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "linear_attn_config",
)


@dataclass(frozen=True)
class ModelShape:
    """A decoder as far as memory goes. `name` as profiles call it (`latency/profile.py`).

    `layers`: those whose KV cache grows with the whole sequence. `latent`: numbers of a token's compressed keys and
    values in a layer (multi-head latent attention); 0 where each head has its own. `head`: parameters of the output
    layer, where it is not the embeddings; critic and reward model have none.
    """

    name: str
    parameters: int
    layers: int
    kv_heads: int
    head_size: int
    vocabulary: int
    latent: int = 0
    head: int = 0

    def kv_bytes(self, tensor_parallel: int) -> int:
        """Keys and values of one token in all layers, on one GPU."""
        if self.latent:
            # Every rank has all of it: no head has a part of its own.
            return self.layers * self.latent * WEIGHT_BYTES
        return 2 * self.layers * max(self.kv_heads // tensor_parallel, 1) * self.head_size * WEIGHT_BYTES


@dataclass(frozen=True)
class Shapes:
    """The shapes of a run's models; None: not known. Engines and reference model are copies of the policy."""

    policy: ModelShape
    critic: ModelShape | None = None
    reward: ModelShape | None = None


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a Hugging Face configuration; None for a kind of decoder that is not known here."""
    try:
        hidden, layers, heads = (
            int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        vocabulary, kv_heads = int(config["vocab_size"]), int(config.get("num_key_value_heads") or heads)
        size = int(config.get("head_dim") or hidden // heads)
        architecture = str(config["architectures"][0])
        attention = latent = 0
        if config.get("kv_lora_rank"):
            attention, latent = _latent_attention(config, hidden, heads)
        else:
            attention = 2 * hidden * heads * size + 2 * hidden * kv_heads * size
        if layers > _MOST_LAYERS:
            return None
        inner = _inner_parameters(config, hidden, layers)
        # A layer with a sliding window keeps few tokens: it counts as none.
        whole = layers - sum(kind == "sliding_attention" for kind in config.get("layer_types") or ())
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None
    if inner is None:
        return None
    head = 0 if config.get("tie_word_embeddings") else vocabulary * hidden
    parameters = layers * (attention + 2 * hidden) + inner + vocabulary * hidden + head + hidden
    name = f"{architecture} {layers}x{hidden} heads {heads}/{kv_heads} vocabulary {vocabulary}"
    return ModelShape(name, parameters, whole, kv_heads, size, vocabulary, latent, head)


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Return parameters of a layer's attention and numbers of a token in its cache, as DeepSeek V2 and V3 have them."""
    if config.get("index_topk"):
        raise ValueError("an indexer keeps a cache beside that of the attention")
    latent, plain, rotated, value = (
        int(config[name]) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    rank, each = int(config.get("q_lora_rank") or 0), heads * (plain + rotated)
    queries = rank * (hidden + 1 + each) if rank else hidden * each
    keys = hidden * (latent + rotated) + latent + latent * heads * (plain + value)
    return queries + keys + heads * value * hidden, latent + rotated


def _inner_parameters(config: Mapping[str, Any], hidden: int, layers: int) -> int | None:
    """Return parameters of all layers' gated feed-forward parts; None for experts that are placed by other rules.

    All experts count, because each is in memory although a token meets few.
    """
    dense = 3 * hidden * int(config["intermediate_size"])
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    if not experts:
        # A count by another name.
        return None if any("expert" in name and value for name, value in config.items()) else layers * dense
    if any(name in config for name in _OTHER_PLACES) or config.get("moe_layer_freq", 1) != 1:
        return None
    each = 3 * hidden * int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = 3 * hidden * int(config.get("shared_expert_intermediate_size") or 0)
    shared += each * int(config.get("n_shared_experts") or 0)
    every = int(config.get("decoder_sparse_step") or 1)
    first, without = int(config.get("first_k_dense_replace") or 0), config.get("mlp_only_layers") or ()
    sparse = sum(at >= first and at not in without and (at + 1) % every == 0 for at in range(layers))
    return sparse * (experts * (each + hidden) + shared) + (layers - sparse) * dense


def read_shape(model: str) -> ModelShape | None:
    """Return the shape of a model directory, or of a hub model that this user has downloaded; None: not known.

    `model` is checked (`spec_paths`): a directory below the roots, or a name.
    """
    return model_shape(read_config(model))


def read_shapes(policy: str | None, critic: str | None = None, reward: str | None = None) -> Shapes | None:
    """Return the shapes of a run's models, each read as `read_shape` does; None where the policy's is not known."""
    known = [read_shape(model) if model else None for model in (policy, critic, reward)]
    return None if known[0] is None else Shapes(known[0], *known[1:])


def shapes_of(args: SimpleNamespace) -> Shapes | None:
    """Return the shapes of the models that a command's arguments (upstream's, nested) name; None as `read_shapes`."""
    nodes = (args.actor, args.critic, args.reward)
    return read_shapes(*(named_by_command(node.model_name_or_path) for node in nodes))


def read_config(model: str) -> Mapping[str, Any]:
    """Return a model's `config.json`, found as `read_shape` does; empty where it cannot be read."""
    folder = _downloaded(model) if _HUB_NAME.fullmatch(model) else Path(model)
    if folder is None or not folder.is_absolute():
        return {}
    try:
        config = json.loads(read_regular(folder / "config.json", _LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def named_by_command(model: str | None) -> str:
    """Return the model that an option of a command names, whose directory may be relative to the working directory."""
    return os.path.abspath(model) if model and os.path.isdir(model) else model or ""


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has layers with a state in place of a KV cache (Mamba, linear attention)."""
    text = config.get("text_config") or config
    kinds = [*(text.get("layer_types") or ()), *(text.get("layers_block_type") or ())]
    listed = any(word in kind for kind in kinds for word in _RECURRENT_LAYERS)
    return listed or any(name in text for name in _RECURRENT_SIZES)


def _downloaded(name: str) -> Path | None:
    """Return the newest snapshot in the hub's cache, laid out as models--OWNER--NAME/snapshots/REVISION."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    found = cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")
    return max((one.parent for one in found), key=lambda one: one.stat().st_mtime, default=None)
