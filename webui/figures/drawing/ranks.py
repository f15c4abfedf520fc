"""Stability of the length ranking between two epochs: rank correlation, and outcomes of predicted groups."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import plotly.graph_objects as go

from rhyme_openrlhf.api.store.record import RankStabilityRow
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import MARKED_POINTS, blank, pattern
from rhyme_openrlhf.webui.site import text

NO_STABILITY = (
    "Not recorded by this run. It compares how two epochs rank the same prompts by length, so it needs two epochs with "
    "the same prompts, and history workers (--histospec.enable)."
)


class RankShares(msgspec.Struct):
    """The event `rank_stability`: shares of an epoch's responses by the outcome of their predicted group.

    Fields are None in records of older versions; `telemetry/events.py` defines them.
    """

    epoch: int
    groups: int | None = None
    responses: int | None = None
    accurate: float | None = None
    near_boundary: float | None = None
    not_last: float | None = None
    within_reach: float | None = None
    migrated: float | None = None


# The four shares that add up to 1, from the bottom: field, name, colour. `history/ranks.py` defines them.
RANK_SHARES: tuple[tuple[str, str, str], ...] = (
    ("accurate", "Same group or lower", palette.GREEN),
    ("not_last", "Higher, not among its longest", palette.CYAN),
    ("within_reach", "Higher, within reach", palette.GOLD),
    ("migrated", "Higher, beyond reach", palette.RED),
)


def stability(rows: Sequence[RankStabilityRow], options: object) -> go.Figure:
    """Draw the rank correlation of each epoch with the epoch before."""
    description = (
        "How similarly two consecutive epochs rank the same prompts by response length; 1 means the same order."
    )
    known = [row for row in rows if row.correlation is not None]
    if not known:
        return blank(description, NO_STABILITY)
    last = known[-1]
    figure = blank(f"{description} Epoch {last.epoch}: {text.number(last.correlation)} over {last.prompts} prompts.")
    figure.add_trace(
        go.Scatter(
            x=[row.epoch for row in known], y=[row.correlation for row in known], name="Rank correlation",
            text=[text.counted(row.prompts, "prompt") for row in known],
            mode="lines+markers" if len(known) < MARKED_POINTS else "lines",
            line={"color": palette.BLUE, "width": 2}, marker={"size": 7},
            hovertemplate="epoch %{x}: %{y:.3f}, %{text}<extra></extra>",
        )
    )  # fmt: skip
    low = min(0.0, *(row.correlation or 0.0 for row in known))
    figure.update_layout(
        xaxis={"title": {"text": "Epoch"}, **_whole_ticks(len(known))},
        yaxis={"title": {"text": "Spearman correlation"}, "range": [low, 1.05]},
    )
    return figure


def rank_shares(rows: Sequence[RankShares], options: object) -> go.Figure:
    """Draw the outcomes of the groups that the epoch before predicted (RhymeRL, figure 9 and table 2)."""
    description = "Shares of an epoch's responses by the outcome of the length group predicted from the epoch before."
    known = [row for row in rows if row.accurate is not None]
    if not known:
        return blank(description, NO_STABILITY)
    last = known[-1]
    words = ", ".join(f"{name.lower()} {text.percent(getattr(last, field))}" for field, name, _ in RANK_SHARES)
    figure = blank(f"{description} Epoch {last.epoch}, {text.counted(last.groups or 0, 'group')}: {words}.")
    for place, (field, name, color) in enumerate(RANK_SHARES):
        figure.add_trace(
            go.Bar(
                x=[row.epoch for row in known], y=[getattr(row, field) for row in known], name=name,
                text=[
                    f"epoch {row.epoch}: {name.lower()} {text.percent(getattr(row, field))} of "
                    f"{text.counted(row.responses or 0, 'response')}"
                    for row in known
                ],
                textposition="none", hovertemplate="%{text}<extra></extra>",
                marker={"color": color, "line": {"width": 0}, "pattern": pattern(place, len(known))},
            )
        )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=[row.epoch for row in known],
            y=[None if row.near_boundary is None else row.near_boundary + (row.accurate or 0.0) for row in known],
            name="Right or just above", mode="markers",
            marker={"color": palette.PURPLE, "symbol": "diamond", "size": 9},
            text=[
                f"epoch {row.epoch}: {text.percent(row.near_boundary)} moved up, into the next group's shorter half"
                for row in known
            ],
            hovertemplate="%{text}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout(
        barmode="stack", showlegend=True, hovermode="closest",
        xaxis={"title": {"text": "Epoch"}, **_whole_ticks(len(known))},
        yaxis={"title": {"text": "Share of responses"}, "tickformat": ".0%", "range": [0, 1.02]},
    )  # fmt: skip
    return figure


def _whole_ticks(count: int) -> dict[str, int]:
    # With fewer epochs, an axis would have ticks at half epochs.
    return {"dtick": 1} if count < 12 else {}
