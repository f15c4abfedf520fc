"""A correction of vLLM's rejection sampling on CPU, applied only where a self-check shows it is needed.

The CPU stand-in for `expand_kernel` (vllm/utils/cpu_triton_utils.py) writes into a temporary int64 copy of its output.
At temperature above 0, draft rows then use uninitialised temperature and top-p, and drafted tokens are accepted far
too often. `apply()` replaces the one function `expand_batch_to_tokens` by the same thing in plain torch.

Checked against vLLM 0.29.0 and 0.32.0; both need the correction.

Invariants:

- On a GPU nothing is touched (PlatformError).
- Where the installed vLLM passes the self-check, nothing is replaced.
- After `apply()` the self-check holds, or SamplingCheckError is raised and the engine does not start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import vllm.utils.cpu_triton_utils as cpu_kernels
import vllm.v1.sample.rejection_sampler as rejection_sampler

from rhyme_openrlhf.platform import require_no_gpu


class SamplingCheckError(RuntimeError):
    """vLLM's CPU sampling expands per-request parameters wrongly and the correction did not help."""


def expand_batch_to_tokens(
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat `values[i]` ([batch]) for each draft token of request i; returns [num_tokens].

    `cu_num_tokens` ([batch]) is the cumulative number of draft tokens; values equal to `replace_from` become
    `replace_to`. Same contract as the function of this name in vllm/v1/sample/rejection_sampler.py.
    """
    ends = cu_num_tokens.to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    expanded = torch.repeat_interleave(values, counts, output_size=num_tokens)
    if replace_from == replace_to:
        return expanded
    return torch.where(expanded == replace_from, torch.full_like(expanded, replace_to), expanded)


def expand_by_vllm(
    values: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Do as `expand_batch_to_tokens`, by vLLM's stand-in for its Triton kernel.

    vLLM has the sampler call the stand-in later than `apply` asks, and each version has another way to do so.
    """
    expanded = values.new_full((num_tokens,), -1)
    cpu_kernels._expand_kernel_impl(expanded, values, cu_num_tokens, replace_from, replace_to, num_tokens)
    return expanded


def self_check(expand: Callable[..., torch.Tensor]) -> bool:
    """Return whether `expand` expands a known input correctly (ints, floats, replacement)."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperatures = torch.tensor([0.7, 1.3, 0.0], dtype=torch.float32)
    expected = torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0])
    top_k = torch.tensor([3, 4, 5], dtype=torch.int32)
    floats = expand(temperatures, ends, 5, replace_from=0, replace_to=1)
    ints = expand(top_k, ends, 5)
    return torch.allclose(floats.float(), expected) and ints.tolist() == [3, 3, 5, 5, 5]


def apply() -> bool:
    """Make CPU rejection sampling correct in this process; returns whether vLLM's own is wrong. Idempotent.

    Raises SamplingCheckError when the self-check fails even after the replacement.
    """
    require_no_gpu("the CPU sampling correction")
    if self_check(expand_by_vllm):
        return False
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    if not self_check(rejection_sampler.expand_batch_to_tokens):
        raise SamplingCheckError(
            "speculative sampling on this CPU build of vLLM is wrong and could not be corrected; "
            "run with --no-histospec.enable, and with the vLLM version that OpenRLHF pins"
        )
    return True
