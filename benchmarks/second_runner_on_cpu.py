"""Is output with drafts that without in vLLM's second model runner? Checked without a GPU, by interpreted kernels.

    pip install --no-deps --target FOLDER triton
    python benchmarks/second_runner_on_cpu.py --triton FOLDER
    python benchmarks/second_runner_on_cpu.py --triton FOLDER --ranks 2 --runners v2-async
    python benchmarks/second_runner_on_cpu.py --triton FOLDER --ranks 2 --runners v2-async --executor ray

vLLM's CPU build has the second runner and no Triton for it. Triton's interpreter runs its kernels on tensors of the
host, some hundred times as slow: no time says anything here. The embedded model answers greedily in float32, by each
`--drafting.runner` in turn. There is no history, a right one or a wrong one, and room for all samples or too little.
Every answer is to be that of the first runner without drafts; log-probabilities are compared, too.

Some things are pretended: that Triton has a driver here and a logarithm of the device's, and that vLLM allows
asynchronous scheduling on a CPU. Ranks that are Ray's actors have pretended GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

V1, V2_ASYNC = "v1", "v2-async"
PROMPT_TOKENS, TOKENS = 8, 40
# Tokens of the embedded vocabulary that are no special ones.
WORDS = range(3, 80)
# KV blocks of 32 tokens: one is vLLM's own, and eight samples of up to 109 tokens do not fit.
BLOCK, FEW_BLOCKS = 32, 16
HISTORIES = ("none", "right", "wrong")


def pretend() -> None:
    """Give Triton a driver, and the CPU platform asynchronous scheduling and Ray's actors."""
    import importlib.metadata
    import types

    version = importlib.metadata.version
    # vLLM takes its CPU build by its name, which PyPI's wheels do not have.
    importlib.metadata.version = lambda name: "0+cpu" if name == "vllm" else version(name)
    import triton.backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, config: Any) -> None:
        scheduler, parallel = config.scheduler_config, config.parallel_config
        asynchronous, executor = scheduler.async_scheduling, parallel.distributed_executor_backend
        own(cls, config)
        scheduler.async_scheduling, parallel.distributed_executor_backend = asynchronous, executor

    import triton.language as tl
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import gumbel

    # The interpreter cannot run that kernel: vLLM's way for few rows is taken for all.
    topk_topp_sampler.HAS_TRITON = False
    # Of a library of the device's that the interpreter does not have.
    gumbel.tldevice = types.SimpleNamespace(log1p=lambda value: tl.log(1.0 + value))
    CpuPlatform.check_and_update_config = classmethod(check)
    CpuPlatform.ray_device_key = "GPU"


def answers(
    runner: str, history: str, blocks: int, samples: int, known: list[list[int]], ranks: int, executor: str
) -> dict[str, Any]:
    """Return what an engine in this process answers; `known`: the answers without drafts."""
    from rhyme_openrlhf.platform import shims

    shims.install()
    if runner != V1:
        pretend()
    import vllm

    from rhyme_openrlhf import embedded
    from rhyme_openrlhf.engine.arguments import WORKER_EXTENSION, speculation_arguments
    from rhyme_openrlhf.engine.requests import PROMPT_KEY
    from rhyme_openrlhf.history.index import Piece, build_index
    from rhyme_openrlhf.settings.config import RhymeSettings
    from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings

    settings = RhymeSettings(
        histospec=HistoSpecSettings(enable=history != "none", siblings=False, shared_tokens=0),
        drafting=DraftingSettings(runner=runner, probe_share=0),
    )
    parallel: dict[str, Any] = {}
    if ranks > 1:
        parallel = {"tensor_parallel_size": ranks, "distributed_executor_backend": executor}
        if executor == "ray":
            import ray

            ray.init(num_gpus=ranks, include_dashboard=False, runtime_env={"worker_process_setup_hook": pretend})
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
    few: dict[str, Any] = {"num_gpu_blocks_override": blocks, "block_size": BLOCK} if blocks else {}
    llm = vllm.LLM(
        str(embedded.MODEL), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=512, kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False,
        logprobs_mode="processed_logprobs", worker_extension_cls=WORKER_EXTENSION,
        **({"async_scheduling": runner == V2_ASYNC} | few | parallel | speculation_arguments(settings)),
    )  # fmt: skip
    engine: Any = llm.llm_engine
    core = engine.engine_core.engine_core
    prompts = [[WORDS[(11 * n + 7 * place) % len(WORDS)] for place in range(PROMPT_TOKENS + n)] for n in range(samples)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (prompt, answer) in enumerate(zip(prompts, known, strict=False)):
            if history == "wrong":
                answer = [
                    WORDS[(token + 1) % len(WORDS)] if place % 3 == 0 else token for place, token in enumerate(answer)
                ]
            path = Path(folder) / str(number)
            build_index([Piece(prompt, answer, 1.0)]).tofile(path)
            if refused := core.rhyme_scheduler("install_history", [str(number), str(path)]):
                raise SystemExit(refused)
    parameters = [
        vllm.SamplingParams(
            temperature=0, max_tokens=TOKENS + 3 * n, ignore_eos=True, logprobs=0,
            extra_args={PROMPT_KEY: str(n)} if history != "none" else None,
        )
        for n in range(samples)
    ]  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(one.token_ids) for one in found],
        "logprobs": [[next(iter(place.values())).logprob for place in one.logprobs or ()] for one in found],
        "counters": core.rhyme_scheduler("read_counters", []),
        "second": engine.vllm_config.use_v2_model_runner,
        "by_ray": bool(core.model_executor.uses_ray),
        "asynchronous": engine.vllm_config.scheduler_config.async_scheduling,
    }


