"""Updates of training steps, with upstream's own sharing among ranks and DeepSpeed's own rule of accumulation."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from rhyme_openrlhf.platform import gpu_present, shims
from rhyme_openrlhf.training import updates as module  # first: installs the shims where needed

if not gpu_present():
    shims.install()

from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.training.updates import UpdateCount, UpdateError, check_shares, micro_batches_of_ranks
from tests.training.made_up_ranks import Ranks


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 8))
def test_ranks_share_as_upstream_says(sizes: list[int], ranks: int, micro_batch: int) -> None:
    if len(sizes) < ranks:
        return  # upstream raises
    group = Ranks(ranks, micro_batch, accumulation=1)
    group.train(sizes)
    of_ranks = micro_batches_of_ranks(sizes, ranks, micro_batch)
    assert of_ranks == [engine.micro_steps for engine in group.engines]
    if len(set(of_ranks)) == 1:
        check_shares(3, sizes, ranks, micro_batch)
        return
    with pytest.raises(UpdateError, match=rf"step 3 has {sum(sizes)} samples, of which {ranks} ranks would train"):
        check_shares(3, sizes, ranks, micro_batch)


def counted(monkeypatch: pytest.MonkeyPatch, group: Ranks, steps: list[int], train_batch: int) -> tuple[list[Any], Any]:
    """The metrics of steps with these numbers of samples, in experiences of two, and what was recorded."""
    recorded: list[Any] = []
    monkeypatch.setattr(module.ray, "get", lambda refs, timeout: refs)
    count = UpdateCount(
        NS(record=lambda event, source: recorded.append(event)), {"policy": group}, train_batch, dynamic=False
    )
    metrics = []
    for step, samples in enumerate(steps, start=1):
        before = count.now()
        group.train([2] * (samples // 2))
        metrics.append(tuple(count.check(step, samples, before).values()))
    return metrics, recorded


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_each_step_that_divides_is_applied_in_itself(
    monkeypatch: pytest.MonkeyPatch, micro_batch: int, accumulation: int
) -> None:
    metrics, recorded = counted(monkeypatch, Ranks(2, micro_batch, accumulation), [16, 8, 16], train_batch=8)
    assert metrics == [(2, 2 * accumulation), (1, accumulation), (2, 2 * accumulation)] and recorded == []


def test_what_a_smaller_step_leaves_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch's last step, as in OpenRLHF: it has no update, and every later one mixes two steps."""
    metrics, recorded = counted(monkeypatch, Ranks(1, 2, 4), [8, 4, 8, 8], train_batch=8)
    assert metrics == [(1, 4), (0, 2), (1, 4), (1, 4)]
    (note,) = recorded
    assert isinstance(note, Note) and note.level == "warning"
    assert note.text == (
        "step 2 left 2 of the policy's micro-batches without an optimizer step, which takes 4 (--train.batch_size 8; "
        "the step had 4 samples): the next step applies them, as in OpenRLHF, and each later update mixes two steps"
    )


def test_a_step_that_divides_and_leaves_something_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream leaves out what fills no micro-batch: 8 samples of a rank, in micro-batches of 3."""
    with pytest.raises(UpdateError, match="step 1 left 2 of the policy's micro-batches"):
        counted(monkeypatch, Ranks(1, 3, 4), [8], train_batch=8)
