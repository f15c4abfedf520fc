"""Colours of the figures.

The hues are Okabe and Ito's colour-blind safe ones ("Color Universal Design", 2008). Their lightness lies between the
light and the dark background: every colour has a contrast of at least 3:1 (WCAG 2.2, 1.4.11) to both. One palette
therefore serves both themes and copied pictures. Colour never stands alone: series also differ by dash or symbol, and
states by name.
"""

from __future__ import annotations

# Series take the colours in this order.
BLUE = "#3b82d6"
ORANGE = "#d9730d"
GREEN = "#0f9f78"
PURPLE = "#c05f9e"
RED = "#dc4c4c"
GOLD = "#a37f08"
CYAN = "#1b93ad"
GREY = "#7b8494"

CATEGORICAL: tuple[str, ...] = (BLUE, ORANGE, GREEN, PURPLE, RED, GOLD, CYAN, GREY)
# Dashes and symbols change together with the colour, so that series can be told apart in greyscale.
DASHES: tuple[str, ...] = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
# The same dashes in SVG's words.
_SVG_DASHES: tuple[str, ...] = ("", "6 3", "2 2", "6 2 2 2", "9 3", "9 3 2 3", "", "6 3")
SYMBOLS: tuple[str, ...] = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")

# One colour for each state of an engine (`telemetry/events.py`), the same everywhere.
STATES: dict[str, str] = {"generate": GREEN, "idle": GREY, "sync": BLUE, "switch": PURPLE}
# Causes for which an engine with nothing to run waits, in stacking order.
CAUSES: dict[str, str] = {
    "tail": ORANGE,
    "weights": CYAN,
    "sync": BLUE,
    "switch": PURPLE,
    "trainer": GOLD,
    "unexplained": RED,
}
# States and causes of waiting: the colours of the timeline's lanes.
LANES: dict[str, str] = {"generate": STATES["generate"], **CAUSES}
# Arrows cross lanes of every colour, so they have a colour of their own.
MOVE = "#8b6fe8"
# The trainer's stages share one colour and differ by pattern (`plotly`'s names), so that the lanes' colours stay
# unique.
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
    """Return the colour of the `index`-th series, from 0; the ninth series has the colour of the first."""
    return CATEGORICAL[index % len(CATEGORICAL)]


def series_dash(index: int) -> str:
    """Return the dash of the `index`-th series."""
    return DASHES[index % len(DASHES)]


def series_symbol(index: int) -> str:
    """Return the symbol of the `index`-th series."""
    return SYMBOLS[index % len(SYMBOLS)]


def svg_dash(index: int) -> str:
    """Return the dash of the `index`-th series as SVG writes it."""
    return _SVG_DASHES[index % len(_SVG_DASHES)]


def faint(color: str) -> str:
    """Return a colour for the area around a line of this colour."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.16)"
