"""The main menu and the tabs of a run, in page order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """An entry of the menu. `path`: the route's address, with `{uid}` for the run; `operator`: for operators only."""

    title: str
    path: str
    operator: bool = False


@dataclass(frozen=True)
class Link:
    """An entry as a link on one page."""

    title: str
    href: str
    current: bool


MENU: tuple[Entry, ...] = (
    Entry("Runs", "/"),
    Entry("New run", "/runs/new", operator=True),
    Entry("Compare", "/compare"),
    Entry("Cluster", "/cluster"),
    Entry("Settings", "/settings"),
)
RUN_TABS: tuple[Entry, ...] = (
    Entry("Overview", "/runs/{uid}"),
    Entry("Timeline", "/runs/{uid}/timeline"),
    Entry("Speculation", "/runs/{uid}/speculation"),
    Entry("Scheduling", "/runs/{uid}/scheduling"),
    Entry("Learning", "/runs/{uid}/learning"),
    Entry("Panels", "/runs/{uid}/panels"),
    Entry("Samples", "/runs/{uid}/samples"),
    Entry("Prompts", "/runs/{uid}/prompts"),
    Entry("System", "/runs/{uid}/system"),
    Entry("Logs", "/runs/{uid}/logs"),
    Entry("Config", "/runs/{uid}/config"),
    Entry("Events", "/runs/{uid}/events"),
)


def links(entries: Collection[Entry], current: str, may_act: bool, uid: str = "") -> list[Link]:
    """Return the entries that a reader sees. `current`: the path template of the current page."""
    return [
        Link(entry.title, entry.path.replace("{uid}", uid), entry.path == current)
        for entry in entries
        if may_act or not entry.operator
    ]
