"""Cost of everything around the forward pass of a decode step: vLLM's scheduler, and ours on top of it.

    python benchmarks/step_overhead.py --running 16 64 256 --against CHECKOUT --out step_overhead.json

Measured: vLLM's real scheduler with our plug-ins (engine/scheduler.py), fed with the output of an imagined model
runner. The recorded run of benchmarks/data gives each sample's response, so drafts are accepted like there, but no
model computes. So a step is the engine core's work beside the forward pass, in microseconds: `schedule`,
`update_from_output` and `update_draft_token_ids`. Between two of these calls MODEL_BYTES of memory are read, as a
forward pass does, so that the caches hold what they would in a run.

Arms: "vllm" (its scheduler, no drafts), "metered" (ours, speculation off), "rules" (drafts by the fixed rules),
"planned" (drafts cut by a profile's step times, as a run does). With "-late" drafts fill steps that are scheduled
already (--drafting.runner v2-async): a device waits for `drafts` alone, and the rest is done beside the forward pass.
Each arm is measured in processes of its own, in turn.
`--against` adds the same arms of another checkout of the repository. Samples are kept running by starting the next one
for each that finishes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

LATE = "-late"
ARMS = ("vllm", "metered", "rules", "planned", "rules" + LATE, "planned" + LATE)
PARTS = ("schedule", "update", "drafts")
# Weights of a small model in float32: more than a core's own caches hold.
MODEL_BYTES = 8 << 20
# Steps before any are counted: all samples have begun, and what is compiled at first use is.
WARM_UP = 30
# Of a step on the machine of docs/measurements/drafts.md: alone, to verify at all, and for each token (seconds).
STEP, VERIFY, ROW = 0.0075, 0.0015, 0.00007
PROMPT_TOKENS = 48
MODEL_TOKENS = 640
END = 0


def profile_text() -> str:
    """Return a profile of such steps."""
    from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject, to_text

    points = tuple(
        StepPoint(b, b * each, b * n, STEP + VERIFY * (n > 0) + ROW * b * (1 + n) + 1e-7 * b * each, 0.0001, 20)
        for b in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for each in (32, 256, 1024)
        for n in (0, 1, 3, 7, 15)
    )
    return to_text(
        Profile(
            subject=Subject("benchmark", "benchmark", "float32", 1),
            origin="derived",
            steps=points,
            prefills=(),
            padded_rows=(16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
            kv_cache_tokens=1 << 20,
            kv_bytes_per_token=2048,
            kv_bytes_per_second=1e9,
            weight_load_seconds=0.1,
            versions={},
            notes=("made by a formula",),
        )
    )


def scheduler_of(
    arm: str, running: int, length: int = MODEL_TOKENS, drafting: Any = None, asynchronous: bool = False
) -> Any:
    """Return the arm's scheduler, for this many samples of at most `length` tokens, and its DraftingSettings."""
    os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    import torch
    import vllm
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from rhyme_openrlhf import embedded, platform
    from rhyme_openrlhf.engine.arguments import speculation_arguments
    from rhyme_openrlhf.settings.config import RhymeSettings
    from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings

    settings = RhymeSettings(
        histospec=HistoSpecSettings(enable=arm in ("rules", "planned")), drafting=drafting or DraftingSettings()
    )
    arguments = {
        "model": str(embedded.MODEL),
        "max_model_len": length,
        "max_num_seqs": running,
        "max_num_batched_tokens": 8192,
        "enforce_eager": True,
        **speculation_arguments(settings),
    }
    if not platform.gpu_present():
        from rhyme_openrlhf.platform.cpu_arguments import cpu_engine_arguments

        arguments = cpu_engine_arguments(arguments, settings.cpu)
    config = vllm.EngineArgs(**arguments).create_engine_config()
    block = config.cache_config.block_size
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)
    blocks = running * (length // block + 2) + 64
    config.cache_config.num_gpu_blocks = blocks
    if asynchronous:
        # As on a GPU; the CPU platform has them otherwise.
        config.scheduler_config.async_scheduling = True
        config.parallel_config.distributed_executor_backend = "uni"
    cls = (
        resolve_obj_by_qualname("vllm.v1.core.sched.scheduler.Scheduler")
        if arm == "vllm"
        else resolve_obj_by_qualname(arguments["scheduler_cls"])
    )
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        log_stats=False,
    )


