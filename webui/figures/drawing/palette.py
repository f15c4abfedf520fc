"""The figures' colours.

Okabe and Ito's colour-blind safe hues ("Color Universal Design", 2008), moved to a lightness between the light and the
dark background: every colour has a contrast of at least 3:1 (WCAG 2.2, 1.4.11) to both, so one palette serves both
themes and a copied picture. Colour never stands alone: series also differ by dash or symbol, states by their name.
"""

from __future__ import annotations

# In the order in which series take them.
BLUE = "#3b82d6"
ORANGE = "#d9730d"
GREEN = "#0f9f78"
PURPLE = "#c05f9e"
RED = "#dc4c4c"
GOLD = "#a37f08"
CYAN = "#1b93ad"
GREY = "#7b8494"

CATEGORICAL: tuple[str, ...] = (BLUE, ORANGE, GREEN, PURPLE, RED, GOLD, CYAN, GREY)
# With the colour, so that two series can be told apart in grey too.
DASHES: tuple[str, ...] = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS: tuple[str, ...] = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")

# An engine's states (`telemetry/events.py`), one colour each, everywhere.
STATES: dict[str, str] = {"generate": GREEN, "idle": GREY, "sync": BLUE, "switch": PURPLE}
# What an engine with nothing to run waits for, in the order in which they are stacked.
CAUSES: dict[str, str] = {
    "tail": ORANGE,
    "weights": CYAN,
    "sync": BLUE,
    "switch": PURPLE,
    "trainer": GOLD,
    "unexplained": RED,
}
# What an engine runs, or what it waits for: the colours of the timeline's lanes.
LANES: dict[str, str] = {"generate": STATES["generate"], **CAUSES}
# Arrows lie over lanes of every colour: theirs is none of those.
MOVE = "#8b6fe8"
# The trainer's stages share one colour and differ by pattern (`plotly`'s names), so that lanes keep theirs.
STAGE = GREY
STAGES: dict[str, str] = {
    "train": "",
    "experience": "/",
    "sync": "\\",
    "check": ".",
    "checkpoint": "x",
    "evaluate": "+",
}


def series_color(index: int) -> str:
    """The colour of the `index`-th series, from 0; the ninth takes the first again."""
    return CATEGORICAL[index % len(CATEGORICAL)]


def series_dash(index: int) -> str:
    """The dash of the `index`-th series."""
    return DASHES[index % len(DASHES)]
