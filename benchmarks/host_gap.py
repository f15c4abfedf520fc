"""The host's time between the tokens of a decode step and the launch of the next one, in vLLM's second model runner.

    pip install --no-deps --target FOLDER triton
    python benchmarks/host_gap.py --triton FOLDER --running 8 32 128 512 --rounds 3

With drafts and asynchronous scheduling (--drafting.runner v2-async) a GPU idles for this time: drafts need the tokens
of the step before. One engine runs in this process on CPU tensors. Its kernels and its model compute nothing, so what
remains is the host's Python and its copies. Sampled tokens are those of made-up responses; a history that is wrong in
every WRONG-th token drafts for them.

Columns are medians in microseconds of this thread's processor time. "ours": from the tokens to the filled step.
"runner": from the filled step to the call of the model, in vLLM's runner, with its parts by name. "gap": both together.
A launch of a kernel costs nothing here, so launches are counted. Metadata of a GPU's attention is not made.
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
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRONG, PROMPT_TOKENS, TOKENS = 7, 16, 200
WARM_UP = 25
WORDS = range(3, 80)
# Methods of vLLM's runner by the part that they belong to.
PARTS = {
    "state": ("finish_requests", "free_states", "add_requests", "update_requests"),
    "gather": ("gather_batch_req_state",),
    "inputs": ("prepare_inputs",),
    "blocks": ("prepare_attn",),
}
COLUMNS = ("ours", "runner", *PARTS, "gap", "launches", "drafts")


class Watch:
    """Times of one step at a time, by name, while `on`; and all steps' so far."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.now: dict[str, float] | None = None
        self.known = self.filled = 0.0

    def began(self) -> None:
        """Begin a step: its tokens are known."""
        self.now, self.known = defaultdict(float), time.thread_time()

    def ended(self, drafts: int) -> None:
        """End the step: the model is called."""
        if self.now is not None:
            launched = time.thread_time()
            self.now |= {
                "ours": self.filled - self.known, "runner": launched - self.filled, "gap": launched - self.known,
                "drafts": drafts,
            }  # fmt: skip
            self.steps.append(self.now)
        self.now = None

    def times(self, owner: Any, method: str, part: str) -> None:
        """Add what a method takes to a part of the step."""
        called = getattr(owner, method)

        def timed(*args: Any, **named: Any) -> Any:
            started = time.thread_time()
            try:
                return called(*args, **named)
            finally:
                if self.now is not None:
                    self.now[part] += time.thread_time() - started

        setattr(owner, method, timed)


def responses(samples: int) -> list[list[int]]:
    """Return made-up responses."""
    import numpy as np

    texts = np.random.default_rng(1).integers(WORDS.start, WORDS.stop, (samples, TOKENS))
    return [text.tolist() for text in texts]


