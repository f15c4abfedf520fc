"""Unseen prompts have the lengths of their data set, never instead of a history of their own."""

from __future__ import annotations

from math import inf

from rhyme_openrlhf.scheduling.length_prior import ENOUGH, KEPT, Expected, LengthPrior
from rhyme_openrlhf.scheduling.rank_groups import rank_groups


def a_prior(math: int = 900, chat: int = 100, prompts: int = ENOUGH, defers: bool = True) -> LengthPrior:
    prior = LengthPrior(defers)
    for _ in range(prompts):
        prior.ended(1, 2 * prompts, "math", [math - 100, math + 100])
        prior.ended(1, 2 * prompts, "chat", [chat, chat])
    return prior


def test_an_unseen_prompt_has_its_data_sets_mean_and_a_limit_that_few_responses_exceed() -> None:
    found = a_prior().expected([None, None, None], ["chat", "math", "code"])
    assert found == Expected([100, 900, None], [100, 1000, None])


def test_without_deferral_an_unseen_prompt_has_no_limit() -> None:
    found = a_prior(defers=False).expected([None, 7.0], ["chat", "math"])
    assert found == Expected([100, 7.0], [inf, 7.0])


def test_a_prompts_own_history_goes_first() -> None:
    assert a_prior().expected([7.0, None], ["math", "chat"]) == Expected([7.0, 100], [7.0, 100])


def test_nothing_is_expected_before_two_data_sets_are_known() -> None:
    own = [None, 5.0]
    one, few = LengthPrior(), a_prior(prompts=ENOUGH - 1)
    for _ in range(ENOUGH):
        one.ended(1, ENOUGH, "math", [900])
    for prior in (LengthPrior(), one, few):
        assert prior.expected(own, ["math", "chat"]) == Expected(own, own)


def test_lengths_count_once_their_step_has_ended() -> None:
    prior = a_prior()
    for _ in range(8):
        prior.ended(2, 9, "chat", [1])
    assert prior.expected([None], ["chat"]).lengths == [100]
    prior.ended(2, 9, "chat", [1])
    assert prior.expected([None], ["chat"]).lengths == [(8 * 100 + 9) / 17]


def test_what_is_missing_of_an_earlier_step_is_not_waited_for() -> None:
    prior = a_prior()
    prior.ended(2, 2, "chat", [500] * 8)
    prior.ended(3, 1, "chat", [500] * 8)
    assert prior.expected([None], ["chat"]).lengths == [(8 * 100 + 16 * 500) / 24]


def test_old_lengths_are_forgotten() -> None:
    prior = a_prior()
    prior.ended(2, 1, "chat", [40] * KEPT)
    assert prior.expected([None], ["chat"]) == Expected([40], [40])


def test_rank_groups_of_unseen_prompts_go_by_data_set_and_their_limit_is_its_own() -> None:
    lengths, limits = a_prior().expected([None] * 4, ["math", "chat", "math", "chat"])
    short, long = rank_groups(lengths, 2, limits)
    assert short.prompts == (1, 3) and long.prompts == (0, 2)
    assert (short.mean_length, short.longest, long.mean_length, long.longest) == (100, 100, 900, 1000)
    # Without limits it is the longest expected length.
    assert rank_groups(lengths, 2)[1].longest == 900
