"""The form has every option once, and what is written in it is what was given."""

from collections import Counter

import pytest

pytest.importorskip("fastapi")

from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.settings.features import FEATURES
from rhyme_openrlhf.webui.new_run import option_words
from rhyme_openrlhf.webui.new_run.form import ESSENTIALS, run_form
from rhyme_openrlhf.webui.site.text import written


def test_every_option_that_a_spec_may_set_is_there_once() -> None:
    shown = Counter(field.option.flag for field in run_form({}).fields())
    assert set(shown) == {option.flag for option in options().values() if not option.refused}
    assert set(shown.values()) == {1}


def test_names_of_flags_exist() -> None:
    flags = {option.flag for option in options().values()}
    named = {flag for _, group in ESSENTIALS for flag in group} | {feature.flag for feature in FEATURES}
    named |= {flag for feature in FEATURES for flag in feature.flags} | set(option_words._UPSTREAM)
    assert named <= flags


def test_without_values_nothing_is_changed() -> None:
    for field in run_form({}).fields():
        assert not field.changed and field.text == "", field.key


def test_values_are_shown_as_typed_and_defaults_are_not() -> None:
    form = run_form(
        {
            "actor": {"adam.lr": 5e-7, "num_nodes": 1},
            "reward": {"clip_range": [-1.0, 1.0]},
            "weights": {"transport": "openrlhf"},
            "histospec": {"enable": True, "window_max": 8},
            "algo": {"advantage.estimator": "rloo"},
        }
    )
    fields = {field.key: field for field in form.fields()}
    assert (fields["actor.adam.lr"].text, fields["actor.adam.lr"].default) == ("5e-07", "1e-06")
    assert fields["reward.clip_range"].text == "-1 1"
    assert (fields["algo.advantage.estimator"].kind, fields["algo.advantage.estimator"].text) == ("choice", "rloo")
    assert not fields["actor.num_nodes"].changed
    transport = fields["weights.transport"]
    assert (transport.kind, transport.text, transport.changed, transport.default) == (
        "choice",
        "openrlhf",
        True,
        "auto",
    )
    assert fields["histospec.enable"].is_on and not fields["histospec.enable"].changed
    features = [feature for goal in form.goals for feature in goal.features]
    drafts = next(feature for feature in features if feature.switch.key == "histospec.enable")
    assert "histospec.window_max" in {field.key for field in drafts.settings if field.changed}
    assert "history.workers" in {field.key for field in drafts.settings}


@pytest.mark.parametrize(
    "value, text",
    [
        (None, ""),
        (True, "on"),
        (0.1, "0.1"),
        (1e-7, "1e-07"),
        (float("inf"), "inf"),
        ([0.5, 2], "0.5 2"),
        ("a b", "a b"),
    ],
)
def test_values_are_written_as_people_type_them(value: object, text: str) -> None:
    assert written(value) == text
