"""Samples' identities and seeds."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from rhyme_openrlhf.engine.requests import SampleIdentity, request_seed
from rhyme_openrlhf.training.reproducible import in_prompt_order


def test_each_request_has_its_own_seed_and_keeps_it() -> None:
    identities = [
        SampleIdentity(prompt, visit, sample) for prompt in ("a", "b") for visit in (0, 1) for sample in range(8)
    ]
    seeds = [request_seed(run, identity, tokens) for run in (1, 2) for identity in identities for tokens in (5, 9)]
    assert len(set(seeds)) == len(seeds)
    assert request_seed(1, identities[3], 5) == request_seed(1, SampleIdentity("a", 0, 3), 5)


def test_samples_are_ordered_by_prompt_and_stay_together() -> None:
    samples = rows_of(["b", "a", "c"])
    assert [sample.n for sample in in_prompt_order(samples, 2)] == [2, 3, 0, 1, 4, 5]


@pytest.mark.parametrize("labels", ["123", "111"])
def test_rows_with_one_prompt_are_in_the_same_order_whichever_finished_first(labels: str) -> None:
    rows = rows_of(["a", "b", "a", "a"], [*labels[:1], "0", *labels[1:]])
    pairs = [rows[first : first + 2] for first in range(0, 8, 2)]
    orders = {
        tuple(sample.n for sample in in_prompt_order([sample for pair in pairs_so for sample in pair], 2))
        for pairs_so in itertools.permutations(pairs)
    }
    assert len(orders) == 1 and [orders.pop()[0::2][-1]] == [2]


def rows_of(prompts: list[str], labels: list[str] | None = None) -> list[SimpleNamespace]:
    """Two samples of each row; every response is another one."""
    return [
        SimpleNamespace(prompts=[prompt], labels=[label], sequences=torch.tensor([[number, 9 - number]]), n=number)
        for number, (prompt, label) in enumerate(
            (prompt, label) for prompt, label in zip(prompts, labels or prompts, strict=True) for _ in range(2)
        )
    ]
