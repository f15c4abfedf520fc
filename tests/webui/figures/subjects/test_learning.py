"""Reward, and age of the weights."""

import pytest

from rhyme_openrlhf.webui.figures.drawing.series import Span
from rhyme_openrlhf.webui.figures.subjects.learning import AgeBucket, Ages
from tests.webui.figure_rows import curve, draw, traces


def test_the_reward_has_its_spread_behind_it() -> None:
    found = {
        "reward": curve("reward", 0.2, 0.4), "rollout_reward": curve("rollout_reward", 0.1, 0.1),
        "rollout/reward_std": curve("rollout/reward_std", 0.1, None), "group_reward_std": curve("group_reward_std"),
    }  # fmt: skip
    figure = draw("reward", found)
    upper, lower, mean = figure.data
    assert list(upper.y) == pytest.approx([0.3]) and list(lower.y) == pytest.approx([0.1])
    assert mean.name == "Reward" and list(mean.y) == [0.2, 0.4]
    assert "standard deviation over the step's samples" in figure.layout.meta["description"]
    assert figure.layout.meta["description"].count("First 0.200") == 1


def test_off_policyness_is_a_share_of_each_step() -> None:
    ages = Ages("samples", [AgeBucket(Span(1, 1), {0: 100}), AgeBucket(Span(2, 2), {0: 50, 1: 50})])
    figure = draw("off_policyness", ages)
    drawn = traces(figure)
    assert list(drawn["0 (on policy)"].y) == [1.0, 0.5] and list(drawn["1"].y) == [0.0, 0.5]
    assert "75.0% at 0, 25.0% at 1" in figure.layout.meta["description"]
