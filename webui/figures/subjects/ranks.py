"""Figures of the length ranking between two epochs: rank correlation, and outcomes of predicted groups."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import RankStabilityRow
from rhyme_openrlhf.telemetry.events import RankStability
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.chart import Content
from rhyme_openrlhf.webui.figures.drawing.series import Bars, Dots, Line
from rhyme_openrlhf.webui.figures.run_figure import RunChart, RunFigure, Window
from rhyme_openrlhf.webui.site import text

NO_STABILITY = (
    "Not recorded by this run. It compares how two epochs rank the same prompts by length, so it needs two epochs with "
    "the same prompts, and history workers (--histospec.enable)."
)
# Most bars that can still be told apart.
MOST_EPOCHS = 200
# The four shares that add up to 1, from the bottom: field, name, colour. `history/ranks.py` defines them.
RANK_SHARES: tuple[tuple[str, str, str], ...] = (
    ("accurate", "Same group or lower", palette.GREEN),
    ("not_last", "Higher, not among its longest", palette.CYAN),
    ("within_reach", "Higher, within reach", palette.GOLD),
    ("migrated", "Higher, beyond reach", palette.RED),
)


def _stability(session: Session, run: Run, window: Window) -> list[RankStabilityRow]:
    query = select(RankStabilityRow).where(RankStabilityRow.run_id == run.id).order_by(RankStabilityRow.epoch.desc())
    return list(reversed(session.scalars(query.limit(window.points)).all()))


def _shares(session: Session, run: Run, window: Window) -> list[RankStability]:
    found = latest(session, run, RankStability.kind, RankStability, MOST_EPOCHS, by=("epoch",)).bodies
    return sorted(found, key=lambda one: one.epoch)


def _correlation(rows: Sequence[RankStabilityRow]) -> Content | None:
    known = [row for row in rows if row.correlation is not None]
    if not known:
        return None
    words = [text.counted(row.prompts, "prompt") for row in known]
    x, y = [row.epoch for row in known], [row.correlation for row in known]
    line = Line("Rank correlation", x, y, words, "epoch %{x}: %{y:.3f}, %{text}<extra></extra>")
    last = known[-1]
    return Content([line], f"Epoch {last.epoch}: {text.number(last.correlation)} over {last.prompts} prompts.")


def _outcomes(rows: Sequence[RankStability]) -> Content | None:
    """Return the outcomes of the groups that the epoch before predicted (RhymeRL, figure 9 and table 2)."""
    known = [row for row in rows if row.accurate is not None]
    if not known:
        return None
    epochs, series, facts = [row.epoch for row in known], [], []
    for field, name, color in RANK_SHARES:
        shares = [getattr(row, field) for row in known]
        words = [
            f"epoch {row.epoch}: {name.lower()} {text.percent(share)} of {text.counted(row.responses or 0, 'response')}"
            for row, share in zip(known, shares, strict=True)
        ]
        series.append(Bars(name, epochs, shares, words, color=color))
        facts.append(f"{name.lower()} {text.percent(shares[-1])}")
    just_above = Dots(
        "Right or just above", epochs,
        [None if row.near_boundary is None else row.near_boundary + (row.accurate or 0.0) for row in known],
        [
            f"epoch {row.epoch}: {text.percent(row.near_boundary)} moved up, into the next group's shorter half"
            for row in known
        ],
        color=palette.PURPLE, symbol="diamond", size=9,
    )  # fmt: skip
    last = known[-1]
    groups = text.counted(last.groups or 0, "group")
    return Content([*series, just_above], f"Epoch {last.epoch}, {groups}: {', '.join(facts)}.")


FIGURES: tuple[RunFigure, ...] = (
    RunChart(
        "rank_stability", "Rank stability", _stability,
        content=_correlation, x="Epoch", y="Spearman correlation", top=1.05, empty=NO_STABILITY,
        description="How similarly two consecutive epochs rank the same prompts by response length; 1 means the "
        "same order.",
    ),
    RunChart(
        "rank_shares", "Outcomes of predicted groups", _shares,
        content=_outcomes, x="Epoch", y="Share of responses", share=True, top=1.02, empty=NO_STABILITY,
        description="Shares of an epoch's responses by the outcome of the length group predicted from the epoch "
        "before.",
    ),
)  # fmt: skip
