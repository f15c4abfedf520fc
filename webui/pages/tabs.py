"""The choice of axis and scale, which several tabs of a run share and keep in the address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, Query

from rhyme_openrlhf.api.read.curves import Axis
from rhyme_openrlhf.webui.pages.rendering import Page


@dataclass(frozen=True)
class CurveView:
    """The axis and scale of a tab's curves. `query`: the same choice as the query of each figure."""

    axis: Axis
    scale: Literal["linear", "log"]

    @property
    def query(self) -> str:
        return self.query_with()

    def query_with(self, **more: Any) -> str:
        """Return the query with further options of a figure."""
        chosen = {"axis": self.axis, "scale": self.scale}
        usual = {"axis": "step", "scale": "linear"}
        values = {name: value for name, value in {**chosen, **more}.items() if usual.get(name) != value}
        return f"?{urlencode(values, doseq=True)}" if values else ""

    def switches(self, page: Page, scales: bool = True) -> list[tuple[str, list[tuple[str, bool, str]]]]:
        """Return the choices as (name, [(title, is chosen, address)]). `scales`: the tab has figures with a scale."""
        found = [
            (
                "Over",
                [
                    ("Steps", self.axis == "step", page.url_with(axis=None)),
                    ("Time", self.axis == "time", page.url_with(axis="time")),
                ],
            )
        ]
        if scales:
            found.append(
                (
                    "Scale",
                    [
                        ("Linear", self.scale == "linear", page.url_with(scale=None)),
                        ("Log", self.scale == "log", page.url_with(scale="log")),
                    ],
                )
            )
        return found


def _view(
    axis: Annotated[Axis, Query()] = "step", scale: Annotated[Literal["linear", "log"], Query()] = "linear"
) -> CurveView:
    return CurveView(axis, scale)


CurveViewDep = Annotated[CurveView, Depends(_view)]
