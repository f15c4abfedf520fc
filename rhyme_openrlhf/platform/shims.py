"""Let OpenRLHF import and run in a process without CUDA.

OpenRLHF 0.11.2 imports flash_attn at the top of `models/ring_attn_utils.py` and calls a handful of `torch.cuda`
functions that raise without a device. `install()` registers an import hook: the first import of `flash_attn` gets
small equivalents in pure torch, and patches those `torch.cuda` functions. So a process that never touches OpenRLHF
pays nothing, and one that does is patched before its first use.

Invariants: a real flash_attn wins; nothing is patched where a GPU is (PlatformError); `install()` may be called any
number of times. Checked against OpenRLHF 0.11.2 and torch 2.13.0 (`tests/platform/test_shims.py`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from rhyme_openrlhf.platform import require_no_gpu

# The modules OpenRLHF imports names from. Anything else below flash_attn raises ImportError, which OpenRLHF handles
# (models/utils.py falls back to torch's own log-softmax when flash_attn.ops is missing).
_MODULES = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")


class _CpuDevice(str):
    """The return value of `torch.cuda.current_device()` here: the device "cpu", for any call.

    It formats as "0" because OpenRLHF's replay buffer builds `torch.device(f"cuda:{current_device()}")`, an object
    it constructs but never places a tensor on while it trains.
    """

    def __new__(cls) -> _CpuDevice:
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"


class _FlashAttnFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `_MODULES` when no real flash_attn is installed (it is asked last)."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        require_no_gpu("the stand-in for flash_attn")
        patch_torch_cuda()
        if module.__name__ == "flash_attn.bert_padding":
            module.__dict__.update(_padding_functions())
        elif module.__name__ == "flash_attn.utils.distributed":
            module.__dict__["all_gather"] = _no_ring_attention


def install() -> None:
    """Register the import hook. Cheap: imports neither torch nor OpenRLHF."""
    if not any(isinstance(finder, _FlashAttnFinder) for finder in sys.meta_path):
        sys.meta_path.append(_FlashAttnFinder())


def patch_torch_cuda() -> None:
    """Replace the `torch.cuda` functions OpenRLHF calls outside any guard by ones that do nothing on a CPU."""
    require_no_gpu("the torch.cuda stand-in")
    import torch

    torch.cuda.current_device = _CpuDevice
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, _do_nothing())


def _do_nothing() -> Callable[..., None]:
    """Return a new function that does nothing: torch.compile refuses one function under two names."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def _no_ring_attention(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("--ds.ring_attn_size above 1 needs flash-attn and GPUs")


def _padding_functions() -> dict[str, Any]:
    """Return the four functions of flash_attn.bert_padding that OpenRLHF imports, for tensors on the CPU."""
    import torch
    from einops import rearrange

    def index_first_axis(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return values[indices]

    def unpad_input(hidden: torch.Tensor, mask: torch.Tensor, unused_mask: torch.Tensor | None = None) -> tuple:
        lengths = mask.sum(dim=-1, dtype=torch.int32)
        indices = mask.flatten().nonzero().flatten()
        offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return rearrange(hidden, "b s ... -> (b s) ...")[indices], indices, offsets, int(lengths.max()), lengths

    def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        padded = hidden.new_zeros((batch * length, *hidden.shape[1:]))
        padded[indices] = hidden
        return rearrange(padded, "(b s) ... -> b s ...", b=batch)

    return {
        "index_first_axis": index_first_axis,
        "unpad_input": unpad_input,
        "pad_input": pad_input,
        "rearrange": rearrange,
    }
