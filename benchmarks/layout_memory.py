"""Memory that two layouts take of a machine, beside what the run said before it started. A real run, measured.

    python benchmarks/layout_memory.py --out layout-memory.json [--kv 256] [--model DIRECTORY]

A demonstration run with `--tp_switch.enable` prints its plan. During the run, the memory of each of its engines'
processes is read again and again, as proportional set size, where shared memory counts once. The processes are the
actor with vLLM's frontend, the engine core, and the workers of a tail engine's ranks. The largest total counts. All
that is not in the weights and the KV cache is the processes' own memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

TIMEOUT_S = 500
KINDS = ("ray::RhymeRolloutActor", "VLLM::EngineCor", "VLLM::Worker")
MB = 1024**2


def engines_memory(root: psutil.Process) -> dict[str, list[int]]:
    """Proportional set sizes of the engines' processes below a process, by kind."""
    found: dict[str, list[int]] = defaultdict(list)
    for process in root.children(recursive=True):
        try:
            line = " ".join(process.cmdline()) or process.name()
            kind = next((kind for kind in KINDS if line.startswith(kind)), None)
            if kind is not None:
                found[kind].append(process.memory_full_info().pss)
        except psutil.Error:
            # It has ended since.
            continue
    return found


def watched(command: list[str]) -> tuple[str, dict[str, list[int]]]:
    """Return a command's output, and the largest memory of the engines."""
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        most: dict[str, list[int]] = {}
        end = time.monotonic() + TIMEOUT_S
        while running.poll() is None:
            if time.monotonic() > end:
                running.terminate()
                running.wait(60)
            now = engines_memory(psutil.Process(running.pid))
            if sum(map(sum, now.values())) > sum(map(sum, most.values())):
                most = now
            time.sleep(0.5)
        said.seek(0)
        output = said.read()
    if running.returncode:
        raise SystemExit(f"the run ended with {running.returncode}:\n{output[-4000:]}")
    return output, most


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make and measure one run."""
    with tempfile.TemporaryDirectory(prefix="rhyme-memory-") as name:
        folder = Path(name)
        more = ["--actor.model_name_or_path", str(options.model)] if options.model else []
        output, most = watched(
            [
                sys.executable, "-m", "rhyme_openrlhf.cli.main", "demo", "--run.dir", str(folder / "run"),
                "--run.progress", "lines", "--vllm.num_engines", "2", "--tp_switch.enable", "--tp_switch.samples", "8",
                "--cpu.kv_cache_mb", str(options.kv), "--train.num_episodes", "1",
                "--ckpt.path", str(folder / "checkpoints"), "--ckpt.output_dir", str(folder / "trained"), *more,
            ]
        )  # fmt: skip
    plan = next(line for line in output.splitlines() if "layouts: " in line)
    planned = int(re.search(r": ([\d,]+) MB on \d+ devices", plan)[1].replace(",", "")) * MB  # type: ignore[index]
    total = sum(map(sum, most.values()))
    print(plan)
    for kind, sizes in most.items():
        print(f"{kind}: " + ", ".join(f"{size / MB:,.0f} MB" for size in sorted(sizes)))
    print(f"planned {planned / MB:,.0f} MB, measured {total / MB:,.0f} MB")
    return {"plan": plan, "planned": planned, "measured": total, "processes": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("layout-memory.json"))
    parser.add_argument("--kv", type=int, default=256, help="KV cache of each engine, MB")
    parser.add_argument("--model", type=Path, help="another model than the embedded one")
    options = parser.parse_args()
    options.out.write_text(json.dumps({"kind": "measured", **measure(options)}) + "\n")


if __name__ == "__main__":
    main()
