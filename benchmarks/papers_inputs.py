"""Models, devices, seeds and the notation of gains for the simulations of the papers."""

from __future__ import annotations

import statistics

from roofline import DeviceSpec, ModelSpec

SEED = 1
PAT_SEEDS = (1, 2, 3)
# The part of the data sheet that decoding reaches. It scales all times alike, so no ratio depends on it.
EFFICIENCY = 0.6
# How much of the lengths' variance lies within a prompt is not printed: the default, and more of it.
WITHIN = (0.03, 0.1, 0.3)
NEVER_WAITS = 1e12

QWEN3_14B = ModelSpec("Qwen3ForCausalLM 40x5120", 14.8e9, 40, 8, 128, 5120)
QWEN3_8B = ModelSpec("Qwen3ForCausalLM 36x4096", 8.19e9, 36, 8, 128, 4096)
QWEN25_32B = ModelSpec("Qwen2ForCausalLM 64x5120", 32.8e9, 64, 8, 128, 5120)
LLAMA_8B = ModelSpec("LlamaForCausalLM 32x4096", 8.03e9, 32, 8, 128, 4096)
# NVIDIA data sheets; dense bfloat16. RhymeRL names no GPU ("high-performance").
H100 = DeviceSpec("NVIDIA H100 SXM", 3.35e12, 989e12, 450e9, 80e9)
L40S = DeviceSpec("NVIDIA L40S", 864e9, 362e12, 32e9, 48e9)
A40 = DeviceSpec("NVIDIA A40", 696e9, 149.7e12, 32e9, 48e9)


def spread(values: list[float]) -> str:
    """Return the mean, and the least and the most."""
    return f"{statistics.fmean(values):.2f}x ({min(values):.2f} to {max(values):.2f})"


def end_to_end(gain: float, share: float) -> float:
    """Return the gain of a whole step from a gain of the generation, which is this share of it."""
    return 1 / (1 - share + share / gain)


def say(words: str) -> None:
    print(words, flush=True)
