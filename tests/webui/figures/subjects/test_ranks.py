"""Agreement of two epochs' ranks of the same prompts, and results of predicted groups."""

import pytest

from rhyme_openrlhf.api.store.record import RankStabilityRow
from rhyme_openrlhf.telemetry.events import RankStability
from rhyme_openrlhf.webui.figures.subjects.ranks import RANK_SHARES
from tests.webui.figure_rows import draw, traces


def test_stability_leaves_out_epochs_without_a_correlation() -> None:
    rows = [RankStabilityRow(epoch=e, correlation=c, prompts=12) for e, c in ((2, None), (3, 0.5), (4, 0.75))]
    figure = draw("rank_stability", rows)
    assert list(figure.data[0].x) == [3, 4] and "Epoch 4: 0.750 over 12 prompts" in figure.layout.meta["description"]
    assert figure.layout.yaxis.range[0] == 0


def test_the_four_shares_are_stacked_and_the_nearly_right_ones_marked() -> None:
    rows = [
        RankStability(2, 0.5, 12),  # an older writer's
        RankStability(
            3, 0.5, 12, 8, 96, accurate=0.7, near_boundary=0.2, not_last=0.2, within_reach=0.06, migrated=0.04
        ),
    ]
    figure = draw("rank_shares", rows)
    drawn = traces(figure)
    bars = [drawn[name] for _, name, _ in RANK_SHARES]
    assert all(list(bar.x) == [3] for bar in bars) and sum(bar.y[0] for bar in bars) == pytest.approx(1.0)
    assert drawn["Right or just above"].y[0] == pytest.approx(0.9)
    assert "Epoch 3, 8 groups: same group or lower 70.0%" in figure.layout.meta["description"]
    assert bars[3].text[0] == "epoch 3: higher, beyond reach 4.0% of 96 responses"
