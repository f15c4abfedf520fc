"""Give the memory of tensors back to the machine and take it again, where tensors lie in the machine's own memory.

vLLM's allocator does the same on a GPU for a KV cache that sleeps. The pages go back to the kernel, which puts zeros in
their place at the next write (madvise, MADV_DONTNEED). Addresses stay, so no other code has to change.
Invariant: a tensor's content is lost; a page that it shares with other tensors stays, with this tensor's part zeroed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch

from rhyme_openrlhf.platform import require_no_gpu


def release(tensors: Iterable[torch.Tensor]) -> int:
    """Give back what the storages of these tensors take; returns how many bytes. Raises OSError."""
    require_no_gpu("release")
    page, libc, released = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True), 0
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    for begin, size in storages.items():
        first, end = -(-begin // page) * page, (begin + size) // page * page
        if end <= first:
            ctypes.memset(begin, 0, size)
            continue
        ctypes.memset(begin, 0, first - begin)
        ctypes.memset(end, 0, begin + size - end)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        released += end - first
    return released
