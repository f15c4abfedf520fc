"""The choice of axis, scale and smoothing, which tabs of a run and comparisons share and keep in the address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, Query

from rhyme_openrlhf.api.read.curves import Axis
from rhyme_openrlhf.api.read.smoothing import MOST_WEIGHT, WEIGHTS
from rhyme_openrlhf.webui.pages.rendering import Page

Scale = Literal["linear", "log"]
Choice = tuple[str, list[tuple[str, bool, str]]]
"""A choice on a page: its name, and (title, is chosen, address) of each answer."""
AXES: dict[Axis, str] = {"step": "Steps", "time": "Time", "tokens": "Tokens", "samples": "Samples"}
SCALES: dict[Scale, str] = {"linear": "Linear", "log": "Log"}


@dataclass(frozen=True)
class CurveView:
    """Axis, scale and smoothing of curves. `query`: the same choice as the query of each figure."""

    axis: Axis = "step"
    scale: Scale = "linear"
    smooth: float = 0.0

    @property
    def query(self) -> str:
        return self.query_with()

    def query_with(self, **more: Any) -> str:
        """Return the query with further options of a figure."""
        values = {**self.chosen, **more}
        return f"?{urlencode(values, doseq=True)}" if values else ""

    @property
    def chosen(self) -> dict[str, Any]:
        """Return what differs from the usual."""
        usual = CurveView()
        return {name: value for name, value in vars(self).items() if value != getattr(usual, name)}

    def switches(self, page: Page) -> list[Choice]:
        """Return all choices of a page with curves."""
        weights = [("Off", 0.0), *((f"{weight:g}", weight) for weight in WEIGHTS)]
        return [
            self.axis_switch(page, AXES),
            ("Scale", [(title, self.scale == name, _link(page, "scale", name)) for name, title in SCALES.items()]),
            ("Smooth", [(title, self.smooth == weight, _link(page, "smooth", weight)) for title, weight in weights]),
        ]

    def axis_switch(self, page: Page, axes: dict[Axis, str]) -> Choice:
        """Return the choice among these axes."""
        return "Over", [(title, self.axis == name, _link(page, "axis", name)) for name, title in axes.items()]


def _link(page: Page, name: str, value: Any) -> str:
    """Return the page's address with this choice; the usual one is left out."""
    return page.url_with(**{name: None if value == getattr(CurveView(), name) else value})


def _view(
    axis: Annotated[Axis, Query()] = "step",
    scale: Annotated[Scale, Query()] = "linear",
    smooth: Annotated[float, Query(ge=0, le=MOST_WEIGHT)] = 0.0,
) -> CurveView:
    return CurveView(axis, scale, smooth)


CurveViewDep = Annotated[CurveView, Depends(_view)]
