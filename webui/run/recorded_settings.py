"""A run's recorded settings under the names of the form and the command line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.api.launch.spec import SpecError
from rhyme_openrlhf.api.launch.spec_command import from_argv
from rhyme_openrlhf.api.read.comparison import GIT, differing
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.parameters import settings_of
from rhyme_openrlhf.webui.new_run.option_words import explained
from rhyme_openrlhf.webui.site.text import written

# Checkouts whose commit is recorded (run/source_code.py).
_CHECKOUTS = (("package", "rhyme-openrlhf"), ("directory", "folder it was started in"))


@dataclass(frozen=True)
class Commit:
    """The commit of `what` with which a run was started; `dirty`: uncommitted changes exist, None if unknown."""

    what: str
    commit: str
    dirty: bool | None


@dataclass(frozen=True)
class Setting:
    """A setting as shown. `given`: it was on the command line; `other`: the other run's value if it differs."""

    key: str
    value: str
    default: str
    help: str
    given: bool
    differs: bool = False
    other: str = ""


def commits_of(run: Run) -> list[Commit]:
    """Return the commits that a run has recorded; entries of another form are left out."""
    recorded = run.config.get(GIT)
    found = []
    for name, what in _CHECKOUTS:
        one = recorded.get(name) if isinstance(recorded, Mapping) else None
        if isinstance(one, Mapping) and isinstance(one.get("commit"), str):
            dirty = one.get("dirty")
            found.append(Commit(what, one["commit"], dirty if isinstance(dirty, bool) else None))
    return found


def given_keys(run: Run) -> set[str]:
    """Return the keys given on the command line, or an empty set if the command cannot be parsed."""
    try:
        _, arguments = from_argv(run.command[2:])
    except SpecError:
        return set()
    return {f"{group}.{name}" for group, values in arguments.items() for name in values}


def sections(run: Run, other: Run | None) -> list[tuple[str, list[Setting]]]:
    """Return the settings by group in the order of the record.

    With `other`, settings that only the other run has are included.
    """
    mine = settings_of(run)
    theirs = settings_of(other) if other is not None else {}
    given = given_keys(run)
    changed = set(differing([mine, theirs])) if other is not None else set()
    found: dict[str, list[Setting]] = {}
    for key in (*mine, *(key for key in theirs if key not in mine)):
        group, _, name = key.partition(".")
        option = options().get((group, name))
        found.setdefault(group, []).append(
            Setting(
                key=key,
                value=shown(mine.get(key)),
                default=shown(option.default) if option else "",
                help=explained(option) if option else "",
                given=key in given,
                differs=key in changed,
                other=shown(theirs.get(key)),
            )
        )
    return list(found.items())


def shown(value: Any) -> str:
    """Return a value for a table: "–" for None, "on" and "off" for switches."""
    return written(value) or "–"


def rows_of(names: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return rows (name, value of each run) for a table; a missing value is written as "not recorded"."""
    return [(name, [shown(run[name]) if name in run else "not recorded" for run in runs]) for name in names]