def from_device(output: Any) -> Any:
    """Return a step's output as the second model runner has it: rows with room for the longest draft."""
    from rhyme_openrlhf.settings.drafting import HistoSpecSettings

    counts = np.fromiter(map(len, output.sampled_token_ids), np.int32, len(output.req_ids))
    rows = np.full((counts.size, 1 + HistoSpecSettings().window_max), -1, np.int64)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = np.concatenate(output.sampled_token_ids)
    return SimpleNamespace(
        copy_event=SimpleNamespace(synchronize=lambda: None),
        num_sampled_tokens_np=counts,
        sampled_token_ids=rows,
        model_runner_output=output,
    )


class Load:
    """The samples of a recorded run's later epochs, with the history of the epoch before them."""

    def __init__(self) -> None:
        from replay import TRACE, read_trace

        from rhyme_openrlhf.history.index import build_index

        # The steps of two neighbouring epochs hold the same prompts: six epochs of two steps.
        steps = read_trace(TRACE)
        history, now = [*steps[4], *steps[5]], [*steps[6], *steps[7]]
        self.indexes = {record.prompt_key: build_index(record.pieces) for record in history}
        self._samples = []
        for number in range(max(len(record.pieces) for record in now)):
            for record in now:
                piece = record.pieces[number % len(record.pieces)]
                context = [int(token) for token in piece.context]
                prompt = (context * PROMPT_TOKENS)[-PROMPT_TOKENS:]
                self._samples.append((record.prompt_key, prompt, [int(token) for token in piece.tokens]))
        self._next = 0

    def sample(self) -> tuple[str, list[int], list[int]]:
        """Return the next sample: its prompt's key, its prompt, its response."""
        self._next += 1
        return self._samples[(self._next - 1) % len(self._samples)]


