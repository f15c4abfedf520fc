"""The trainer's metrics, grouped by their names."""

from rhyme_openrlhf.webui.figures.subjects.metrics import grouped
from tests.webui.figure_rows import curve, draw


def test_metrics_are_grouped_by_name_and_none_is_lost() -> None:
    names = [
        "eval/default_pass1", "entropy_loss", "vllm_kl", "ppo_kl", "actor_grad_norm", "policy_loss", "actor_lr",
        "skill", "reward", "rollout/reward_std", "truncated",
    ]  # fmt: skip
    groups, rest = grouped(names)
    assert groups == {
        "evaluation": ["eval/default_pass1"], "entropy": ["entropy_loss"], "kl": ["ppo_kl", "vllm_kl"],
        "gradient": ["actor_grad_norm"], "loss": ["policy_loss"], "learning_rate": ["actor_lr"],
    }  # fmt: skip
    assert rest == ["skill"]


def test_an_evaluations_chart_has_its_results_alone() -> None:
    groups, rest = grouped(["eval/eval_sort_pass1", "eval/eval_num_samples", "eval/eval_response_length_mean"])
    assert groups["evaluation"] == ["eval/eval_sort_pass1"]
    assert rest == ["eval/eval_num_samples", "eval/eval_response_length_mean"]
    found = {"eval/eval_sort_pass1": curve("eval/eval_sort_pass1", 0.1, 0.2)}
    assert draw("evaluation", found).data[0].name == "sort_pass1"


def test_a_constant_nothing_lies_on_the_axis() -> None:
    figure = draw("metric", {"skipped": curve("skipped", 0.0, 0.0)})
    assert tuple(figure.layout.yaxis.range) == (-0.05, 1.0)


def test_more_metrics_than_colours_go_to_the_rest() -> None:
    groups, rest = grouped([f"eval/{i:02}" for i in range(10)])
    assert len(groups["evaluation"]) == 8 and rest == ["eval/08", "eval/09"]
