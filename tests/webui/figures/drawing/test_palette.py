"""The palette is readable on both backgrounds and covers every state and cause."""

import itertools
from typing import get_args

import pytest

from rhyme_openrlhf.telemetry.events import BubbleCause, EngineState
from rhyme_openrlhf.telemetry.metrics import UNEXPLAINED
from rhyme_openrlhf.webui.figures.drawing import palette

# `--surface` of tokens.css.
LIGHT, DARK = "#ffffff", "#15181d"
# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
# severity 1.0, on linear RGB.
BLINDNESS = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def linear(color: str) -> list[float]:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(a: str, b: str) -> float:
    light = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(one), strict=True)) for one in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


def seen(color: str, kind: str) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of the colour as seen with this blindness."""
    rgb = [min(1.0, max(0.0, sum(w * c for w, c in zip(row, linear(color), strict=True)))) for row in BLINDNESS[kind]]
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    ratios = [sum(w * c for w, c in zip(row, rgb, strict=True)) / n for row, n in zip(matrix, white, strict=True)]
    x, y, z = (r ** (1 / 3) if r > 216 / 24389 else (24389 / 27 * r + 16) / 116 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("color", palette.CATEGORICAL)
@pytest.mark.parametrize("background", [LIGHT, DARK])
def test_every_color_is_readable_on_both_backgrounds(color: str, background: str) -> None:
    assert contrast(color, background) >= 3.0


@pytest.mark.parametrize("kind", BLINDNESS)
def test_the_colors_are_told_apart_with_either_blindness(kind: str) -> None:
    # Four times what can just be noticed (CIE76: 2.3); dash and symbol differ besides.
    for a, b in itertools.combinations(palette.CATEGORICAL[:4], 2):
        distance = sum((p - q) ** 2 for p, q in zip(seen(a, kind), seen(b, kind), strict=True)) ** 0.5
        assert distance >= 9.2, (a, b, distance)


def test_every_state_and_cause_has_a_color_of_its_own() -> None:
    assert set(palette.STATES) == set(get_args(EngineState))
    assert set(palette.CAUSES) == {cause or UNEXPLAINED for cause in get_args(BubbleCause)}
    assert len(set(palette.STATES.values())) == len(palette.STATES)
    assert len(set(palette.CAUSES.values())) == len(palette.CAUSES)


def test_series_differ_by_dash_or_color_beyond_the_palette() -> None:
    drawn = {(palette.series_color(i), palette.series_dash(i)) for i in range(8)}
    assert len(drawn) == 8
