"""A model with the shape of a real one that answers as the embedded model does, for measuring speed on a GPU.

    python benchmarks/real_shape.py qwen3-1.7b FOLDER
    python benchmarks/real_shape.py qwen3-8b FOLDER

Drafts fit the embedded model's tasks, so what they gain can be measured with it. But it has 1 M parameters and a
vocabulary of 128: the language model's head and the sampler cost nothing there. This makes a Qwen3 of a real size:
152K tokens, 8 key and value heads of 128. Nothing is downloaded.

How it answers alike (in exact numbers; in 16 bits a near tie may end otherwise):
- The embedded model's numbers stand in the first places of each wider vector, and zeros behind them. A norm over the
  wider vector is that of the narrow one times a constant, which its weight takes back.
- Of a head of 128, pairs of places turn at 64 speeds, of one of 32 at 16: every fourth speed is the same one.
- What heads, neurons and layers beyond the embedded model's compute is random, and multiplied by zero behind it. So
  they cost what they cost in a real model.
- Tokens beyond the embedded vocabulary are never the answer. One place of the vector is the same for each token, and
  their rows of the head make a low number of it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rhyme_openrlhf import embedded

# The constant place's number before the first layer, so small that no norm notices; and how unlikely it makes a token.
MARK, FAR = 1e-3, 1e6
SHARD_BYTES = 2 << 30
# Of random weights, as of a new model's.
SPREAD = 0.02


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as Transformers' Qwen3Config names them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936


# By the models' own config.json.
SHAPES = {
    "qwen3-1.7b": Shape(2048, 6144, 28, 16),
    "qwen3-8b": Shape(4096, 12_288, 36, 32),
    # For tests.
    "tiny": Shape(512, 640, 5, 8, 4, 128, 300),
}


class Maker:
    """Widens the tensors of one model."""

    def __init__(self, shape: Shape, small: dict[str, Any], seed: int = 0) -> None:
        self._shape, self._small = shape, small
        self._chance = torch.Generator().manual_seed(seed)
        if shape.num_key_value_heads < small["num_key_value_heads"] or self._group < self._small_group:
            raise ValueError("the shape has fewer heads than the embedded model")
        if shape.head_dim % small["head_dim"]:
            raise ValueError("a head of the shape must be a multiple of the embedded model's")

    @property
    def _group(self) -> int:
        return self._shape.num_attention_heads // self._shape.num_key_value_heads

    @property
    def _small_group(self) -> int:
        return int(self._small["num_attention_heads"]) // int(self._small["num_key_value_heads"])

    def random(self, *size: int) -> torch.Tensor:
        """Return weights as of a new model."""
        return torch.empty(*size, dtype=torch.bfloat16).normal_(0, SPREAD, generator=self._chance)

    def places(self) -> torch.Tensor:
        """Return where in a head of the shape the embedded head's places stand: pairs turn at the same speed."""
        half, small_half = self._shape.head_dim // 2, int(self._small["head_dim"]) // 2
        first = torch.arange(small_half) * (half // small_half)
        return torch.cat([first, first + half])

    def query_heads(self) -> list[int]:
        """Return which heads of the shape the embedded query heads are: behind their own keys."""
        heads = range(int(self._small["num_attention_heads"]))
        return [head // self._small_group * self._group + head % self._small_group for head in heads]

    def rows(self, heads: list[int]) -> torch.Tensor:
        """Return the places of these heads, one after the other, in a projection of all heads."""
        return torch.cat([self.places() + head * self._shape.head_dim for head in heads])

    def projected(self, small: torch.Tensor, heads: list[int], total: int) -> torch.Tensor:
        """Return a projection to `total` heads. Of the embedded heads unused places are zero, others are random."""
        made = self.random(total * self._shape.head_dim, self._shape.hidden_size)
        for head in heads:
            made[head * self._shape.head_dim : (head + 1) * self._shape.head_dim] = 0
        rows = self.rows(heads)
        made[rows] = 0
        made[rows, : small.shape[1]] = small
        return made

    def norm(self, small: torch.Tensor, size: int, places: torch.Tensor | None = None, times: float = 1.0) -> Any:
        """Return a norm's weight: the wider vector's mean square is smaller by the share of places in use."""
        made = torch.zeros(size, dtype=torch.bfloat16)
        where = torch.arange(small.numel()) if places is None else places
        made[where] = (small.float() * math.sqrt(small.numel() / size) * times).to(torch.bfloat16)
        return made

    def layer(self, number: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return layer `number`, of the embedded model's layer `weights`; empty: one that adds nothing."""
        shape, kv = self._shape, list(range(int(self._small["num_key_value_heads"])))
        hidden, heads, keys = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
        output = torch.zeros(hidden, heads * shape.head_dim, dtype=torch.bfloat16)
        down = torch.zeros(hidden, shape.intermediate_size, dtype=torch.bfloat16)
        gate, up = (self.random(shape.intermediate_size, hidden) for _ in range(2))
        made = {
            f"self_attn.{name}_norm.weight": torch.ones(shape.head_dim, dtype=torch.bfloat16) for name in ("q", "k")
        }
        made |= {
            f"{name}_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in ("input", "post_attention")
        }
        count = {"q": heads, "k": keys, "v": keys}
        if weights:
            used = {"q": self.query_heads(), "k": kv, "v": kv}
            for name, total in count.items():
                made[f"self_attn.{name}_proj.weight"] = self.projected(
                    weights[f"self_attn.{name}_proj.weight"], used[name], total
                )
            small = weights["self_attn.o_proj.weight"]
            output[: small.shape[0], self.rows(used["q"])] = small
            # Scores are divided by the root of the head's size, which is larger.
            larger = math.sqrt(shape.head_dim / self._small["head_dim"])
            for name, times in (("q", larger), ("k", 1.0)):
                small = weights[f"self_attn.{name}_norm.weight"]
                made[f"self_attn.{name}_norm.weight"] = self.norm(small, shape.head_dim, self.places(), times)
            for name in ("input", "post_attention"):
                made[f"{name}_layernorm.weight"] = self.norm(weights[f"{name}_layernorm.weight"], hidden)
            for made_rows, name in ((gate, "gate"), (up, "up")):
                small = weights[f"mlp.{name}_proj.weight"]
                made_rows[: small.shape[0]] = 0
                made_rows[: small.shape[0], : small.shape[1]] = small
            small = weights["mlp.down_proj.weight"]
            down[: small.shape[0], : small.shape[1]] = small
        else:
            for name, total in count.items():
                made[f"self_attn.{name}_proj.weight"] = self.random(total * shape.head_dim, hidden)
        made |= {"self_attn.o_proj.weight": output, "mlp.down_proj.weight": down}
        made |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
        return {f"model.layers.{number}.{name}": tensor.contiguous() for name, tensor in made.items()}

    def ends(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the embedding, the last norm and the head."""
        shape, mark = self._shape, self._shape.hidden_size - 1
        small = weights["model.embed_tokens.weight"]
        embedding = self.random(shape.vocab_size, shape.hidden_size)
        embedding[: small.shape[0]] = 0
        embedding[: small.shape[0], : small.shape[1]] = small
        embedding[:, mark] = MARK
        norm = self.norm(weights["model.norm.weight"], shape.hidden_size)
        norm[mark] = 1.0
        small = weights["lm_head.weight"]
        head = self.random(shape.vocab_size, shape.hidden_size)
        head[: small.shape[0]] = 0
        head[: small.shape[0], : small.shape[1]] = small
        head[small.shape[0] :, mark] = -FAR
        return {"model.embed_tokens.weight": embedding, "model.norm.weight": norm, "lm_head.weight": head}


def make(name: str, folder: Path) -> None:
    """Write the model, in 16 bits, with the embedded model's tokenizer."""
    shape = SHAPES[name]
    small = json.loads((embedded.MODEL / "config.json").read_text())
    weights = load_file(embedded.MODEL / "model.safetensors")
    maker = Maker(shape, small)
    folder.mkdir(parents=True, exist_ok=True)
    config = small | {field: getattr(shape, field) for field in vars(shape)}
    config["layer_types"] = ["full_attention"] * shape.num_hidden_layers
    config["rms_norm_eps"] = small["rms_norm_eps"] * small["hidden_size"] / shape.hidden_size
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in embedded.MODEL.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)
    index: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if held:
            file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            save_file(held, folder / file, {"format": "pt"})
            index.update(dict.fromkeys(held, file))
            held.clear()

    for number in range(shape.num_hidden_layers):
        start = f"model.layers.{number}."
        own = {key.removeprefix(start): tensor for key, tensor in weights.items() if key.startswith(start)}
        held |= maker.layer(number, own)
        if sum(tensor.nbytes for tensor in held.values()) > SHARD_BYTES:
            flush()
    held |= maker.ends(weights)
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}) + "\n")


def main() -> None:
    """Make one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    make(chosen.shape, chosen.folder)


if __name__ == "__main__":
    main()
