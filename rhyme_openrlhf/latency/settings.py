"""Settings of the latency model: which profile it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.options import Settings, SettingsError, option

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True)
class LatencySettings(Settings):
    """Where the step times come from that drafts are cut by."""

    group: ClassVar[str] = "latency"
    title: ClassVar[str] = "Latency model: how long a step takes, which decides how many draft tokens are worth it."

    profile: str = option(
        AUTO,
        "Profile made by `rhyme profile`; 'auto': the one for this model, hardware, number format and tensor-parallel "
        "size in the user's cache, or else a quick one (under a minute) that is measured at the start and kept; "
        "'none': no model, drafts follow the fixed rules of --histospec.*. Reproducible runs have none.",
    )

    def check(self) -> None:
        if not self.profile:
            raise SettingsError("--latency.profile must be 'auto', 'none' or a profile's file, got nothing")
