"""The demo's options: a placement for every number of GPUs, checked by OpenRLHF's own parser."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.embedded.demo import demo_arguments


@pytest.mark.parametrize(("gpus", "asked_for"), [(0, 3), (1, 1), (2, 2), (3, 3), (8, 3)])
def test_no_more_gpus_are_asked_for_than_there_are(gpus: int, asked_for: int) -> None:
    pytest.importorskip("openrlhf")
    from rhyme_openrlhf.cli import upstream
    from rhyme_openrlhf.run.resources import required_gpus

    args = upstream.parse(demo_arguments(gpus))
    # Without a GPU, Ray only pretends to have them.
    assert required_gpus(args) == asked_for
    assert args.train.colocate_all == (gpus == 1)
    assert args.vllm.enforce_eager


def test_cuda_graphs_leave_out_nothing_but_the_eager_mode() -> None:
    eager, graphs = demo_arguments(1), demo_arguments(1, cuda_graphs=True)
    assert [option for option in eager if option != "--vllm.enforce_eager"] == graphs
