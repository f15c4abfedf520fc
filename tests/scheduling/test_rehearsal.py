"""The rule by which an idle engine rehearses: never beside real samples, every prompt once before any twice."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from rhyme_openrlhf.scheduling.rehearsal import SAMPLES_EACH, to_rehearse

prompts = st.lists(st.text("abcdef", min_size=1, max_size=2), unique=True, max_size=12)
counts = st.integers(0, 6)


@given(prompts, st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(0, 3)), counts, counts)
def test_nothing_begins_beside_real_samples_or_while_weights_load(
    coming: list[str], begun: dict[str, int], under_way: int, most: int
) -> None:
    assert to_rehearse(coming, begun, under_way, most, 1, True) == []
    assert to_rehearse(coming, begun, under_way, most, 0, False) == []


@given(prompts, st.data(), counts, st.integers(0, 30))
def test_prompts_are_rehearsed_in_order_and_no_more_than_the_engine_runs(
    coming: list[str], data: st.DataObject, under_way: int, most: int
) -> None:
    begun = {prompt: data.draw(st.integers(0, 3)) for prompt in coming}
    found = to_rehearse(coming, begun, under_way, most, 0, True)
    assert len(found) <= max(most - under_way, 0)
    after = Counter(begun) + Counter(found)
    assert set(found) <= set(coming)
    assert all(after[prompt] <= max(SAMPLES_EACH, begun[prompt]) for prompt in coming)
    # No prompt gets its second sample while another one has none.
    if any(after[prompt] == 0 for prompt in coming):
        assert all(begun[prompt] == 0 for prompt in found)


@given(prompts, st.integers(1, 5))
def test_an_idle_engine_rehearses_every_prompt_in_the_end(coming: list[str], most: int) -> None:
    begun: Counter[str] = Counter()
    while found := to_rehearse(coming, begun, 0, most, 0, True):
        begun.update(found)
    assert begun == Counter(dict.fromkeys(coming, SAMPLES_EACH))
