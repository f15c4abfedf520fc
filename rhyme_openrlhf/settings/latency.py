"""Settings of the latency model: which profile it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, SettingsError, option

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True)
class LatencySettings(Settings):
    """Source of the step times that drafts are cut by."""

    group: ClassVar[str] = "latency"
    title: ClassVar[str] = "Latency model: how long a step takes, which decides how many draft tokens are worth it."

    profile: str = option(
        AUTO,
        "Step times, from `rhyme profile`; 'auto': kept or measured; 'none'. 'auto' is the profile in the user's cache"
        " for this model, hardware, number format and tensor-parallel size. Where there is none, the run measures a "
        "quick one at its start (under a minute) and keeps it. On a GPU it also measures an engine without "
        "speculation, which takes one more engine start. With 'none' drafts follow the fixed rules of --histospec.*. "
        "Reproducible runs have none; emulated ones have the emulated profile.",
        kind="profile",
    )

    def check(self) -> None:
        if not self.profile:
            raise SettingsError("--latency.profile must be 'auto', 'none' or a profile's file, got nothing")


@dataclass(frozen=True)
class EmulateSettings(Settings):
    """Real engines and a real trainer whose every step takes as long as another machine's would."""

    group: ClassVar[str] = "emulate"
    title: ClassVar[str] = "Emulation: this run's real steps stretched to the times of another machine."

    profile: str = option(
        "",
        "Profile of the machine to emulate: every engine step sleeps until the profile's time for it is over. All that "
        "the run prints and shows then says 'emulated'. If not given: no emulation.",
        kind="file",
        expert=True,
    )
    train_s: float = option(
        0.0,
        "With --emulate.profile: seconds the policy's training of a step takes at least.",
        low=0,
        high=86400,
        expert=True,
    )

    def check(self) -> None:
        if self.train_s and not self.profile:
            raise SettingsError("--emulate.train_s needs --emulate.profile")
