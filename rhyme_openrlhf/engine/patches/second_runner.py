"""A patch: vLLM's second model runner verifies the drafts that our scheduler sets.

vLLM's model runner V2 keeps draft tokens on the device, where its own speculators write them. Of the scheduler's drafts
V2 reads the lengths alone. `apply` lets V2 take the speculation method of the source "history" ("custom_class"), whose
speculator proposes nothing. It has each step's draft tokens written to the device before the forward pass: one copy of
int64[samples that draft, longest draft].

V2 replays one CUDA graph for a decode step only where all samples have the longest draft, which hardly ever is. Its
graphs for steps with drafts of any lengths are made for adaptive verification (DSpark). `apply` has them made for our
drafts too, where attention can be captured so. Elsewhere graphs are PIECEWISE, as for V1.

With asynchronous scheduling V2 updates its request states (`update_ahead`) while the step before computes. So a GPU
does not wait for that.

V2's profile run, by which the KV cache is sized, has a row for each sample. `apply` adds the rows of drafts on a GPU.
V2 verifies them in chunks, so it needs their logits and a copy of one chunk in 32 bits.

Scheduling stays synchronous, because the scheduler drafts from tokens that it must know (late_drafts.py has the other
way).

Invariant: without drafts a step is vLLM's own.
Checked against vLLM 0.29.0 `v1/worker/gpu/model_runner.py` (initialize_kv_cache, execute_model, prepare_inputs,
profile_run), `v1/worker/gpu/spec_decode/rejection_sampler.py` (MAX_CHUNK_BYTES),
`v1/worker/gpu/cudagraph_utils.py` (varlen_decode), `v1/worker/gpu/states.py` (draft_tokens),
`v1/worker/gpu/spec_decode/__init__.py` and `config/vllm.py` (_get_v2_model_runner_unsupported_features); contract test:
`tests/engine/patches/test_second_runner.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from rhyme_openrlhf.drafting.planner import Cut
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.engine.rows import most_rows, profiled_rows

METHOD = "custom_class"
# Where a step has its drafts as arrays (`Cut`), if its lists of tokens have the lengths alone.
DRAFTS = "rhyme_drafts"
REFUSED = f"speculative method '{METHOD}'"
# What V2 does first with a step, which needs no drafts; and where a step says that it is done.
UPDATES = ("finish_requests", "free_states", "add_requests", "update_requests")
UPDATED = "rhyme_updated"


class NoProposals:
    """A speculator that proposes no draft token."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, *more: Any) -> None:
        self._tokens, self._device = vllm_config.num_speculative_tokens, device

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Make nothing: there is no forward pass."""

    def capture(self) -> None:
        """Capture nothing: there is no forward pass."""

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what stands in the place of proposals: int64[requests, tokens] of zeros."""
        return torch.zeros(input_batch.num_reqs, self._tokens, dtype=torch.int64, device=self._device)


def drafts_of(step: Any) -> Cut:
    """Return the drafts of a scheduled step, in the order of its `scheduled_spec_decode_tokens`."""
    found: Cut | None = getattr(step, DRAFTS, None)
    return found or Cut(*core.flatten(list(step.scheduled_spec_decode_tokens.values())))


def draft_rows(drafts: Cut) -> NDArray[np.int64]:
    """Return int64[drafts, longest] of tokens, with zeros behind shorter drafts."""
    rows = np.zeros((drafts.lengths.size, drafts.lengths.max(initial=0)), np.int64)
    rows[np.arange(rows.shape[1]) < drafts.lengths[:, None]] = drafts.flat
    return rows


def write_drafts(state: Any, step: Any) -> None:
    """Write the step's draft tokens to the runner's request state."""
    if names := step.scheduled_spec_decode_tokens:
        rows = np.fromiter(map(state.req_id_to_index.__getitem__, names), np.int64, len(names))
        tokens = draft_rows(drafts_of(step))
        device = state.draft_tokens.device
        index = torch.from_numpy(rows).to(device, non_blocking=True)
        state.draft_tokens[index, : tokens.shape[1]] = torch.from_numpy(tokens).to(device, non_blocking=True)


@torch.inference_mode()
def update_ahead(runner: Any, step: Any) -> None:
    """Update the runner's request states by a scheduled step, before its drafts are known. No step comes between."""
    for name in UPDATES:
        getattr(runner, name)(step)
    runner.block_tables.apply_staged_writes()
    setattr(step, UPDATED, True)


def _once(update: Any) -> Any:
    @functools.wraps(update)
    def updated(self: Any, scheduler_output: Any) -> None:
        if not getattr(scheduler_output, UPDATED, False):
            update(self, scheduler_output)

    return updated


