"""vLLM's DecodeBenchConnector, for the requests that ask for it: contexts that are there without being computed.

Measuring a decode step at 16K tokens of context would otherwise mean prefilling 16K tokens a sample first (PAT 4.2
injects prefixes for the same reason). Invariant: a request without FILLED in its extra arguments is prefilled as ever,
so that prefill can be measured on the same engine. Checked against vLLM 0.29.0
`distributed/kv_transfer/kv_connector/v1/decode_bench_connector.py`.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

from rhyme_openrlhf.engine.requests import FILLED


class ProfilingConnector(DecodeBenchConnector):
    """Fills the KV cache of requests that carry FILLED."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that need not be computed."""
        parameters = request.sampling_params
        if not ((parameters.extra_args if parameters else None) or {}).get(FILLED):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
