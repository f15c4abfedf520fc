"""Samples' identities and seeds."""

from types import SimpleNamespace

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
    samples = [SimpleNamespace(prompts=[prompt], n=n) for n, prompt in enumerate("bbaacc")]
    assert [sample.n for sample in in_prompt_order(samples)] == [2, 3, 0, 1, 4, 5]
