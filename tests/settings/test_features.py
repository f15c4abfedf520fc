"""The table of features: complete, and every feature once."""

from rhyme_openrlhf.settings.config import SETTINGS_CLASSES
from rhyme_openrlhf.settings.features import FEATURES, GOALS


def test_every_option_group_with_a_switch_is_a_feature() -> None:
    switches = {f"--{cls.group}.enable" for cls in SETTINGS_CLASSES if hasattr(cls, "enable")}
    assert "--tp_switch.enable" in switches
    assert switches <= {feature.flag for feature in FEATURES}


def test_no_feature_and_no_name_is_there_twice() -> None:
    for names in ([one.flag for one in FEATURES], [one.name for one in FEATURES], [goal.name for goal in GOALS]):
        assert len(set(names)) == len(names)
