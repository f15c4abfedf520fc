"""Settings of dispatch and of HistoPipe: which engine generates which prompts, and whether engines stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, SettingsError, option


@dataclass(frozen=True)
class DispatchSettings(Settings):
    """Rule that gives each prompt to an engine."""

    group: ClassVar[str] = "dispatch"
    title: ClassVar[str] = "Dispatch: which engine each prompt goes to."

    by_history: bool = option(
        True,
        "Give each engine as much predicted work as the others. Work is predicted by the tokens that the prompts were "
        "answered with last time. Without history, or with this off, as OpenRLHF: to the engine with the fewest "
        "samples.",
    )


@dataclass(frozen=True)
class HistoPipeSettings(Settings):
    """Each engine goes from its part of a step straight to its part of the next (RhymeRL 4.2 and 6)."""

    group: ClassVar[str] = "histopipe"
    title: ClassVar[str] = "HistoPipe: engines go from step to step without waiting for each other."

    enable: bool = option(
        False,
        "Train with the streaming pipeline, at most one step off policy. Each engine has its prompts of the next step "
        "before it needs them and loads weights by itself in between. Needs --train.async_enable.",
    )
    rank_groups: int = option(
        0,
        "Groups of prompts of like length that engines get in turn; 0: chosen. Lengths are those of the last "
        "responses; a step goes over the engines from short to long in odd steps, long to short in even ones. Never "
        "more than engines; 1: by load alone; 0: half as many as engines, from 2 to 16.",
        low=0,
        high=65536,
    )
    two_tier: bool = option(
        True,
        "Give rank groups as many engines as their lengths ask for. By the run's profile (--latency.profile), where "
        "there are more engines than rank groups; off, or without a profile: all as many.",
    )
    defer: bool = option(
        False,
        "Train a prompt group with a far too long response one step later. One of the next step takes its place, so "
        "that its engine goes on to the next step meanwhile. Too long is measured by its rank group. Such prompt "
        "groups are up to two steps off policy; off: none is more than one.",
    )

    def check(self) -> None:
        if self.defer and not self.enable:
            raise SettingsError("--histopipe.defer needs --histopipe.enable: only the streaming pipeline defers")