def is_ours(vllm_config: Any) -> bool:
    """Return whether an engine drafts by the source "history"."""
    return getattr(vllm_config.speculative_config, "method", "") == METHOD


def take_rows(runner: Any, hidden_states: torch.Tensor) -> None:
    """Take the memory, for a moment, that the logits of a step with as many drafts as there may be need.

    That is `rows.reserved_bytes`. `hidden_states`: [samples, hidden size].
    """
    most, samples = most_rows(runner.vllm_config), hidden_states.shape[0]
    if most is not None:
        rows = profiled_rows(most, samples, runner.vllm_config.num_speculative_tokens)
        made = hidden_states[:1].expand(rows, -1).contiguous()
        logits = runner.model.compute_logits(made)
        # Of a chunk of the verification.
        logits[: rejection_sampler.get_max_chunk_logits(logits.shape[1])].to(torch.float32, copy=True)


class Graphs:
    """The maker of an engine's CUDA graphs: vLLM's `ModelCudaGraphManager` (`make`), told of drafts of any length.

    vLLM resolves the mode by what its attention backend can be captured with, and makes the graphs right after.
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self.any_length = False

    def resolves(self, support: AttentionCGSupport) -> None:
        """Note what attention of the engine can be captured with."""
        self.any_length = support == AttentionCGSupport.ALWAYS

    def __call__(self, vllm_config: Any, device: torch.device, mode: CUDAGraphMode, *more: Any, **named: Any) -> Any:
        """Make the graphs of an engine."""
        if is_ours(vllm_config) and mode == CUDAGraphMode.FULL_AND_PIECEWISE:
            named["varlen_decode"] = self.any_length
            if not self.any_length:
                mode = vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
        return self._make(vllm_config, device, mode, *more, **named)


def apply() -> None:
    """Let V2 run the source "history", in this process; once."""
    from vllm.v1.worker.gpu import model_runner

    if getattr(VllmConfig, "rhyme_second_runner", False):
        return
    asked, made, gathered, prepared, sampled, resolved = (
        VllmConfig._get_v2_model_runner_unsupported_features,
        model_runner.init_speculator,
        model_runner.GPUModelRunner.gather_batch_req_state,
        model_runner.GPUModelRunner.prepare_inputs,
        model_runner.GPUModelRunner._dummy_sampler_run,
        CompilationConfig.resolve_cudagraph_mode_and_sizes,
    )
    graphs = Graphs(model_runner.ModelCudaGraphManager)

    @functools.wraps(asked)
    def unsupported(self: Any) -> list[str]:
        return [feature for feature in asked(self) if feature != REFUSED]

    @functools.wraps(made)
    def speculator(vllm_config: Any, device: torch.device, *more: Any, **named: Any) -> Any:
        return (NoProposals if is_ours(vllm_config) else made)(vllm_config, device, *more, **named)

    @functools.wraps(gathered)
    def gather(self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        # Right behind the update of the request states, and before anything reads the drafts.
        if not dummy_run and isinstance(self.speculator, NoProposals):
            write_drafts(self.req_states, scheduler_output)
        return gathered(self, scheduler_output, dummy_run)

    @functools.wraps(prepared)
    def prepare(self: Any, scheduler_output: Any, batch_state: Any, description: Any, *more: Any, **named: Any) -> Any:
        # vLLM 0.32.0 gives it the number of active LoRA adapters, too.
        batch = prepared(self, scheduler_output, batch_state, description, *more, **named)
        if isinstance(self.speculator, NoProposals):
            # Attention plans a replay as it planned the capture.
            batch.max_query_len = description.max_query_len
        return batch

    @torch.inference_mode()
    @functools.wraps(sampled)
    def sample_dummies(self: Any, hidden_states: torch.Tensor) -> None:
        sampled(self, hidden_states)
        if isinstance(self.speculator, NoProposals):
            take_rows(self, hidden_states)

    @functools.wraps(resolved)
    def resolve(self: Any, min_cg_support: AttentionCGSupport, *more: Any, **named: Any) -> CUDAGraphMode:
        graphs.resolves(min_cg_support)
        return resolved(self, min_cg_support, *more, **named)

    VllmConfig._get_v2_model_runner_unsupported_features = unsupported
    model_runner.init_speculator = speculator
    for name in UPDATES:
        setattr(model_runner.GPUModelRunner, name, _once(getattr(model_runner.GPUModelRunner, name)))
    model_runner.GPUModelRunner.gather_batch_req_state = gather
    model_runner.GPUModelRunner.prepare_inputs = prepare
    model_runner.GPUModelRunner._dummy_sampler_run = sample_dummies
    model_runner.ModelCudaGraphManager = graphs
    CompilationConfig.resolve_cudagraph_mode_and_sizes = resolve
    VllmConfig.rhyme_second_runner = True
