"""Curves over steps: speculation, learning, and what all curves share."""

import pytest

from rhyme_openrlhf.telemetry.events import DraftBudget, DraftGain
from rhyme_openrlhf.webui.figures.drawing import base, learning, palette, speculation
from rhyme_openrlhf.webui.figures.drawing.learning import AgeBucket, Ages
from tests.webui.figure_rows import Options, curve, traces


def test_a_curve_keeps_its_colour_whichever_others_are_there() -> None:
    both = base.lines([curve("a", 1.0), curve("b", 2.0)], Options(), "y", "d", "e")
    alone = base.lines([curve("a"), curve("b", 2.0)], Options(), "y", "d", "e")
    assert traces(both)["b"].line.color == traces(alone)["b"].line.color == palette.series_color(1)


def test_a_logarithmic_scale_needs_something_above_zero() -> None:
    assert base.lines([curve("a", 0.1, 10)], Options(scale="log"), "y", "d", "e").layout.yaxis.type == "log"
    assert base.lines([curve("a", -1, 0)], Options(scale="log"), "y", "d", "e").layout.yaxis.type == "linear"


@pytest.mark.parametrize(("value", "form"), [(8e3, ",~f"), (8e8, None), (8e-6, None), (0.5, None)])
def test_thousands_are_written_out(value: float, form: str | None) -> None:
    assert base.lines([curve("a", 1e-7, value)], Options(), "y", "d", "e").layout.yaxis.tickformat == form


@pytest.mark.parametrize(
    ("end", "shown"), [(3, 3), (37.5, 37.5), (199, 200), (1030, 1040), (5001, 5100), (5100, 5100), (0.3, 0.3)]
)
def test_an_axis_of_steps_ends_at_a_round_number(end: float, shown: float) -> None:
    assert base.round_end(end) == shown


@pytest.mark.parametrize("steps", range(1, 20_000, 997))
def test_little_of_an_axis_is_left_empty(steps: int) -> None:
    assert steps <= base.round_end(steps) <= steps * (1 + 1 / base.ROOM)


def test_curves_over_all_steps_say_so() -> None:
    layout = base.lines([curve("a", *range(1, 105)), curve("b", None, 1.0)], Options(), "y", "d", "e").layout
    assert layout.xaxis.autorangeoptions.include == 104


def test_rates_are_described_each() -> None:
    found = {name: curve(name, 0.25, 0.5) for name in ("speculation_rate", "acceptance_rate")}
    figure = speculation.rates(found, Options())
    assert len(figure.data) == 2 and figure.layout.yaxis.tickformat == ".0%"
    assert "Speculation rate: first 25.0%, last 50.0%" in figure.layout.meta["description"]


def test_sources_are_stacked_to_the_speculation_rate() -> None:
    found = {
        name: curve(name, 0.0, share) for name, share in zip(speculation.SOURCES, (0.3, 0.1, 0.2, 0.1), strict=True)
    }
    found["earlier_share"] = curve("earlier_share", 0.0, 0.0)
    figure = speculation.sources(found, Options())
    assert [trace.stackgroup for trace in figure.data] == ["sources"] * 4
    assert "earlier responses 30.0%, siblings of the same rollout 10.0%" in figure.layout.meta["description"]
    # Earlier runs' responses are a part of the first source: a line, not one more layer.
    found["earlier_share"] = curve("earlier_share", 0.2, 0.1)
    *stacked, line = speculation.sources(found, Options()).data
    assert (len(stacked), line.stackgroup, line.y) == (4, None, (0.2, 0.1))
    nothing = {name: curve(name, 0.0, None) for name in (*speculation.SOURCES, "earlier_share")}
    assert speculation.sources(nothing, Options()).layout.meta["empty"]


BUDGETS = [
    DraftBudget(1, 0, [1, 8], [10, 30], [8.0, 2.0], [10.0, 20.0], [10.0, 25.0]),
    DraftBudget(2, 0, [1, 8], [30, 10], [4.0, 2.0], [10.0, 20.0], [10.0, 25.0]),
]


def test_draft_lengths_are_weighted_by_decode_steps() -> None:
    (by_load,) = speculation.chosen_length(BUDGETS, None).data
    assert list(by_load.x) == [1, 8] and list(by_load.y) == pytest.approx([5.0, 2.0])
    (over_steps,) = speculation.budget(BUDGETS, None).data
    assert list(over_steps.x) == [1, 2] and list(over_steps.y) == pytest.approx([3.5, 3.5])


def test_expected_and_accepted_tokens_are_compared() -> None:
    budgets = [DraftBudget(1, 0, [2], [10], [3.0], [1.0], [1.0], [4.0], [5.0]), *BUDGETS]
    figure = speculation.accepted(budgets, None)
    # Records of older writers have neither.
    assert list(traces(figure)["Expected"].x) == [2] and list(traces(figure)["Accepted"].y) == [5.0]
    assert "--latency.profile" in speculation.accepted(BUDGETS, None).layout.meta["empty"]


