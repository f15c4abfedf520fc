"""vLLM's engine arguments for our plug-ins: scheduler, worker extension, speculation, CUDA graphs, moves, profiling.

Invariants: drafts are one-hot (greedy), for which vLLM's rejection sampling keeps the distribution; an engine that
drafts by vLLM's own methods, or whose samples move, is scheduled synchronously by model runner V1, because else drafts
stay in the worker and no scheduler can cut them, and because a scheduler that stops a sample must know every token.
(For `custom_class`, which history uses, vLLM chooses the same.) A draft model has the policy's tensor-parallel size,
which vLLM demands. Checked against vLLM 0.29.0 `config/speculative.py`, `config/vllm.py`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import NGRAM, VLLM_METHODS, DraftingSettings, HistoSpecSettings

# vLLM imports these by name, in the engine core's process and in the workers'. The extension adds to OpenRLHF's own.
SCHEDULER = "rhyme_openrlhf.engine.scheduler.engine_scheduler"
WORKER_EXTENSION = "rhyme_openrlhf.engine.worker.WorkerExtension"
PROPOSER = "rhyme_openrlhf.engine.proposers.NullProposer"
CONNECTOR = "rhyme_openrlhf.engine.profiling_connector"

# Of vLLM's `additional_config`: the fields of HistoSpecSettings and of DraftingSettings, of an engine that speculates;
# the path of the profile whose times the engine keeps; whether its samples can move; and whether it may rehearse.
SETTINGS_KEY = "rhyme_histospec"
DRAFTING_KEY = "rhyme_drafting"
PACE_KEY = "rhyme_emulate"
MOVES_KEY = "rhyme_moves"
REHEARSAL_KEY = "rhyme_rehearsal"


def speculation_arguments(rhyme: RhymeSettings) -> dict[str, Any]:
    """Return the arguments that plug our scheduler in, with or without speculation."""
    own: dict[str, Any] = {PACE_KEY: rhyme.emulate.profile}
    if not rhyme.histospec.enable:
        return {"scheduler_cls": SCHEDULER, "additional_config": own}
    histospec, drafting = rhyme.histospec, rhyme.drafting
    if rhyme.run.reproducible:
        # How far a sibling is depends on timing, and drafts decide which random numbers a sample draws.
        histospec = dataclasses.replace(histospec, siblings=False)
        drafting = dataclasses.replace(drafting, probe_share=0)
    own |= {SETTINGS_KEY: dataclasses.asdict(histospec), DRAFTING_KEY: dataclasses.asdict(drafting)}
    own |= {REHEARSAL_KEY: True} if rhyme.rehearsal.enable else {}
    if drafting.source in VLLM_METHODS:
        return vllm_source_arguments(histospec, drafting) | {"additional_config": own} | graph_arguments()
    return {
        "scheduler_cls": SCHEDULER,
        "additional_config": own,
        **graph_arguments(),
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": rhyme.histospec.window_max,
        },
    }


def vllm_source_arguments(histospec: HistoSpecSettings, drafting: DraftingSettings) -> dict[str, Any]:
    """Return the arguments for drafts of vLLM's own methods (`--drafting.source` ngram, draft_model, eagle3).

    Sets, for the processes that vLLM is about to start, which model runner they use.
    """
    speculative: dict[str, Any] = {"method": drafting.source, "num_speculative_tokens": drafting.tokens}
    if drafting.source == NGRAM:
        speculative |= {"prompt_lookup_max": histospec.prefix_max, "prompt_lookup_min": histospec.prefix_min}
    else:
        speculative |= {"model": drafting.model}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return {"scheduler_cls": SCHEDULER, "async_scheduling": False, "speculative_config": speculative}


def graph_arguments() -> dict[str, Any]:
    """Return the arguments for the CUDA graphs of an engine that drafts; none without a GPU.

    FULL graphs serve only steps in which every sample has the longest draft, of which recorded runs have 3 in 2,626
    (`benchmarks/graph_padding.py`). For their sake vLLM 0.29.0 rounds the sizes of all graphs up to multiples of the
    longest draft and one: a sample without drafts computes 33 rows. PIECEWISE graphs keep their sizes.
    """
    return {"compilation_config": {"cudagraph_mode": "PIECEWISE"}} if gpu_present() else {}


def moving_arguments(rhyme: RhymeSettings) -> dict[str, Any]:
    """Return the arguments, beside `speculation_arguments`, of an engine whose samples can move.

    Sets, for the processes that vLLM is about to start, that they use model runner V1: moves read its requests' states
    (engine/kv_copies.py), and V2, which vLLM 0.29.0 takes on a GPU without speculation, has others.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    own = speculation_arguments(rhyme)["additional_config"]
    return {"additional_config": own | {MOVES_KEY: True}, "async_scheduling": False}


def filling_arguments() -> dict[str, Any]:
    """Return the arguments of an engine that is to fill contexts instead of computing them."""
    return {
        "kv_transfer_config": {
            "kv_connector": "ProfilingConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
        }
    }