class Run:
    """One arm at one load."""

    def __init__(self, arm: str, running: int) -> None:
        self.arm = arm
        self.running = running
        self.load = Load()
        self.late = arm.endswith(LATE)
        arm = arm.removesuffix(LATE)
        self.scheduler = scheduler_of(arm, running, asynchronous=self.late)
        self.longest = self.scheduler.num_spec_tokens
        self.drafting = arm in ("rules", "planned")
        # The step under way, and what it will have sampled.
        self.under_way: tuple[Any, Any] | None = None
        self.responses: dict[str, list[int]] = {}
        self.position: dict[str, int] = {}
        self.number = 0
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        cache = self.scheduler.vllm_config.cache_config
        hashing = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(cache.block_size, hashing)
        self.weights = np.ones(MODEL_BYTES // 8)
        self.tokens = self.sample_steps = 0
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        if self.drafting:
            with tempfile.TemporaryDirectory() as folder:
                for number, (key, index) in enumerate(self.load.indexes.items()):
                    path = Path(folder) / f"{number}"
                    index.tofile(path)
                    assert not self.scheduler.drafting.install_history(key, str(path))
        if arm == "planned":
            assert not self.scheduler.drafting.install_profile(profile_text())

    def add(self) -> None:
        """Start the next sample."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from rhyme_openrlhf.engine.requests import PROMPT_KEY

        key, prompt, response = self.load.sample()
        self.number += 1
        name = f"sample-{self.number}-0123456789abcdef"
        parameters = SamplingParams(temperature=1, max_tokens=len(response), extra_args={PROMPT_KEY: key})
        parameters.update_from_generation_config({}, eos_token_id=None)
        self.responses[name], self.position[name] = response, 0
        self.scheduler.add_request(Request(name, prompt, parameters, None, cache_salt=key, block_hasher=self.hasher))

    def output(self, scheduled: Any) -> Any:
        """Return the output that the model runner would return."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

        from rhyme_openrlhf.engine.patches.second_runner import drafts_of

        names = list(scheduled.num_scheduled_tokens)
        if self.late:
            # As the second model runner orders a step's requests.
            rooms = scheduled.scheduled_spec_decode_tokens
            names = sort_batch_req_ids(scheduled.num_scheduled_tokens, rooms, 1 + self.longest)
        drafts = dict(zip(scheduled.scheduled_spec_decode_tokens, drafts_of(scheduled).tokens(), strict=True))
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            if request is not None and request.is_prefill_chunk:
                # A part of its prompt is still to come.
                sampled.append([])
                continue
            response, at = self.responses[name], self.position[name]
            draft = drafts.get(name, ())
            accepted = 0
            while (
                accepted < len(draft)
                and at + accepted + 1 < len(response)
                and draft[accepted] == response[at + accepted]
            ):
                accepted += 1
            sampled.append(response[at : at + accepted + 1])
            self.position[name] = at + accepted + 1
            self.tokens += accepted + 1
        self.sample_steps += len(names)
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)

    def step(self) -> None:
        """Time one step."""
        from vllm.v1.outputs import DraftTokenIds

        clock = time.perf_counter
        while len(self.scheduler.requests) < self.running:
            self.add()
        self.weights.sum()
        began = clock()
        scheduled = self.scheduler.schedule()
        self.times["schedule"].append(clock() - began)
        if self.late:
            self.go_on(scheduled)
            return
        self.weights.sum()
        output = self.output(scheduled)
        began = clock()
        # vLLM asks for masks when the forward pass has begun.
        self.scheduler.get_grammar_bitmask(scheduled)
        self.scheduler.update_from_output(scheduled, output)
        self.times["update"].append(clock() - began)
        seconds = 0.0
        if self.drafting:
            ids = DraftTokenIds(output.req_ids, [[] for _ in output.req_ids])
            began = clock()
            self.scheduler.update_draft_token_ids(ids)
            seconds = clock() - began
        self.times["drafts"].append(seconds)

    def go_on(self, scheduled: Any) -> None:
        """Fill a scheduled step, and take in the one before it."""
        clock = time.perf_counter
        from rhyme_openrlhf.engine.patches.late_drafts import NOTHING, tokens_of
        from rhyme_openrlhf.engine.patches.second_runner import draft_rows, drafts_of

        names = list(scheduled.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        copied = None if self.under_way is None else from_device(self.under_way[1])
        began = 0.0

        def sampled() -> Any:
            # What is done before waits for no device, and a device waits for what is done from here on.
            nonlocal began
            began = clock()
            self.times["schedule"][-1] += began - before
            return NOTHING if copied is None else tokens_of(copied)

        before = clock()
        step = self.scheduler.fill(scheduled, sampled)
        drafts = drafts_of(step)
        np.fromiter(map(places.__getitem__, step.scheduled_spec_decode_tokens), np.int64, drafts.lengths.size)
        draft_rows(drafts)
        self.times["drafts"].append(clock() - began)
        self.weights.sum()
        last, self.under_way = self.under_way, (scheduled, self.output(step))
        began = clock()
        self.scheduler.get_grammar_bitmask(step)
        if last is not None:
            self.scheduler.update_from_output(*last)
        self.times["update"].append(clock() - began)

    def measure(self, steps: int) -> dict[str, float]:
        """Medians of the parts in us, and tokens a sample got a step."""
        for _ in range(WARM_UP):
            self.step()
        for part in PARTS:
            self.times[part].clear()
        self.tokens = self.sample_steps = 0
        for _ in range(steps):
            self.step()
        found = {part: 1e6 * statistics.median(self.times[part]) for part in PARTS}
        found["all"] = 1e6 * statistics.median(map(sum, zip(*self.times.values(), strict=True)))
        found["tokens_per_step"] = self.tokens / self.sample_steps
        return found


def one(arm: str, running: int, steps: int) -> None:
    """Run the measuring process."""
    print("RESULT " + json.dumps(Run(arm, running).measure(steps)))


def measured(checkout: Path, arm: str, running: int, steps: int) -> dict[str, float]:
    """Measure in a process of its own, with the package of `checkout`."""
    # -P: what the benchmarks share comes from the checkout too, not from beside this file.
    command = [sys.executable, "-P", __file__, "--one", arm, "--running", str(running), "--steps", str(steps)]
    paths = os.pathsep.join(filter(None, [str(checkout), str(checkout / "benchmarks"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{arm} of {checkout} failed:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(lines[-1][len("RESULT ") :])
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256], help="samples an engine runs")
    parser.add_argument("--steps", type=int, default=400, help="steps counted in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--out", type=Path, default=Path("step_overhead.json"))
    parser.add_argument("--one", choices=ARMS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        one(chosen.one, chosen.running[0], chosen.steps)
        return
    here = Path(__file__).resolve().parents[1]
    checkouts = {"": here} | ({"against ": chosen.against.resolve()} if chosen.against else {})
    rows: dict[int, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(chosen.rounds):
        for running in chosen.running:
            for arm in chosen.arms:
                for name, checkout in checkouts.items():
                    if name and arm == "vllm":
                        continue
                    rows[running][name + arm].append(measured(checkout, arm, running, chosen.steps))
    chosen.out.write_text(json.dumps({"kind": "measured", "cpus": os.cpu_count(), "rows": rows}, indent=1) + "\n")
    print(f"{'running':8s}{'arm':18s}" + "".join(f"{part:>10s}" for part in (*PARTS, "all")) + "  tokens/step")
    for running, arms in rows.items():
        for arm, found in arms.items():
            medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
            cells = "".join(f"{medians[part]:10.0f}" for part in (*PARTS, "all"))
            print(f"{running:<8d}{arm:18s}{cells}{medians['tokens_per_step']:13.2f}")


if __name__ == "__main__":
    main()
