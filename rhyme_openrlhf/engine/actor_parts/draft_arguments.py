"""vLLM engine arguments for drafts of vLLM's own methods (`--drafting.source` ngram, draft_model, eagle3).

Invariants: drafts are one-hot (greedy), for which vLLM's rejection sampling keeps the distribution; scheduling is
synchronous and the model runner is V1, because else drafts stay in the worker and no scheduler can cut them (for
`custom_class`, which history uses, vLLM chooses the same). Checked against vLLM 0.29.0 `config/speculative.py`,
`config/vllm.py`. A draft model has the policy's tensor-parallel size, which vLLM demands.
"""

from __future__ import annotations

import os
from typing import Any

from rhyme_openrlhf.engine.request_keys import SCHEDULER
from rhyme_openrlhf.settings.drafting import NGRAM, DraftingSettings, HistoSpecSettings


def vllm_source_arguments(histospec: HistoSpecSettings, drafting: DraftingSettings) -> dict[str, Any]:
    """The arguments; sets, for the processes vLLM is about to start, which model runner they use."""
    speculative: dict[str, Any] = {"method": drafting.source, "num_speculative_tokens": drafting.tokens}
    if drafting.source == NGRAM:
        speculative |= {"prompt_lookup_max": histospec.prefix_max, "prompt_lookup_min": histospec.prefix_min}
    else:
        speculative |= {"model": drafting.model}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return {"scheduler_cls": SCHEDULER, "async_scheduling": False, "speculative_config": speculative}
