"""A correction of vLLM for requests with a seed on CPU: no random number is drawn for a prompt chunk's unused sample.

A long prompt is prefilled in chunks. vLLM discards the token sampled after each chunk but the last, and then winds the
request's generator back by an offset. CPU generators have no offset, so the engine dies: RuntimeError, "CPU Generator
does not use offset", v1/worker/gpu_model_runner.py, `_bookkeeping_sync`, in 0.29.0 and in 0.32.0. The correction hides
such a request from the sampler's generators for that step, so its own generator is not drawn from at all.

Invariants:

- On a GPU nothing is touched (PlatformError).
- A request's random numbers do not depend on how its prompt was cut into chunks.
- Requests that keep their token are sampled as before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from rhyme_openrlhf.platform import require_no_gpu


def apply() -> None:
    """Wrap the CPU model runner's sampling in this process. Idempotent."""
    require_no_gpu("the correction for seeded requests on CPU")
    original = CPUModelRunner.sample_tokens
    if getattr(original, "hides_discarded", False):
        return

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        hidden = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    sample_tokens.hides_discarded = True  # type: ignore[attr-defined]
    CPUModelRunner.sample_tokens = sample_tokens
