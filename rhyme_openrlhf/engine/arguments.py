"""vLLM's engine arguments for our plug-ins: scheduler, worker extension, speculation, CUDA graphs, moves, profiling.

Invariants:
- Drafts are one-hot (greedy), for which vLLM's rejection sampling keeps the distribution.
- Model runner V1 schedules synchronously wherever an engine drafts by vLLM's own methods. Otherwise their drafts stay
  in the worker, where no scheduler can cut them. The second runner (V2) schedules asynchronously
  (patches/late_drafts.py).
- A draft model has the policy's tensor-parallel size, which vLLM demands.

Checked against vLLM 0.29.0 `config/speculative.py`, `config/vllm.py`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rhyme_openrlhf.engine.rows import graph_sizes, reserved_rows
from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import NGRAM, V1, V2_ASYNC, DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.engine import EngineSettings

# vLLM imports these by name, in the engine core's process and in the workers'. The extension adds to OpenRLHF's own.
SCHEDULER = "rhyme_openrlhf.engine.scheduler.engine_scheduler"
WORKER_EXTENSION = "rhyme_openrlhf.engine.worker.WorkerExtension"
PROPOSER = "rhyme_openrlhf.engine.proposers.NullProposer"
CONNECTOR = "rhyme_openrlhf.engine.profiling_connector"

# Keys of vLLM's `additional_config`. The first two hold the settings of an engine that speculates (HistoSpecSettings,
# DraftingSettings). PACE_KEY is the path of the profile whose times the engine keeps; MOVES_KEY: whether samples
# can move; RUNNER_KEY: the model runner, if it is the second.
SETTINGS_KEY = "rhyme_histospec"
DRAFTING_KEY = "rhyme_drafting"
PACE_KEY = "rhyme_emulate"
MOVES_KEY = "rhyme_moves"
RUNNER_KEY = "rhyme_runner"


def speculation_arguments(rhyme: RhymeSettings) -> dict[str, Any]:
    """Return the arguments that plug our scheduler in, with or without speculation."""
    own: dict[str, Any] = {PACE_KEY: rhyme.emulate.profile}
    if not rhyme.histospec.enable:
        return {"scheduler_cls": SCHEDULER, "additional_config": own}
    histospec, drafting = rhyme.histospec, rhyme.drafting
    if rhyme.run.reproducible:
        # How far other samples are depends on timing, and drafts decide which random numbers a sample draws.
        histospec = dataclasses.replace(histospec, siblings=False, shared_tokens=0)
        drafting = dataclasses.replace(drafting, probe_share=0)
    own |= {SETTINGS_KEY: dataclasses.asdict(histospec), DRAFTING_KEY: dataclasses.asdict(drafting)}
    if drafting.method:
        found = vllm_source_arguments(histospec, drafting)
        longest = int(found["speculative_config"]["num_speculative_tokens"])
        return found | {"additional_config": own} | graph_arguments(rhyme.engine, longest)
    more: dict[str, Any] = {}
    runner = drafting.model_runner
    if runner == V2_ASYNC:
        from rhyme_openrlhf.engine.patches import late_drafts

        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        own[RUNNER_KEY] = late_drafts.prepared(runner)
        more["async_scheduling"] = True
    return {
        "scheduler_cls": SCHEDULER,
        "additional_config": own,
        **more,
        **graph_arguments(rhyme.engine, histospec.window_max, runner),
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": rhyme.histospec.window_max,
        },
    }


def vllm_source_arguments(histospec: HistoSpecSettings, drafting: DraftingSettings) -> dict[str, Any]:
    """Return the arguments for drafts of vLLM's own methods, alone or together with history.

    Beside history, vLLM's longest draft may be history's. What the worker proposes in a step is shorter
    (scheduler_parts/drafting.py). Sets, for the processes that vLLM is about to start, which model runner they use.
    """
    longest = max(drafting.tokens, histospec.window_max) if drafting.from_history else drafting.tokens
    speculative: dict[str, Any] = {"method": drafting.method, "num_speculative_tokens": longest}
    if drafting.method == NGRAM:
        speculative |= {"prompt_lookup_max": histospec.prefix_max, "prompt_lookup_min": histospec.prefix_min}
    else:
        speculative |= {"model": drafting.model}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return {"scheduler_cls": SCHEDULER, "async_scheduling": False, "speculative_config": speculative}


def graph_arguments(engine: EngineSettings, drafts: int, runner: str = V1) -> dict[str, Any]:
    """Return the arguments for the CUDA graphs of an engine with drafts of up to `drafts` tokens; none without a GPU.

    There is a graph for every step of drafts, up to all rows that memory is reserved for. vLLM 0.29.0 has none beyond
    512 rows by default, which 512 samples fill without a draft.

    Their mode is for vLLM's first model runner (V1); the second has its own way (patches/second_runner.py).

    FULL graphs serve only steps in which every sample has the longest draft, of which recorded runs have 3 in 2,626
    (`benchmarks/graph_padding.py`). For their sake vLLM 0.29.0 rounds the sizes of all graphs up to multiples of the
    longest draft and one: a sample without drafts computes 33 rows. PIECEWISE graphs keep their sizes.
    """
    if not gpu_present():
        return {}
    rows = reserved_rows(engine.samples, drafts, engine.step_tokens)
    return {
        "compilation_config": {
            "cudagraph_mode": "PIECEWISE" if runner == V1 else "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": graph_sizes(rows),
        }
    }


def moving_arguments(rhyme: RhymeSettings) -> dict[str, Any]:
    """Return the arguments, beside `speculation_arguments`, of an engine whose samples can move.

    On a GPU without drafts, runner and scheduling are vLLM's own choice: in 0.29.0 V2, asynchronously. Elsewhere V1 is
    set for the processes that vLLM is about to start, unless drafts run on V2.
    """
    moving = {"additional_config": speculation_arguments(rhyme)["additional_config"] | {MOVES_KEY: True}}
    if not rhyme.histospec.enable and gpu_present():
        return moving
    runner = rhyme.drafting.model_runner
    if runner == V1:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return moving | {"async_scheduling": runner == V2_ASYNC}


def filling_arguments() -> dict[str, Any]:
    """Return the arguments of an engine that is to fill contexts instead of computing them."""
    return {
        "kv_transfer_config": {
            "kv_connector": "ProfilingConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
        }
    }
