"""The drafters that ours is compared with, as they are: vLLM 0.29.0's ngram and suffix proposers.

Each is vLLM's own class, given what vLLM's model runner would give it. The suffix proposer is arctic-inference's cache
with vLLM's defaults: one tree for all prompts, old responses kept (up to 10,000), drafts as long as the match.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from replay import Sample

from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

# vLLM 0.29.0, config/speculative.py: what the two methods do when nothing is said.
NGRAM_TOKENS = 5
SUFFIX_TREE_DEPTH = 24
SUFFIX_SPEC_FACTOR = 1.0
SUFFIX_MIN_PROBABILITY = 0.1
SUFFIX_CACHED_REQUESTS = 10000
MOST_DRAFTED = HistoSpecSettings().window_max


def use_arctic(folder: Path) -> None:
    """Make the arctic_inference package below `folder` importable."""
    sys.path.insert(0, str(folder))


def configuration(rows: int, model_length: int) -> Any:
    """Return the part of a VllmConfig that the proposers read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=NGRAM_TOKENS,
            prompt_lookup_max=NGRAM_TOKENS,
            num_speculative_tokens=MOST_DRAFTED,
            suffix_decoding_max_tree_depth=SUFFIX_TREE_DEPTH,
            suffix_decoding_max_spec_factor=SUFFIX_SPEC_FACTOR,
            suffix_decoding_min_token_prob=SUFFIX_MIN_PROBABILITY,
            suffix_decoding_max_cached_requests=SUFFIX_CACHED_REQUESTS,
        ),
        model_config=SimpleNamespace(max_model_len=model_length),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def ngram(rows: int, model_length: int) -> Proposing:
    """vLLM's `method="ngram"`: the sample's own text."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    proposer = NgramProposer(configuration(rows, model_length))

    def propose(batch: Any, sampled: list[list[int]]) -> list[list[int]]:
        return proposer.propose(MOST_DRAFTED, sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)

    return Proposing(propose, rows, model_length)


def suffix(rows: int, model_length: int) -> Proposing:
    """vLLM's `method="suffix"`, which is arctic-inference's cache."""
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    proposer = SuffixDecodingProposer(configuration(rows, model_length))

    def propose(batch: Any, sampled: list[list[int]]) -> list[list[int]]:
        return proposer.propose(MOST_DRAFTED, batch, sampled)

    return Proposing(propose, rows, model_length)


class Proposing:
    """One of vLLM's proposers as a drafter that can be replayed."""

    def __init__(self, propose: Callable[[Any, list[list[int]]], list[list[int]]], rows: int, length: int) -> None:
        """`propose(batch, sampled)`: `batch` has what vLLM's InputBatch has; `sampled` each row's new tokens."""
        self._propose = propose
        self._tokens = np.zeros((rows, length), dtype=np.int32)
        self._lengths = np.zeros(rows, dtype=np.int32)
        self._names: list[str] = []

    def begin(self, samples: list[Sample]) -> None:
        """Do nothing: `draft` finds what is new."""

    def draft(self, running: list[Sample]) -> list[list[int]]:
        return self.propose([(sample.name, sample.text, len(sample.context)) for sample in running])

    def propose(self, running: list[tuple[str, list[int], int]]) -> list[list[int]]:
        """Drafts for these requests: name, all tokens, tokens of the prompt."""
        self.prepare(running)
        return self.ask()

    def prepare(self, running: list[tuple[str, list[int], int]]) -> None:
        """Fill the rows of vLLM's batch, which vLLM has at hand anyway."""
        before = {name: int(self._lengths[row]) for row, name in enumerate(self._names)}
        self._names = [name for name, _, _ in running]
        self._sampled = []
        prompts = np.zeros(len(running), dtype=np.int32)
        for row, (name, text, prompt) in enumerate(running):
            self._tokens[row, : len(text)] = text
            self._lengths[row] = len(text)
            self._sampled.append(text[before.get(name, prompt) :])
            prompts[row] = prompt
        self._batch = SimpleNamespace(
            req_ids=self._names,
            req_id_to_index={name: row for row, name in enumerate(self._names)},
            num_tokens_no_spec=self._lengths,
            num_prompt_tokens=prompts,
            token_ids_cpu=self._tokens,
        )

    def ask(self) -> list[list[int]]:
        """Make the proposer's own call."""
        return self._propose(self._batch, self._sampled)

    def verified(self, sample: Sample, drafted: int, accepted: int) -> str:
        return ""

    def finished(self, sample: Sample) -> None:
        """Take the sample out of the batch, which is how vLLM knows that it has finished."""

    def learn(self, records: list[Record]) -> None:
        """Do nothing: the suffix proposer has seen the responses."""
