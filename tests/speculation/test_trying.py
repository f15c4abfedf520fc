"""Beginnings that are tried: when, and of what."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.history.core import core
from rhyme_openrlhf.speculation.trying import RUNNING_TO_A_TOKEN, TRIED_AFTER, Tries


def step(tries: Tries, proposed: int = 4, verified: int = 0, running: int = 1, most: int = 9) -> int:
    """Tokens that are tried in a step of which so much is proposed, and verified because it is worth it."""
    tried = tries.tokens(running, most) if proposed else 0
    tries.decided(proposed, verified or tried)
    return 0 if verified else tried


def test_every_17th_step_in_which_nothing_is_worth_it() -> None:
    tries = Tries()
    tried = [step(tries) for _ in range(3 * (TRIED_AFTER + 1))]
    assert tried == ([0] * TRIED_AFTER + [1]) * 3
    for _ in range(TRIED_AFTER - 1):
        step(tries)
    assert not step(tries, verified=3) and not tries.trying
    assert [step(tries) for _ in range(TRIED_AFTER + 1)] == [0] * TRIED_AFTER + [1]


def test_steps_without_a_proposal_or_without_room_neither_try_nor_put_it_off() -> None:
    """Methods that seldom propose would else never be tried: not often enough in a row."""
    tries = Tries()
    for _ in range(TRIED_AFTER):
        assert step(tries, proposed=0) == 0 and step(tries) == 0
    assert step(tries, proposed=0) == 0
    assert step(tries, most=0) == 0 and not tries.trying
    assert step(tries) == 1 and tries.trying


def test_more_samples_try_more_tokens() -> None:
    for running, tokens in ((1, 1), (2 * RUNNING_TO_A_TOKEN - 1, 1), (2 * RUNNING_TO_A_TOKEN, 2), (512, 9)):
        tries = Tries()
        assert [step(tries, running=running) for _ in range(TRIED_AFTER + 1)][-1] == tokens


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.floats(0.0, 1.0, width=32), max_size=6), min_size=1, max_size=6),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.1, 5.0]),
)
def test_only_a_beginning_and_only_where_nothing_is_chosen(
    chains: list[list[float]], tried: int, dearer: float
) -> None:
    acceptance = np.array([one for chain in chains for one in chain], dtype=np.float32)
    lengths = np.array([len(chain) for chain in chains], dtype=np.int64)
    seconds = 0.01 * (1 + dearer * np.arange(acceptance.size + 1))
    usual, drafts, expected = core.choose(acceptance, lengths, seconds, len(chains), 0)
    chosen, total, hoped = core.choose(acceptance, lengths, seconds, len(chains), tried)
    assert total == chosen.sum()
    if drafts or not tried:
        assert (chosen == usual).all() and (total, hoped) == (drafts, expected)
    else:
        longest = int(np.argmax(lengths))
        assert total == chosen[longest] == min(tried, len(chains[longest]))
        assert np.isclose(hoped, np.cumprod(np.array(chains[longest][:total], dtype=np.float64)).sum())