def in_a_process(triton: str, *what: Any) -> dict[str, Any]:
    """Return `answers` of another process, which has this Triton if its runner needs one."""
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1"}
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    if what[0] != V1:
        quiet |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        paths.append(triton)
    environment = {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, "--one", json.dumps(what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        said = [line for line in done.stderr.splitlines() if "leaked" not in line and "nanobind" not in line]
        raise SystemExit("\n".join([f"{what[:3]} failed:", *said[-20:]]))
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def main() -> int:
    """Run all arms; 0: every answer is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", default="", help="a folder with Triton's package")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--runners", nargs="+", choices=(V1, V2_ASYNC), default=(V1, V2_ASYNC))
    parser.add_argument("--ranks", type=int, default=1, help="processes of a tensor-parallel engine")
    parser.add_argument("--executor", choices=("mp", "ray"), default="mp", help="what starts these processes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print("RESULT " + json.dumps(answers(*json.loads(chosen.one))))
        return 0
    if not (Path(chosen.triton) / "triton").is_dir():
        parser.error(f"--triton {chosen.triton}: there is no Triton; pip install --no-deps --target FOLDER triton")
    plain = in_a_process(chosen.triton, V1, "none", 0, chosen.samples, [], chosen.ranks, "mp")
    print("| runner | history | KV blocks | drafted | accepted | decode steps | equal | log-probabilities differ by |")
    print("|---|---|---|---|---|---|---|---|")
    failed = 0
    for runner in chosen.runners:
        for history in HISTORIES:
            for blocks in (0, FEW_BLOCKS):
                known = plain["tokens"] if history != "none" else []
                found = in_a_process(
                    chosen.triton, runner, history, blocks, chosen.samples, known, chosen.ranks, chosen.executor
                )
                pairs = list(zip(found["tokens"], plain["tokens"], strict=True))
                equal = sum(one == other for one, other in pairs)
                failed += equal < len(pairs) or found["second"] != (runner != V1)
                failed += found["by_ray"] != (chosen.ranks > 1 and chosen.executor == "ray")
                both = zip(sum(found["logprobs"], []), sum(plain["logprobs"], []), strict=False)
                gap = float(np.max([abs(one - other) for one, other in both])) if equal == len(pairs) else float("nan")
                counts = found["counters"]
                print(
                    f"| {runner} | {history} | {blocks or 'enough'} | {counts['drafted']} | {counts['accepted']} | "
                    f"{counts['decode_steps']} | {equal} of {len(pairs)} | {gap:.1e} |",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__mp_main__" and "TRITON_INTERPRET" in os.environ:
    # A rank of a tensor-parallel engine, which vLLM starts as a new Python.
    pretend()

if __name__ == "__main__":
    sys.exit(main())
