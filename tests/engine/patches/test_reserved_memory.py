"""A memory plan's formula against the bytes of logits that vLLM's model runners allocate.

The profile run of each runner goes over tensors without content (torch's fake tensors), so a whole vocabulary fits
here. Kernels are left out: they allocate nothing. A GPU masks top-p in place (vLLM's Triton kernel).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.sample.ops.topk_topp_sampler as first_top_p
import vllm.v1.sample.rejection_sampler as first_verification
import vllm.v1.sample.sampler as first_sampler
import vllm.v1.worker.gpu.sample.logprob as second_logprobs
import vllm.v1.worker.gpu.spec_decode.rejection_sampler as second_verification
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler as SecondSampler

from rhyme_openrlhf.engine import rows
from rhyme_openrlhf.engine.patches import rejection_sampling, second_runner
from rhyme_openrlhf.settings.drafting import V1, V2_ASYNC

VOCABULARY, WIDTH = 151_936, 8
# Samples, longest draft, and rows of a step: those of rows.reserved_rows, and steps without drafts.
SIZES = [(128, 32, 1024), (256, 32, 2048), (512, 32, 2048), (16, 32, 512), (4, 32, 132), (128, 2, 384), (128, 8, 128)]


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are still referred to, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                weakref.finalize(storage, self._free, storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return output

    def _free(self, size: int) -> None:
        self.now -= size


class NoKernel:
    """A kernel that does nothing; from vLLM 0.32 on, the function that stands before one."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        pass

    def register_warmup(self, *args: Any, **named: Any) -> None:
        pass


def in_place(logits: torch.Tensor, *more: Any) -> torch.Tensor:
    """Stand for what kernels of sampling parameters do."""
    return logits


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("rejection_greedy_sample", "rejection_random_sample", "expand", "sample_recovered_tokens"):
        stands = f"_{kernel}" if hasattr(first_verification, f"_{kernel}") else f"{kernel}_kernel"
        monkeypatch.setattr(first_verification, stands, NoKernel())
    for module in (first_verification, first_top_p):
        monkeypatch.setattr(module, "apply_top_k_top_p", lambda logits, k, p: logits)
    # torch.compile makes one kernel of it on a GPU.
    counted = first_sampler, "batched_count_greater_than"
    monkeypatch.setattr(*counted, lambda values, least: values.new_zeros(len(values), dtype=torch.int64))
    for kernel in ("_topk_log_softmax", "_ranks"):
        monkeypatch.setattr(second_logprobs, f"{kernel}_kernel", NoKernel())
    # Without Triton vLLM has a module of that name with few functions.
    monkeypatch.setattr(second_logprobs.triton, "next_power_of_2", lambda size: size, raising=False)
    monkeypatch.setattr(second_verification, "_flatten_sampled_kernel", NoKernel())


def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(len(hidden), VOCABULARY)


MODEL = SimpleNamespace(compute_logits=compute_logits)


def profile_first(hidden: torch.Tensor, drafts: int, count: int) -> None:
    sampler = Sampler(logprobs_mode="processed_logprobs")
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    verifies = rejection_sampling.ComputedRowsSampler(sampler)
    runner = SimpleNamespace(num_spec_tokens=drafts, model=MODEL, rejection_sampler=verifies)
    rejection_sampling.verify_dummies(runner, hidden, count)


def profile_second(hidden: torch.Tensor, drafts: int, count: int) -> None:
    config = SimpleNamespace(num_speculative_tokens=drafts)
    second_runner.take_rows(SimpleNamespace(vllm_config=config, model=MODEL), hidden)


def verify_second(hidden: torch.Tensor, drafts: int, count: int) -> None:
    """Verify a step of vLLM's with as many rows as there may be, whose logits every sampling parameter changes."""
    samples = len(hidden)
    sampler = SimpleNamespace(
        logprobs_mode="processed_logprobs", needs_logits_processing=np.ones(samples, np.bool_), use_fp64_gumbel=False,
        return_sampling_mask=False, logits_processors=[],
        sampling_states=SimpleNamespace(
            temperature=SimpleNamespace(gpu=None), seeds=SimpleNamespace(gpu=None), apply_top_k_top_p=in_place,
            apply_temperature=in_place, apply_min_p=in_place,
        ),
        logit_bias_state=SimpleNamespace(apply_logit_bias=in_place),
        penalties_state=SimpleNamespace(apply_penalties=in_place),
        bad_words_state=SimpleNamespace(apply_bad_words=in_place),
        thinking_budget_state=SimpleNamespace(apply=in_place),
    )  # fmt: skip
    sampler.apply_sampling_params = SecondSampler.apply_sampling_params.__get__(sampler)
    settings = SimpleNamespace(
        num_speculative_tokens=drafts, enable_adaptive_verification=False, rejection_sample_method="standard"
    )
    verifies = second_verification.RejectionSampler(sampler, settings, torch.device("cpu"))
    ends = np.linspace(0, count, samples + 1).astype(np.int64)
    index = torch.zeros(count, dtype=torch.int32)
    batch = SimpleNamespace(
        num_reqs=samples, cu_num_logits_np=ends, cu_num_logits=torch.zeros(samples + 1, dtype=torch.int32),
        idx_mapping=index[:samples], idx_mapping_np=np.arange(samples), expanded_idx_mapping=index,
        expanded_local_pos=index, seq_lens_cpu_upper_bound=SimpleNamespace(numpy=lambda: np.zeros(samples)),
    )  # fmt: skip
    logits = compute_logits(hidden[:1].expand(count, -1))
    chunk = second_verification.get_max_chunk_logits(VOCABULARY)
    verifies._verify_in_chunks(logits, batch, None, index, index, chunk, 0)


@pytest.mark.parametrize(("samples", "drafts", "most"), SIZES)
@pytest.mark.parametrize(
    ("runner", "run"), [(V1, profile_first), (V2_ASYNC, profile_second), (V2_ASYNC, verify_second)]
)
def test_the_plan_has_what_is_allocated(
    runner: str, run: Any, samples: int, drafts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_runner, "most_rows", lambda config: most)

    def sampled(target: torch.Tensor, *more: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        requests = len(more[2]) - 1
        return target.new_zeros(requests, drafts + 1, dtype=torch.int64), target.new_zeros(requests, dtype=torch.int32)

    monkeypatch.setattr(second_verification, "rejection_sample", sampled)
    count = rows.profiled_rows(most, samples, drafts)
    with torch.inference_mode(), FakeTensorMode():
        hidden = torch.empty(samples, WIDTH, dtype=torch.bfloat16)
        with Allocated() as allocated:
            run(hidden, drafts, count)
    planned = rows.reserved_bytes(count, samples, VOCABULARY, runner)
    # Beside logits there are a few numbers for each row. A chunk ends with a whole sample.
    assert planned * (0.95 if run is verify_second else 1) <= allocated.most <= planned * 1.001
    # All of it is free again.
    assert allocated.now < planned / 1000


def test_chunks_are_vllms() -> None:
    assert rows.CHUNK_BYTES == second_verification.MAX_CHUNK_BYTES
    assert rows.SAMPLER_BYTES == second_verification._FP32_BYTES