def test_the_gain_is_the_mean_of_the_engines_with_its_spread() -> None:
    figure = speculation.gain([DraftGain(1, 0, 1.5, 1.4, 1.6, 9, True), DraftGain(1, 1, 2.5, 2.0, 3.0, 9, True)], None)
    assert list(traces(figure)["Gain"].y) == [2.0]
    assert "Now 2.00 (95 %: 1.70 to 2.30)." in figure.layout.meta["description"]


def test_engines_that_drafts_make_slower_name_the_flag_of_the_next_run() -> None:
    slower = speculation.gain([DraftGain(1, 0, 0.7, 0.6, 0.8, 9, True), DraftGain(1, 1, 0.9, 0.8, 1.0, 9, True)], None)
    (sentence,) = (annotation.text for annotation in slower.layout.annotations if annotation.text)
    assert sentence.startswith("Engines without speculation would have 1.27 times the tokens per second:")
    assert "--no-histospec.enable" in sentence and "--no-histospec.enable" in slower.layout.meta["description"]
    # An interval that has "no gain" in it says nothing, nor engines that have switched drafts off and lose no more.
    for found in (
        DraftGain(1, 0, 0.9, 0.8, 1.0, 9, True),
        DraftGain(1, 0, 0.8, 0.7, 0.9, 9, drafting=False, within=0.8),
    ):
        unsure = speculation.gain([found], None)
        assert not unsure.layout.annotations and "--no-histospec" not in unsure.layout.meta["description"]
        assert ("no difference yet" in unsure.layout.meta["description"]) == found.drafting
    # Where such engines are slower for what they could do, that is what the next run gains.
    off = speculation.gain([DraftGain(1, 0, 0.6, 0.5, 0.7, 9, drafting=False, within=0.9)], None)
    assert "would have 1.50 times" in off.layout.meta["description"]


def test_predicted_and_real_step_time_are_compared() -> None:
    figure = speculation.predicted_time(BUDGETS, None)
    assert list(traces(figure)["Predicted"].y) == pytest.approx([10, 20])
    assert "off by 10.0% on average" in figure.layout.meta["description"]


def test_the_reward_has_its_spread_behind_it() -> None:
    found = {
        "reward": curve("reward", 0.2, 0.4), "rollout_reward": curve("rollout_reward", 0.1, 0.1),
        "rollout/reward_std": curve("rollout/reward_std", 0.1, None), "group_reward_std": curve("group_reward_std"),
    }  # fmt: skip
    figure = learning.reward(found, Options())
    upper, lower, mean = figure.data
    assert list(upper.y) == pytest.approx([0.3]) and list(lower.y) == pytest.approx([0.1])
    assert mean.name == "Reward" and list(mean.y) == [0.2, 0.4]
    assert "standard deviation over the step's samples" in figure.layout.meta["description"]
    assert figure.layout.meta["description"].count("First 0.200") == 1


def test_metrics_are_grouped_by_name_and_none_is_lost() -> None:
    names = [
        "eval/default_pass1", "entropy_loss", "vllm_kl", "ppo_kl", "actor_grad_norm", "policy_loss", "actor_lr",
        "skill", "reward", "rollout/reward_std", "truncated",
    ]  # fmt: skip
    groups, rest = learning.grouped(names)
    assert groups == {
        "evaluation": ["eval/default_pass1"], "entropy": ["entropy_loss"], "kl": ["ppo_kl", "vllm_kl"],
        "gradient": ["actor_grad_norm"], "loss": ["policy_loss"], "learning_rate": ["actor_lr"],
    }  # fmt: skip
    assert rest == ["skill"]


def test_an_evaluations_chart_has_its_results_alone() -> None:
    groups, rest = learning.grouped(["eval/eval_sort_pass1", "eval/eval_num_samples", "eval/eval_response_length_mean"])
    assert groups["evaluation"] == ["eval/eval_sort_pass1"]
    assert rest == ["eval/eval_num_samples", "eval/eval_response_length_mean"]
    (group,) = (one for one in learning.GROUPS if one.name == "evaluation")
    found = {"eval/eval_sort_pass1": curve("eval/eval_sort_pass1", 0.1, 0.2)}
    assert learning.metric_group(group)(found, Options()).data[0].name == "sort_pass1"


def test_a_constant_nothing_lies_on_the_axis() -> None:
    figure = learning.metric({"skipped": curve("skipped", 0.0, 0.0)}, Options())
    assert tuple(figure.layout.yaxis.range) == (-0.05, 1.0)


def test_more_metrics_than_colours_go_to_the_rest() -> None:
    groups, rest = learning.grouped([f"eval/{i:02}" for i in range(10)])
    assert len(groups["evaluation"]) == 8 and rest == ["eval/08", "eval/09"]


def test_off_policyness_is_a_share_of_each_step() -> None:
    ages = Ages("samples", [AgeBucket(1, 1, {0: 100}), AgeBucket(2, 2, {0: 50, 1: 50})])
    figure = learning.off_policyness(ages, None)
    drawn = traces(figure)
    assert list(drawn["0 (on policy)"].y) == [1.0, 0.5] and list(drawn["1"].y) == [0.0, 0.5]
    assert "75.0% at 0, 25.0% at 1" in figure.layout.meta["description"]
