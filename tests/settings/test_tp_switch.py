"""Settings of adaptive tensor parallelism: one size or several, and their profiles."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.settings.options import SettingsError
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings, tail_profiles


def test_one_size_or_several() -> None:
    assert TpSwitchSettings(size=4).all_sizes == (4,)
    assert TpSwitchSettings(size=4, sizes="8, 2").all_sizes == (2, 8)
    assert TpSwitchSettings(sizes="2 4 2").all_sizes == (2, 4)


def test_each_size_has_a_profile() -> None:
    assert tail_profiles("auto", 2) == ("auto", "auto") and tail_profiles("none", 3) == ("none",) * 3
    assert tail_profiles("two.json, four.json", 2) == ("two.json", "four.json")
    # Of one size the whole word is the file's name.
    assert tail_profiles("a,b.json", 1) == ("a,b.json",)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sizes": "two"}, "--tp_switch.sizes must be numbers from 2 to 64 like 2,4, got 'two'"),
        ({"sizes": "1,2"}, "--tp_switch.sizes must be numbers from 2"),
        ({"sizes": ","}, "--tp_switch.sizes must be numbers"),
        ({"sizes": "2,4", "profile": "two.json"}, "--tp_switch.profile must name one file for each of the 2 sizes"),
        ({"kv_cache_mb": 5}, "--tp_switch.kv_cache_mb must be 0 or at least 16, got 5"),
        ({"aligned_kv_cache_mb": 15}, "--tp_switch.aligned_kv_cache_mb must be 0 or at least 16, got 15"),
    ],
)
def test_what_is_none_is_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        TpSwitchSettings(**values)  # type: ignore[arg-type]
