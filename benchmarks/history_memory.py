"""Cost of history: memory of 230,000 prompts x 16 responses, and the time to build, hand over, spill and bring back.

Scaled down: some prompts' worth of responses, with lengths of a long tail, go the way of a worker's responses
(history/shard.py, history/index_store.py). Their bytes are counted. The full data set takes the same per token and
per prompt, times the numbers printed. The responses are made up (tokens by Zipf's law, sharing stretches). With
`--journal FILE`, the tokens of a run's journal are compressed too, as an example of real text.

    python benchmarks/history_memory.py --out history_memory.json

Prints the tables and writes their figures. Times are medians of --repeats, the arms interleaved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from replay import read_journal

from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.history.index_store import IndexStore
from rhyme_openrlhf.history.record import packed
from rhyme_openrlhf.history.shard import HistoryShard

# RhymeRL, section 5.3: "For RL training with a 230K dataset and 16K max response length, the host memory overhead of
# suffix trees is < 80GB per node with 8 nodes."
PROMPTS, SAMPLES, LONGEST, NODES, PAPER_GB = 230_000, 16, 16384, 8, 80
# A long tail as reasoning models have it: half of the responses below 3,000 tokens, one in thirty at the limit.
MEDIAN, SIGMA = 3000, 0.95
VOCABULARY, ZIPF, SHARED = 150_000, 1.3, 0.6
HANDED_OVER = 131_072
GB = 10**9
SHARED_MEMORY = "/dev/shm"


def lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Response lengths in tokens."""
    return np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, count), 1, LONGEST).astype(int)


def responses(rng: np.random.Generator, wanted: np.ndarray) -> list[Piece]:
    """Responses of one prompt: stretches of a text that they share, and of their own, in turn."""
    shared = rng.zipf(ZIPF, 2 * int(wanted.max()) + 200) % VOCABULARY
    made = []
    for number, length in enumerate(wanted):
        parts: list[np.ndarray] = []
        have = 0
        while have < length:
            stretch = int(rng.integers(5, 120))
            start = int(rng.integers(0, shared.size - stretch))
            own = rng.random() >= SHARED
            parts.append(rng.zipf(ZIPF, stretch) % VOCABULARY if own else shared[start : start + stretch])
            have += stretch
        made.append(Piece([], np.concatenate(parts)[:length].astype(np.int32), float(number % 2)))
    return made


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that `work` took, and what it gave."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, smallest and largest, in milliseconds."""
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "low_ms": 1e3 * min(seconds),
        "high_ms": 1e3 * max(seconds),
    }


def memory(prompts: int, seed: int) -> dict[str, Any]:
    """Bytes of `prompts` prompts in a shard and a store with room for all, and of the store with room for none."""
    rng = np.random.default_rng(seed)
    # What a prompt costs beside its responses: a shard of short ones, by the process's own memory.
    process, shard = psutil.Process(), HistoryShard()
    before = process.memory_info().rss
    for number in range(20_000):
        shard.record(f"{number:032x}", 1, [], [1] * SAMPLES)
    of_a_prompt = (process.memory_info().rss - before) / 20_000
    shard = HistoryShard()
    tokens, of_indexes, of_spilled, build_seconds, keep_seconds = 0, 0, 0, 0.0, 0.0
    for number in range(prompts):
        pieces = responses(rng, lengths(rng, SAMPLES))
        tokens += sum(len(piece.tokens) for piece in pieces)
        key = f"{number:032x}"
        sizes = [len(piece.tokens) for piece in pieces]
        seconds, _ = timed(lambda key=key, pieces=pieces, sizes=sizes: shard.record(key, 1, pieces, sizes))
        keep_seconds += seconds
        seconds, index = timed(lambda key=key: shard.build(key))
        build_seconds += seconds
        of_indexes += index.nbytes
        of_spilled += len(packed(index))
    return {
        "prompts": prompts,
        "tokens": tokens,
        "mean_length": tokens / prompts / SAMPLES,
        "index_bytes_per_token": of_indexes / tokens,
        "response_bytes_per_token": shard.data_bytes / tokens,
        "spilled_bytes_per_token": of_spilled / tokens,
        "bytes_per_prompt": of_a_prompt,
        "keep_us_per_token": 1e6 * keep_seconds / tokens,
        "build_us_per_token": 1e6 * build_seconds / tokens,
    }


