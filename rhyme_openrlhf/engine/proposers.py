"""What proposes drafts in a worker: nothing for the source "history", and vLLM's n-grams looked up by one thread.

vLLM asks a proposer in the worker process for drafts. Those from history come from the scheduler, which knows prompts
and requests, so `NullProposer` fills the place (`speculative_config={"method": "custom_class", ...}`).

vLLM's own n-gram proposer starts a parallel loop in every step and hands it a Python list, whatever the batch: 0.1 to
0.3 ms of each step where one sample runs (docs/benchmarks.md), for a search that takes microseconds. Its parallel loop
has a single thread in vLLM 0.29.0 and 0.32.0 in any case. `SerialNgramProposer` searches without it.

Invariants: each search is vLLM's own compiled function, so what is proposed is what vLLM would have proposed; drafts
of any other method stay as they are. Checked against vLLM 0.29.0 and 0.32.0
`v1/spec_decode/ngram_proposer.py` and `v1/worker/gpu_model_runner.py`; contract test: `tests/engine/test_proposers.py`.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from vllm.v1.spec_decode import ngram_proposer
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

_search = ngram_proposer._find_longest_matched_ngram_and_propose_tokens


class SerialNgramProposer(NgramProposer):
    """vLLM's proposer with its loop over samples replaced."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        # vLLM means to have its loop compiled here, but gives it no sample, so that the first decode step waits for it.
        self.batch_propose(1, [0], np.ones(1, np.int32), np.zeros((1, self.max_model_len), np.int32), self.k)

    def batch_propose(
        self,
        num_requests: int,
        valid_ngram_requests: list[int],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        k: int,
    ) -> list[list[int]]:
        """Up to `k` tokens for each of `valid_ngram_requests`, none for the others of `num_requests`.

        `num_tokens_no_spec`: int32[most samples], tokens of each sample; `token_ids_cpu`: int32[most samples, length].
        """
        proposed: list[list[int]] = [[] for _ in range(num_requests)]
        if k and valid_ngram_requests:
            drafts, lengths = self.valid_ngram_draft, self.valid_ngram_num_drafts
            _propose(
                np.array(valid_ngram_requests), num_tokens_no_spec, token_ids_cpu, self.min_n, self.max_n,
                self.max_model_len, k, drafts, lengths,
            )  # fmt: skip
            for sample in valid_ngram_requests:
                proposed[sample] = drafts[sample, : lengths[sample]].tolist()
        return proposed


def loop_over(search_source: int) -> Any:
    """Return the compiled loop over samples, which calls vLLM's search from the source with this CRC-32.

    Numba keeps the compiled loop in a file with vLLM's search in it, and notices changes of this module alone. It keeps
    one loop for each value that the loop closes over, so the loop closes over the CRC-32.
    """

    @njit(cache=True)
    def propose(samples, counts, tokens, least, most, max_model_len, k, drafts, lengths):  # type: ignore[no-untyped-def]
        for sample in samples:
            found = _search(tokens[sample, : counts[sample]], least, most, max_model_len, k)
            lengths[sample] = found.size
            drafts[sample, : found.size] = found
        return search_source

    return propose


_propose = loop_over(zlib.crc32(Path(ngram_proposer.__file__).read_bytes()))


class NullProposer:
    """Proposes no draft token, for every request."""

    def __init__(self, vllm_config: Any) -> None:
        """vLLM passes its whole config; nothing of it is needed."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: there is no draft model."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return an empty draft for each of the [batch] requests."""
        return [[] for _ in sampled_token_ids]


def look_up_serially(runner: Any, config: Any, serially: bool) -> None:
    """Have vLLM's model runner look up n-grams by one thread from now on, or, for comparison, in vLLM's own way."""
    if isinstance(runner.drafter, NgramProposer):
        runner.drafter = (SerialNgramProposer if serially else NgramProposer)(config)
