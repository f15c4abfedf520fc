"""Few matrix shapes on CPU: token counts are padded before vLLM's oneDNN matrix products.

oneDNN builds a kernel for every number of rows that it has not kept. vLLM 0.29.0 and 0.32.0 keep 32 a layer
(model_executor/layers/utils.py). Plain decoding has a row for each running sample and seldom changes their number. A
step that verifies drafts has another number of rows every time. On a small model, building kernels then takes longer
than using them.

Invariants:

- On a GPU nothing is touched (PlatformError).
- The requested rows are computed as before; padding rows are zeros and cut off again.
- Up to MOST_ROWS tokens there are never more shapes than vLLM keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm._custom_ops as custom_ops

from rhyme_openrlhf.platform import require_no_gpu

# (up to this many rows, padded to a multiple of this): 16 + 12 + 4 shapes. At worst 15 rows of 16, and from 256 rows
# on a quarter, are padding.
STEPS = ((256, 16), (1024, 64), (2048, 256))
# vLLM's default number of tokens a step on CPU; beyond it (one long prefill) building a kernel does not matter.
MOST_ROWS = STEPS[-1][0]


def padded_rows(rows: int) -> int:
    """Return the number of rows computed for `rows` rows."""
    for limit, multiple in STEPS:
        if rows <= limit:
            return -(-rows // multiple) * multiple
    return rows


def all_sizes() -> tuple[int, ...]:
    """Return every number of rows that is computed, up to MOST_ROWS."""
    return tuple(sorted({padded_rows(rows) for rows in range(1, MOST_ROWS + 1)}))


def apply() -> None:
    """Pad the rows of vLLM's oneDNN products in this process. Idempotent."""
    require_no_gpu("padding for oneDNN")
    original = custom_ops.onednn_mm
    if getattr(original, "pads", False):
        return

    def onednn_mm(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        missing = padded_rows(rows) - rows
        if not missing:
            return original(handler, x, bias)
        out = original(handler, torch.nn.functional.pad(flat, (0, 0, 0, missing)), bias)
        return out[:rows].reshape(*x.shape[:-1], out.shape[-1])

    onednn_mm.pads = True  # type: ignore[attr-defined]
    custom_ops.onednn_mm = onednn_mm
