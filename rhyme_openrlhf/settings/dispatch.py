"""Settings of dispatch: by what prompts are spread over the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, option


@dataclass(frozen=True)
class DispatchSettings(Settings):
    """Which engine a prompt goes to."""

    group: ClassVar[str] = "dispatch"
    title: ClassVar[str] = "Dispatch: which engine each prompt goes to."

    by_history: bool = option(
        True,
        "Give each engine as much predicted work as the others: the tokens that the prompts were answered with last "
        "time. Without history, or with this off, as OpenRLHF: to the engine with the fewest samples.",
    )
