"""N-grams looked up by one thread propose what vLLM's own proposer does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from rhyme_openrlhf.engine.proposers import SerialNgramProposer, look_up_serially, loop_over

LONGEST, SAMPLES, TOKENS = 48, 4, 6


def config(least: int = 2, most: int = 5) -> Any:
    """As much of vLLM's configuration as its proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=least, prompt_lookup_max=most, num_speculative_tokens=TOKENS
        ),
        model_config=SimpleNamespace(max_model_len=LONGEST),
        scheduler_config=SimpleNamespace(max_num_seqs=SAMPLES),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


@pytest.fixture(scope="module")
def proposers() -> Iterator[tuple[NgramProposer, SerialNgramProposer]]:
    with pytest.MonkeyPatch.context() as patch:
        # An earlier test in this process may have started Numba with another number of threads.
        patch.setenv("NUMBA_NUM_THREADS", str(numba.config.NUMBA_NUM_THREADS))
        yield NgramProposer(config()), SerialNgramProposer(config())


@settings(deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST), min_size=1, max_size=SAMPLES),
    sampled=st.lists(st.booleans(), min_size=SAMPLES, max_size=SAMPLES),
    k=st.integers(1, TOKENS),
)
def test_it_proposes_what_vllm_does(
    proposers: tuple[NgramProposer, SerialNgramProposer], texts: list[list[int]], sampled: list[bool], k: int
) -> None:
    """Few tokens, so that much matches; of samples that gave nothing in the step (a prefill's part), nothing."""
    tokens, counts = np.zeros((SAMPLES, LONGEST), np.int32), np.zeros(SAMPLES, np.int32)
    for number, text in enumerate(texts):
        tokens[number, : len(text)] = text
        counts[number] = len(text)
    new = [[text[-1]] if gave else [] for text, gave in zip(texts, sampled, strict=False)]
    theirs, ours = (proposer.propose(k, new, counts, tokens) for proposer in proposers)
    assert ours == theirs


def test_vllm_proposes_by_the_loop_that_is_replaced() -> None:
    """The contract with vLLM: `propose` leaves the search to `batch_propose`, which is asked like this."""
    ours, theirs = (inspect.signature(one.batch_propose) for one in (SerialNgramProposer, NgramProposer))
    assert list(ours.parameters) == list(theirs.parameters)


def test_only_ngrams_are_looked_up_otherwise(proposers: tuple[NgramProposer, SerialNgramProposer]) -> None:
    runner = SimpleNamespace(drafter=proposers[0])
    for serially, found in ((True, SerialNgramProposer), (True, SerialNgramProposer), (False, NgramProposer)):
        look_up_serially(runner, config(), serially)
        assert type(runner.drafter) is found
    another = runner.drafter = object()
    look_up_serially(runner, config(), True)
    assert runner.drafter is another


def test_what_numba_keeps_is_not_taken_for_another_version_of_vllms_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Numba reads its environment again before it compiles, if another test has changed it. Then the attribute alone is
    # lost, and what an earlier run kept beside the module is found.
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def kept(search_source: int) -> bool:
        loop = loop_over(search_source)
        texts = np.array([[1, 2, 3, 1, 2, 0, 0, 0]], np.int32)
        drafts, lengths = np.zeros((1, 2), np.int32), np.zeros(1, np.int32)
        loop(np.array([0]), np.array([5], np.int32), texts, 1, 3, 8, 2, drafts, lengths)
        assert drafts[0, : lengths[0]].tolist() == [3, 1]
        return bool(loop.stats.cache_hits)

    assert [kept(1), kept(1), kept(2), kept(1)] == [False, True, False, True]