def whole_data_set(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """GB per node for RhymeRL's data set, by rollouts kept of each prompt and share of the indexes in memory."""
    tokens = PROMPTS * SAMPLES * measured["mean_length"]
    rows = []
    for rollouts, resident in itertools.product((1, 2), (1.0, 0.5, 0.1, 0.0)):
        kept = rollouts * tokens
        ram = kept * (measured["response_bytes_per_token"] + resident * measured["index_bytes_per_token"])
        ram += PROMPTS * measured["bytes_per_prompt"]
        rows.append(
            {
                "rollouts": rollouts,
                "indexes_in_memory": resident,
                "memory_gb_per_node": ram / NODES / GB,
                "disk_gb_per_node": kept * (1 - resident) * measured["spilled_bytes_per_token"] / NODES / GB,
            }
        )
    return rows


READER = """
import sys, time
import numpy as np
from rhyme_openrlhf.history.index import DraftIndex
for line in sys.stdin:
    path, *context = line.split()
    started = time.perf_counter()
    buffer = np.memmap(path, dtype=np.uint8, mode="r")
    mapped = time.perf_counter()
    index = DraftIndex.from_buffer(buffer)
    opened = time.perf_counter()
    drafted = index.draft([int(token) for token in context], 16, 3, 32)
    ended = time.perf_counter()
    print(mapped - started, opened - mapped, ended - opened, ended - started, len(drafted.tokens), flush=True)
"""


def hand_over(index: np.ndarray, pieces: list[Piece], repeats: int) -> dict[str, Any]:
    """Measure from an index in this process to the first draft in another one: by a tmpfs file, and by a Ray object.

    A Ray object brings an index from the worker to the engine's actor; the engine core maps a file.
    """
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote(num_cpus=0)
    class Holder:
        def __init__(self, held: np.ndarray) -> None:
            self._held = np.array(held)

        def get(self) -> np.ndarray:
            return self._held

    holder = Holder.remote(index)
    ray.get(holder.get.remote())
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None and reader.stdout is not None
    parts: dict[str, list[float]] = {
        name: [] for name in ("write_file", "ray_object", "map", "open", "draft", "map_open_draft")
    }
    context = " ".join(map(str, pieces[3].tokens[100:116]))
    for _ in range(repeats):
        seconds, fetched = timed(lambda: ray.get(holder.get.remote()))
        parts["ray_object"].append(seconds)
        with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as file:
            seconds, _ = timed(lambda fetched=fetched, file=file: (fetched.tofile(file), file.flush()))
            parts["write_file"].append(seconds)
            reader.stdin.write(f"{file.name} {context}\n")
            reader.stdin.flush()
            *seconds_there, drafted = reader.stdout.readline().split()
        assert int(drafted) > 0, "the index was handed over, but drafts nothing"
        for name, value in zip(("map", "open", "draft", "map_open_draft"), seconds_there, strict=True):
            parts[name].append(float(value))
    reader.stdin.close()
    reader.wait(timeout=30)
    ray.shutdown()
    return {"bytes": index.nbytes, **{name: spread(seconds) for name, seconds in parts.items()}}


def spill(index: np.ndarray, pieces: list[Piece], repeats: int, directory: Path) -> dict[str, Any]:
    """Writing an index out, bringing it back, and building it again instead."""
    parts: dict[str, list[float]] = {"spill": [], "bring_back": [], "build_again": []}
    shard = HistoryShard()
    shard.record("p", 1, pieces, [len(piece.tokens) for piece in pieces])
    for _ in range(repeats):
        store = IndexStore(directory, 0, sys.exit)
        parts["spill"].append(timed(lambda store=store: store.put("p", index))[0])
        seconds, found = timed(lambda store=store: store.bring("p"))
        assert found.tobytes() == index.tobytes()
        parts["bring_back"].append(seconds)
        parts["build_again"].append(timed(lambda: shard.build("p"))[0])
        store.close()
    return {name: spread(seconds) for name, seconds in parts.items()}


def compressors() -> Iterator[tuple[str, Callable[[bytes], bytes], Callable[[bytes, int], bytes]]]:
    """Name, compress, decompress; zstandard and lz4 where pyarrow is installed."""
    for level in (1, 6):
        yield (
            f"zlib {level}",
            lambda raw, level=level: zlib.compress(raw, level),
            lambda block, _: zlib.decompress(block),
        )
    try:
        from pyarrow import Codec
    except ImportError:
        return
    for name, codec in (("zstd 1", Codec("zstd", 1)), ("zstd 3", Codec("zstd", 3)), ("lz4", Codec("lz4"))):
        yield (
            name,
            lambda raw, codec=codec: codec.compress(raw, asbytes=True),
            lambda block, size, codec=codec: codec.decompress(block, size),
        )


def compression(contents: dict[str, np.ndarray], repeats: int) -> list[dict[str, Any]]:
    """Bytes per 4 bytes given and milliseconds, of each content by each compressor, plain and by byte planes."""
    rows = []
    for what, content in contents.items():
        plain = content.tobytes()
        planes = np.ascontiguousarray(content[: content.size // 4 * 4].reshape(-1, 4).T).tobytes()
        for layout, raw in (("plain", plain), ("planes", planes)):
            for name, compress, decompress in compressors():
                there = [timed(lambda c=compress, r=raw: c(r)) for _ in range(repeats)]
                block = there[0][1]
                back = [timed(lambda d=decompress, b=block, r=raw: d(b, len(r)))[0] for _ in range(repeats)]
                rows.append(
                    {
                        "what": what,
                        "layout": layout,
                        "by": name,
                        "ratio": len(raw) / len(block),
                        "compress_ms_per_mb": 1e9 * statistics.median(seconds for seconds, _ in there) / len(raw),
                        "decompress_ms_per_mb": 1e9 * statistics.median(back) / len(raw),
                    }
                )
    return rows


def journal_tokens(path: Path) -> np.ndarray:
    """Return the tokens of all responses in a journal, as bytes."""
    pieces = [piece for record in read_journal(path) for piece in record.pieces]
    return np.concatenate([piece.tokens for piece in pieces]).view(np.uint8)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as aligned text."""
    cells = [list(rows[0])] + [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100, help="prompts of the scaled-down data set")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--journal", type=Path, help="a run's <run>/history/worker-0.journal")
    parser.add_argument("--spill_dir", type=Path, help="directory on the disk to measure (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=Path("history_memory.json"))
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    pieces = responses(rng, np.full(SAMPLES, HANDED_OVER // SAMPLES))
    index = build_index(pieces)
    DraftIndex.from_buffer(index)
    contents = {"tokens": np.concatenate([piece.tokens for piece in pieces]).view(np.uint8), "index": index}
    if options.journal:
        contents["journal"] = journal_tokens(options.journal)
    measured = memory(options.prompts, options.seed)
    rows = whole_data_set(measured)
    with tempfile.TemporaryDirectory(dir=options.spill_dir) as directory:
        spilled = spill(index, pieces, options.repeats, Path(directory) / "spilled")
    handed = hand_over(index, pieces, options.repeats)
    compressed = compression(contents, 3)
    result = {
        "machine": {"cpus": os.cpu_count(), "memory": psutil.virtual_memory().total},
        "scaled_down": measured,
        "whole": {"prompts": PROMPTS, "samples": SAMPLES, "nodes": NODES, "paper_gb_per_node": PAPER_GB, "rows": rows},
        "hand_over": handed,
        "spill": spilled,
        "compression": compressed,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table([measured]))
    print(f"\n{PROMPTS:,} prompts x {SAMPLES} on {NODES} nodes (RhymeRL: below {PAPER_GB} GB each):\n{table(rows)}")
    print(f"\n{HANDED_OVER:,} tokens, an index of {index.nbytes / 1e6:.2f} MB, milliseconds:")
    parts = {**spilled, **{name: value for name, value in handed.items() if name != "bytes"}}
    print(table([{"part": name, **value} for name, value in parts.items()]))
    print(f"\n{table(compressed)}")


if __name__ == "__main__":
    main()
