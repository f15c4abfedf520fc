"""Step times from data sheets, for hardware that is not measured: a bound that real hardware does not reach.

A decode step reads the weights and the keys and values once, or computes its rows: the longer of the two counts. A
tensor-parallel engine also adds up its activations twice a layer. Real engines take longer: `efficiency` is the part of
the data sheet's rates that is reached. A user of these profiles gives a band.

Invariant: a profile made here has origin `derived`, and its notes name its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhyme_openrlhf.latency.profile import PrefillPoint, Profile, StepPoint, Subject

RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CONTEXTS = (1, 2048, 32768)
BYTES = 2  # bfloat16


@dataclass(frozen=True)
class ModelSpec:
    """A dense transformer: parameters, layers, key-value heads of `head` numbers each, hidden size."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head: int
    hidden: int


@dataclass(frozen=True)
class DeviceSpec:
    """A data sheet: memory bytes/s, dense bfloat16 FLOP/s, bytes/s to the other devices one way, bytes of memory."""

    name: str
    memory_rate: float
    flops: float
    link_rate: float
    memory: float


def roofline(model: ModelSpec, device: DeviceSpec, tensor_parallel: int, efficiency: float) -> Profile:
    """Return the model's profile on `tensor_parallel` devices that reach `efficiency` (0 to 1) of their data sheet."""
    devices, rate = tensor_parallel, efficiency
    weights = model.parameters * BYTES / devices
    kv_bytes = 2 * model.layers * model.kv_heads * model.head * BYTES // devices

    def seconds(rows: int, context: int) -> float:
        computed = 2 * model.parameters * rows / (devices * device.flops * rate)
        read = weights / (device.memory_rate * rate)
        keys = kv_bytes * context / (device.memory_rate * rate)
        # A ring's share of every activation, there and back, twice a layer.
        sent = rows * model.hidden * BYTES * 2 * 2 * model.layers * (devices - 1) / devices
        return max(computed, read) + keys + sent / (device.link_rate * rate)

    # Nine tenths of the memory is vLLM's default; what the weights leave of it is KV cache.
    kv_tokens = int((0.9 * device.memory - weights) / kv_bytes)
    steps = tuple(
        StepPoint(running, running * each, 0, seconds(running, running * each), 0.0, 1)
        for running in RUNNING
        for each in CONTEXTS
    )
    prefills = tuple(
        PrefillPoint(count, length, seconds(count * length, 0), 0.0, 1) for count in (1, 16) for length in (128, 16384)
    )
    return Profile(
        subject=Subject(model.name, device.name, "bfloat16", tensor_parallel),
        origin="derived",
        steps=steps,
        prefills=prefills,
        padded_rows=(),
        kv_cache_tokens=kv_tokens,
        kv_bytes_per_token=kv_bytes,
        kv_bytes_per_second=device.link_rate * rate,
        weight_load_seconds=weights / (device.link_rate * rate),
        versions={},
        notes=(f"data sheet of {device.name} at {efficiency:.0%}, not measured",),
    )
