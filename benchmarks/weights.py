"""Speed of weights from the policy to an engine through the weight buffer, beside the machine's own memcpy.

    python benchmarks/weights.py --gb 4 --out weights.json

Measured on this machine without a GPU: the policy's rank, a node's store and an engine's worker are processes of their
own, with one thread each. A worker's parameters stand for the device's. All arms take turns in each round:

- memcpy: one bucket after the other from memory to memory, in one process.
- publish: the rank writes a version into its node's segment. load: a worker copies it out of the segment.
- both: publish and load at the same time, from the order to publish until everything is loaded.
- store: another node's store fetches the version through Ray's object store (here both nodes are this machine).
- old publish, old store, old load, old both: the way through pageable memory, Ray's object store and a file written by
  one thread, one step after the other. `old both` is the sum.

The table at the end is arithmetic from the rates of links, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

GB = 10**9
LAYER_BYTES = 32 * 1024**2
BUCKET_MB = 512
# Rates of links in GB/s that the arithmetic assumes: one GPU's PCIe 5 x16, one node's memory, one node's network.
PCIE, MEMORY, NETWORK = 55.0, 300.0, 50.0
GPUS, NODES = 8, 4
# Billions of parameters, 2 bytes each, and the engines' tensor-parallel size.
MODELS = ((8, 1), (32, 2), (70, 4))


def layers(nbytes: int) -> torch.nn.Module:
    """Yield the layers of a model of this many bytes."""
    count = max(1, nbytes // LAYER_BYTES)
    return torch.nn.ParameterDict(
        {f"layer_{i}": torch.nn.Parameter(torch.full((LAYER_BYTES // 4,), float(i))) for i in range(count)}
    )


class Worker:
    """An engine's worker: parameters of its own, which versions are copied into."""

    def __init__(self, nbytes: int) -> None:
        from rhyme_openrlhf.weights.segment_file import SegmentFiles

        torch.set_num_threads(1)
        self.parameters = dict(layers(nbytes).named_parameters())
        self.files = SegmentFiles()

    def load(self, segment: Any) -> float:
        """Copy a segment's parameters as they arrive; return when that ended."""
        from rhyme_openrlhf.weights.segment_file import tensors

        file = self.files.open(segment)
        with torch.no_grad():
            for name, tensor in tensors(file, segment.version):
                self.parameters[name].copy_(tensor)
        file.check(segment.version)
        return time.time()

    def load_file(self, path: str, nbytes: int) -> float:
        """Copy a whole file's parameters; return when that ended."""
        data = torch.from_file(path, shared=False, size=nbytes, dtype=torch.uint8)
        offset = 0
        with torch.no_grad():
            for parameter in self.parameters.values():
                end = offset + parameter.numel() * 4
                parameter.copy_(data[offset:end].view(torch.float32))
                offset = end
        return time.time()


class FileStore:
    """A node's store of the old way: writes what lies in Ray's object store into a file."""

    def store(self, refs: list[Any], path: str) -> None:
        """Write the buckets one after the other, under the file's name when it is whole."""
        with open(f"{path}.partial", "wb") as file:
            for array in ray.get(refs):
                array.tofile(file)
        os.rename(f"{path}.partial", path)