def measured(samples: int) -> dict[str, float]:
    """Return the medians of an engine of this process with this number of samples."""
    from rhyme_openrlhf.platform import shims

    shims.install()
    from second_runner_on_cpu import pretend

    pretend()
    import torch
    import vllm
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from rhyme_openrlhf import embedded
    from rhyme_openrlhf.engine.arguments import WORKER_EXTENSION, speculation_arguments
    from rhyme_openrlhf.engine.patches import late_drafts
    from rhyme_openrlhf.engine.patches.second_runner import drafts_of
    from rhyme_openrlhf.engine.requests import PROMPT_KEY
    from rhyme_openrlhf.history.index import Piece, build_index
    from rhyme_openrlhf.settings.config import RhymeSettings
    from rhyme_openrlhf.settings.drafting import V2_ASYNC, DraftingSettings, HistoSpecSettings

    settings = RhymeSettings(
        histospec=HistoSpecSettings(siblings=False, shared_tokens=0, window_max=8),
        drafting=DraftingSettings(runner=V2_ASYNC, probe_share=0),
    )
    llm = vllm.LLM(
        str(embedded.MODEL), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=samples,
        max_num_batched_tokens=8192, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False,
        logprobs_mode="processed_logprobs", worker_extension_cls=WORKER_EXTENSION,
        **speculation_arguments(settings),
    )  # fmt: skip
    core: Any = llm.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    watch, texts = Watch(), responses(samples)
    number = dict[str, int]()
    step: list[Any] = [None]

    def launched(self: Any, *args: Any, **named: Any) -> None:
        if watch.now is not None:
            watch.now["launches"] += 1

    def sample(hidden_states: Any, batch: Any, grammar: Any) -> Any:
        drafts = drafts_of(step[0]).tokens()
        drafted = dict(zip(step[0].scheduled_spec_decode_tokens, drafts, strict=True))
        rows, counts = torch.zeros(batch.num_reqs, runner.num_speculative_steps + 1, dtype=torch.int64), []
        for place, name in enumerate(batch.req_ids):
            done = written[name]
            text = texts[number.setdefault(name, len(number))]
            draft = drafted.get(name, [])
            right = 0
            while right < len(draft) and done + right < len(text) and draft[right] == text[done + right]:
                right += 1
            new = text[done : done + right + 1] or [WORDS[0]]
            rows[place, : len(new)] = torch.tensor(new)
            counts.append(len(new))
            written[name] += len(new)
        sampled = torch.tensor(counts, dtype=torch.int32)
        return SamplerOutput(rows, None, None, sampled, sampled), sampled, sampled

    written: dict[str, int] = defaultdict(int)

    def forward(*args: Any, **named: Any) -> Any:
        watch.ended(sum(map(len, step[0].scheduled_spec_decode_tokens.values())))
        return torch.zeros(len(named["positions"]), 8)

    InterpretedFunction.run = launched
    runner.sample = sample
    runner.model = Called(forward)
    for part, methods in PARTS.items():
        for method in methods:
            watch.times(runner, method, part)
    watch.times(runner.block_tables, "apply_staged_writes", "state")
    # A GPU's attention has another one; kernels beside it would need real tables.
    runner.model_state.prepare_attn = lambda *args, **named: {}
    fill, execute, awaited = scheduler.fill, runner.execute_model, late_drafts.awaited

    def waited(before: Any) -> Any:
        watch.began()
        return awaited(before)

    def filled(output: Any, sampled: Callable[[], Any]) -> Any:
        found = fill(output, sampled)
        watch.filled = time.thread_time()
        return found

    def executed(output: Any, *more: Any, **named: Any) -> Any:
        step[0] = output
        return execute(output, *more, **named)

    scheduler.fill, runner.execute_model, late_drafts.awaited = filled, executed, waited
    prompts = [[WORDS[(11 * n + 7 * place) % len(WORDS)] for place in range(PROMPT_TOKENS)] for n in range(samples)]
    with tempfile.TemporaryDirectory() as folder:
        for n, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            old = [WORDS[token % len(WORDS)] if place % WRONG == 0 else token for place, token in enumerate(text)]
            path = Path(folder) / str(n)
            build_index([Piece(prompt, old, 1.0)]).tofile(path)
            if refused := core.rhyme_scheduler("install_history", [str(n), str(path)]):
                raise SystemExit(refused)
    parameters = [
        vllm.SamplingParams(
            temperature=1, max_tokens=TOKENS, ignore_eos=True, detokenize=False, extra_args={PROMPT_KEY: str(n)}
        )
        for n in range(samples)
    ]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    counted = [one for one in watch.steps[WARM_UP:-WARM_UP] if one["drafts"]]
    found = {name: statistics.median(one.get(name, 0.0) for one in counted) for name in COLUMNS}
    return found | {"steps": len(counted)}


class Called:
    """A model that is a function."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward, self.compute_logits = forward, None

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._forward(*args, **named)


def main() -> int:
    """Print a line for each number of samples and round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", default="", help="a folder with Triton's package, if Python has none")
    parser.add_argument("--running", nargs="+", type=int, default=(8, 32, 128, 512))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", help="another checkout of the repository, measured in turn")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print("RESULT " + json.dumps(measured(chosen.one)))
        return 0
    quiet = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1",
        "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1",
    }  # fmt: skip
    checkouts = {"this": str(Path(__file__).resolve().parents[1])} | (
        {"other": chosen.against} if chosen.against else {}
    )
    print("| running | checkout |", " | ".join(COLUMNS), "|", flush=True)
    for running, _, (name, checkout) in itertools.product(chosen.running, range(chosen.rounds), checkouts.items()):
        paths = [checkout, os.environ.get("PYTHONPATH", ""), chosen.triton]
        environment = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, __file__, "--one", str(running)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(f"{running} samples failed:\n{done.stderr[-6000:]}")
        found = json.loads(lines[-1].removeprefix("RESULT "))
        said = [found[name] if name in ("launches", "drafts") else 1e6 * found[name] for name in COLUMNS]
        print(f"| {running} | {name} |", " | ".join(f"{value:,.0f}" for value in said), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
