"""Does it learn as it should: reward over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import plotly.graph_objects as go

from rhyme_openrlhf.api.curves import Axis, Curve
from rhyme_openrlhf.webui import text
from rhyme_openrlhf.webui.figures.base import has_values, lines


class OnAxis(Protocol):
    """Options with an axis."""

    @property
    def axis(self) -> Axis: ...


def reward(found: Mapping[str, Curve], options: OnAxis) -> go.Figure:
    """Mean reward a step: as the trainer reports it, and as the rollout does where there is no trainer's."""
    curve = found["reward"] if has_values(found["reward"]) else found["rollout_reward"]
    values = [value for value in curve.values if value is not None]
    description = "Mean reward of each step's samples."
    if values:
        description += (
            f" First {text.number(values[0])}, last {text.number(values[-1])}, "
            f"lowest {text.number(min(values))}, highest {text.number(max(values))}."
        )
    return lines([curve], options.axis, "Mean reward", description, "No step of this run has reported a reward yet.")