class Bench:
    """Both ways, with one model. Each arm is a method that returns seconds."""

    def __init__(self, nbytes: int) -> None:
        from rhyme_openrlhf.weights.node import NodeWeights
        from rhyme_openrlhf.weights.publisher import WeightPublisher

        torch.set_num_threads(1)
        self.publisher = WeightPublisher(layers(nbytes), 2, 1, BUCKET_MB)
        self.nbytes = sum(bucket.nbytes for bucket in self.publisher.buckets)
        self.node, self.other = (NodeWeights.remote(self.publisher.buckets) for _ in range(2))
        self.worker = ray.remote(num_cpus=0)(Worker).remote(nbytes)
        self.file_store = ray.remote(num_cpus=0)(FileStore).remote()
        self.version = 0
        self.path = f"/dev/shm/rhyme-weights-bench-{os.getpid()}"
        bucket = max(bucket.nbytes for bucket in self.publisher.buckets)
        self.buffers = torch.ones(bucket, dtype=torch.uint8), torch.ones(bucket, dtype=torch.uint8)

    def _begin(self, node: Any) -> Any:
        return ray.get(node.begin.remote(self.version))

    def round(self) -> dict[str, float]:
        """Seconds of each arm, in turn."""
        took: dict[str, float] = {}

        def timed(arm: str, work: Callable[[], Any]) -> Any:
            began = time.perf_counter()
            found = work()
            took[arm] = time.perf_counter() - began
            return found

        everything = range(len(self.publisher.buckets))
        timed("memcpy", lambda: [self.buffers[1].copy_(self.buffers[0]) for _ in everything])
        took["memcpy"] *= self.nbytes / (self.buffers[0].numel() * len(everything))
        self.version += 1
        segment = self._begin(self.node)
        timed("publish", lambda: self.publisher.publish(segment, everything))
        timed("load", lambda: ray.get(self.worker.load.remote(segment)))
        there = self._begin(self.other)
        timed(
            "store",
            lambda: ray.get(
                self.other.fetch.remote(there, [self.node.share.remote(segment, number) for number in everything])
            ),
        )
        self.version += 1
        segment = self._begin(self.node)
        began = time.time()
        loading = self.worker.load.remote(segment)
        self.publisher.publish(segment, everything)
        took["both"] = ray.get(loading) - began
        refs: list[Any] = []
        timed("old publish", lambda: self._put(refs))
        timed("old store", lambda: ray.get(self.file_store.store.remote(refs, self.path)))
        refs.clear()
        timed("old load", lambda: ray.get(self.worker.load_file.remote(self.path, self.nbytes)))
        os.unlink(self.path)
        took["old both"] = sum(took[f"old {part}"] for part in ("publish", "store", "load"))
        return took

    def _put(self, refs: list[Any]) -> None:
        for bucket in self.publisher.buckets:
            packed = torch.empty(bucket.nbytes, dtype=torch.uint8)
            for entry in bucket.entries:
                raw = self.publisher._published[entry.parameter.name].tensor().view(torch.uint8)
                packed[entry.offset : entry.offset + raw.numel()].copy_(raw)
            refs.append(ray.put(packed.numpy()))

    def close(self) -> None:
        """Remove the segments."""
        ray.get([self.node.close.remote(), self.other.close.remote()])


def arithmetic() -> list[dict[str, float]]:
    """Seconds that each link alone takes for one version, on NODES nodes of GPUS GPUs that train and generate."""
    rows = []
    for billions, size in MODELS:
        nbytes = 2.0 * billions
        # Each rank writes its share; each worker reads its shard; every engine of a node reads the node's one copy.
        links = {
            "write": nbytes / GPUS / PCIE,
            "load": nbytes / size / PCIE,
            "memory": (nbytes + nbytes * GPUS / size) / MEMORY,
        }
        rows.append({"billions": billions, "tp": size, **links, "elsewhere": nbytes / NETWORK})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model; up to 9 times as much memory is used")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    nbytes = int(asked.gb * GB)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=int(2.2 * nbytes) + 10**8)
    bench = Bench(nbytes)
    try:
        # In the first two, memory is new.
        rounds = [bench.round() for _ in range(asked.rounds + 2)][2:]
    finally:
        bench.close()
        ray.shutdown()
    print(f"{bench.nbytes / GB:.2f} GB, {len(bench.publisher.buckets)} buckets, median of {asked.rounds} rounds")
    print(f"{'arm':<12} {'GB/s':>7} {'of memcpy':>10}")
    for arm in rounds[0]:
        speed = statistics.median(bench.nbytes / GB / one[arm] for one in rounds)
        share = statistics.median(one["memcpy"] / one[arm] for one in rounds)
        print(f"{arm:<12} {speed:7.2f} {share:10.2f}")
    gain = statistics.median(one["old both"] / one["both"] for one in rounds)
    slowest = statistics.median(one["both"] / max(one["publish"], one["load"]) for one in rounds)
    print(
        f"published to loaded: {gain:.1f} times as fast as the old way, "
        f"{slowest:.2f} x what the slower step alone takes"
    )
    rows = arithmetic()
    print(
        f"\nArithmetic, not measured: {NODES} nodes of {GPUS} GPUs, PCIe {PCIE:g}, memory {MEMORY:g}, "
        f"network {NETWORK:g} GB/s"
    )
    print("model  TP  write s  load s  memory s  slowest s  engines elsewhere s")
    for row in rows:
        slowest = max(row["write"], row["load"], row["memory"])
        print(
            f"{row['billions']:>4.0f}B {row['tp']:>3.0f} {row['write']:8.2f} {row['load']:7.2f} {row['memory']:9.2f} "
            f"{slowest:10.2f} {row['elsewhere']:20.2f}"
        )
    if asked.out:
        asked.out.write_text(json.dumps({"nbytes": bench.nbytes, "rounds": rounds, "arithmetic": rows}, indent=1))


if __name__ == "__main__":
    main()
