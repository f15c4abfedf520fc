"""Before the first rollout: every engine gets the profile by which it plans its drafts, or samples are reallocated.

The user's file, or the profile kept for this model and hardware, or else a quick one that the first engine measures now
(under a minute) and keeps for later runs.

Invariants: a file that the user named and that is of something else ends the run, with the two named side by side;
where no profile comes about otherwise, the run says so and its drafts follow the fixed rules. Every wait has a limit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from rhyme_openrlhf.engine.port import MeasuredEngine
from rhyme_openrlhf.engine_errors import EngineCallError
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import QUICKLY, MeasureError, Plan, measure
from rhyme_openrlhf.latency.profile import Profile, ProfileError
from rhyme_openrlhf.scheduling.layouts import ALIGNED
from rhyme_openrlhf.settings.latency import AUTO
from rhyme_openrlhf.settings.tp_switch import tail_profiles
from rhyme_openrlhf.telemetry.events import Note, NoteLevel
from rhyme_openrlhf.telemetry.run_directory import versions
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.training.layout_placement import taking_turn

SOURCE = "trainer"
# One call to an engine: a burst of decode steps, or reading a file.
CALL_SECONDS = 60.0


def install_step_times(
    engines: Sequence[Any], services: RunServices, awake: Callable[[], AbstractContextManager[None]]
) -> Profile | None:
    """Give every engine its profile, if drafts are planned by it or samples reallocated; returns it.

    Engines that may be asleep are measured within `awake`. Raises ProfileError for a file that does not fit.
    """
    settings = services.settings
    reallocated = settings.reallocation.enable and not settings.reallocation.threshold
    compared = settings.tp_switch.enable and not settings.tp_switch.samples
    if not (settings.drafts_planned or reallocated or compared) or not engines:
        return None
    plan = services.layouts
    if plan is None:
        return _install(engines, services, awake, settings.latency.profile)
    named = tail_profiles(settings.tp_switch.profile, len(plan.sizes) - 1)
    found = []
    for layout, asked in enumerate((settings.latency.profile, *named)):
        # Engines that sleep between rollouts take no turns.
        own = awake if plan.both_awake else partial(taking_turn, engines, layout, services)
        found.append(_install([engines[number] for number in plan.numbers(layout)], services, own, asked))
    return found[ALIGNED]


def _install(
    engines: Sequence[Any], services: RunServices, awake: Callable[[], AbstractContextManager[None]], asked: str
) -> Profile | None:
    """Those of one layout; `asked`: a file, or AUTO."""
    settings = services.settings

    def say(level: NoteLevel, text: str) -> None:
        services.record(Note(level, text), SOURCE)

    first = MeasuredEngine(engines[0], CALL_SECONDS)
    try:
        if settings.emulate.profile:
            # What is kept for later runs is of this machine's own clock, and only that.
            text = profiles.read_text(Path(settings.emulate.profile))
            say("info", f"drafts follow the step times that are emulated, {settings.emulate.profile}")
        elif asked == AUTO:
            text = _kept_or_quick(first, say, awake)
        else:
            path = Path(asked)
            text = profiles.read_text(path)
            profiles.parse(text, f"the profile {path}").check_fits(first.subject(), str(path))
            say("info", f"drafts follow the step times of {path}")
        for engine in engines:
            if refused := MeasuredEngine(engine, CALL_SECONDS).install_profile(text):
                raise ProfileError(refused)
        return profiles.parse(text, "the profile of this run")
    except (MeasureError, EngineCallError) as error:
        say("warning", f"no step times, so drafts follow the fixed rules of --histospec.*: {error}")
        return None


def _kept_or_quick(engine: MeasuredEngine, say: Any, awake: Callable[[], AbstractContextManager[None]]) -> str:
    path, text = engine.kept_profile()
    if text:
        try:
            kept = profiles.parse(text, f"the profile {path}")
            kept.check_fits(engine.subject(), path)
        except ProfileError as error:
            say("warning", f"{error} It is replaced.")
        else:
            say("info", f"drafts follow the step times of {path}")
            completed = _with_unspeculated(kept, engine, say)
            if completed != kept:
                text = profiles.to_text(completed)
                engine.keep_profile(text)
            return text
    began = time.monotonic()
    with awake():
        profile = measure(Plan.of(engine, versions(), QUICKLY), engine)
    profile = _with_unspeculated(profile, engine, say)
    text = profiles.to_text(profile)
    engine.keep_profile(text)
    say(
        "info",
        f"drafts follow step times that were measured now, at {len(profile.steps)} points in "
        f"{time.monotonic() - began:.0f} s, and are kept as {path} (`rhyme profile` measures more)",
    )
    return text


def _with_unspeculated(profile: Profile, engine: MeasuredEngine, say: Any) -> Profile:
    """Add the steps of an engine without speculation that `engine` measured before its start, if it did."""
    steps, problem = engine.unspeculated()
    if problem:
        say(
            "warning",
            "no step times of an engine without speculation, so what drafts gain is against engines that could draft "
            f"(`rhyme profile` measures both): {problem}",
        )
    if not steps:
        return profile
    say("info", f"what drafts gain is against an engine without speculation, measured now at {len(steps)} points")
    return dataclasses.replace(profile, unspeculated=steps)
