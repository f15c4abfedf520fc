"""The list of what the form changes of its starting point."""

import pytest

pytest.importorskip("fastapi")

from rhyme_openrlhf.webui.new_run.form import UNSET, Difference, differences


def test_values_that_differ_are_listed_with_both_values() -> None:
    base = {"vllm": {"num_engines": 2}, "histospec": {"enable": True}, "data": {"prompt_dataset": "a"}}
    now = {"vllm": {"num_engines": 4}, "histospec": {"enable": False}}
    assert set(differences(base, now)) == {
        Difference("vllm.num_engines", "2", "4"),
        Difference("histospec.enable", "on", "off"),
        Difference("data.prompt_dataset", "a", UNSET),
    }


def test_a_default_that_is_spelled_out_is_no_difference() -> None:
    assert differences({}, {"histospec": {"enable": True}, "actor": {"adam.betas": (0.9, 0.95)}}) == ()
    assert differences({"no": {"such": 1}}, {"neither": {"this": 2}}) == ()
