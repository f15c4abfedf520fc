"""Proposals of what would make a run fit: each does, and none is made where nothing lacks."""

from typing import Any

import pytest

pytest.importorskip("fastapi")

from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.api.launch.fit import Gpus, lack, proposals
from rhyme_openrlhf.api.launch.spec import Arguments, merged
from rhyme_openrlhf.run.model_shape import Shapes, model_shape
from tests.examples import examples
from tests.run.model_configurations import QWEN3_8B

GIB = 2**30
found_shape = model_shape(QWEN3_8B)
assert found_shape is not None
SHAPE_8B = Shapes(found_shape)


def run(**groups: Any) -> Arguments:
    base: Arguments = {
        "actor": {"model_name_or_path": "an/8b", "num_nodes": 1, "num_gpus_per_node": 4},
        "ref": {"num_nodes": 1, "num_gpus_per_node": 4},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"remote_url": "reward.py"},
        "vllm": {"num_engines": 4, "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9},
        "ds": {"zero_stage": 3},
        "rollout": {"n_samples_per_prompt": 4},
        "algo": {"advantage.estimator": "group_norm"},
    }
    return merged(base, groups)


def edits(change: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for group, name, value in change.values:
        found.setdefault(group, {})[name] = value
    return found


def test_nothing_is_proposed_for_a_run_that_fits_or_for_unknown_gpus() -> None:
    assert proposals(run(), SHAPE_8B, Gpus(12, 80 * GIB)) == []
    assert proposals(run(), SHAPE_8B, Gpus(None, None)) == []
    assert proposals(run(), None, Gpus(None, 8 * GIB)) == []


def test_too_few_gpus_are_met_by_the_nearest_changes() -> None:
    gpus = Gpus(11, 80 * GIB)
    assert lack(run(), SHAPE_8B, gpus) == "The run needs 12 GPUs, but the cluster has 11."
    found = {change.words: change.by_key for change in proposals(run(), SHAPE_8B, gpus)}
    assert found["fewer engines"] == {"vllm.num_engines": 3}
    assert found["policy and reference model on the same GPUs"] == {"train.colocate_actor_ref": True}


def test_an_engine_too_large_for_its_gpu_is_split() -> None:
    gpus = Gpus(12, 16 * GIB)
    found = proposals(run(actor={"num_gpus_per_node": 4}, ds={"adam_offload": True}), SHAPE_8B, gpus)
    assert found and all("--vllm.tensor_parallel_size" in change.flags for change in found)


def test_a_share_of_the_gpu_is_written_as_a_flag() -> None:
    together = run(
        train={"colocate_all": True},
        vllm={"enable_sleep": True, "gpu_memory_utilization": 0.95},
        ds={"enable_sleep": True},
    )
    found = proposals(together, SHAPE_8B, Gpus(4, 80 * GIB))
    assert found and found[0].flags.startswith("--vllm.gpu_memory_utilization 0.")


@settings(deadline=None, max_examples=examples(100))
@given(
    engines=st.integers(1, 6),
    policy=st.integers(1, 4),
    stage=st.integers(0, 3),
    share=st.sampled_from((0.5, 0.9)),
    count=st.integers(1, 12),
    memory=st.sampled_from((16, 24, 48, 80)),
    shape=st.sampled_from((SHAPE_8B, None)),
)
def test_every_proposal_fits(
    engines: int, policy: int, stage: int, share: float, count: int, memory: int, shape: Shapes | None
) -> None:
    models = {"num_nodes": 1, "num_gpus_per_node": policy}
    vllm = {"num_engines": engines, "gpu_memory_utilization": share}
    arguments = run(actor=models, ref=models, vllm=vllm, ds={"zero_stage": stage})
    gpus = Gpus(count, memory * GIB)
    found = proposals(arguments, shape, gpus)
    assert not found or lack(arguments, shape, gpus)
    for change in found:
        assert change.flags and lack(merged(arguments, edits(change)), shape, gpus) == ""
