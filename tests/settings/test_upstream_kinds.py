"""Every option that takes any text says what the text names: ours where it is declared, OpenRLHF's in one table."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, get_args

import pytest

pytest.importorskip("fastapi")

import rhyme_openrlhf.api
from rhyme_openrlhf.api.launch.schema import options, upstream_version
from rhyme_openrlhf.settings.options import OPTION, PathKind, Settings, option
from rhyme_openrlhf.settings.upstream_kinds import CHECKED_AGAINST, UPSTREAM_KINDS


def settings_classes() -> Iterator[type[Settings]]:
    """Every settings class of the package: also those that only the service has."""
    for module in pkgutil.walk_packages(rhyme_openrlhf.api.__path__, "rhyme_openrlhf.api."):
        importlib.import_module(module.name)
    waiting = [Settings]
    while waiting:
        found = waiting.pop().__subclasses__()
        yield from (one for one in found if one.__module__.startswith("rhyme_openrlhf."))
        waiting += found


def test_every_text_of_ours_says_what_it_is() -> None:
    classes = list(settings_classes())
    assert {"ServeSettings", "LaunchSettings", "RunSettings", "TpSwitchSettings"} <= {one.__name__ for one in classes}
    for cls in classes:
        for field in dataclasses.fields(cls):
            rule = field.metadata[OPTION]
            is_free_text = isinstance(field.default, str) and rule.choices is None
            assert (rule.kind is not None) == is_free_text, cls.flag(field.name)


def test_every_text_of_openrlhfs_is_in_the_table_and_nothing_else() -> None:
    texts = {one.flag for one in options().values() if one.source == "openrlhf" and one.type == "str"}
    with_choices = {flag for one in options().values() if (flag := one.flag) and one.choices} - set(UPSTREAM_KINDS)
    assert set(UPSTREAM_KINDS) == texts - with_choices
    assert upstream_version() == CHECKED_AGAINST


def test_an_option_that_does_not_say_it_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="needs a kind"):

        @dataclass(frozen=True)
        class Forgetful(Settings):
            group: ClassVar[str] = "forgetful"
            title: ClassVar[str] = "A group."
            place: str = option("", "Where something is kept.")

    for default, choices in ((1, None), (False, None), ("a", ("a", "b"))):
        with pytest.raises(TypeError, match="has a kind"):
            option(default, "What has no free text.", choices=choices, kind="plain")


def test_each_kind_of_path_is_checked() -> None:
    from rhyme_openrlhf.api.launch.spec_paths import _CHECKS

    assert set(_CHECKS) == set(get_args(PathKind))
    named = {one.flag for one in options().values() if one.path and not one.refused and one.source == "rhyme"}
    assert named == {
        "--drafting.model",
        "--history.earlier",
        "--history.spill_dir",
        "--history.store",
        "--emulate.profile",
        "--latency.profile",
        "--tp_switch.profile",
    }
