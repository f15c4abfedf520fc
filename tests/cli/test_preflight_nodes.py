"""Each GPU node of a cluster says what it has before a run starts: two nodes with pretended drivers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.cli import demo, preflight_gpus, upstream
from rhyme_openrlhf.cli.preflight_gpus import NodeFacts, PreflightError
from rhyme_openrlhf.platform.cluster import Node, Reply
from rhyme_openrlhf.run import resources
from tests import nvml

pytest.importorskip("openrlhf")
TORCH = """
class version: cuda = "13.0"
class cuda: is_available = staticmethod(lambda: {available})
"""
OLD = "550.54.15"


def machine(folder: Path, driver: str) -> dict[str, str]:
    """The environment of a node with four GPUs, which torch sees with a driver that is new enough."""
    folder.mkdir()
    place = nvml.written(folder, gpus=4, driver=driver)
    (place / "torch.py").write_text(TORCH.format(available=driver != OLD))
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    nvcc.chmod(0o755)
    return {"PYTHONPATH": f"{place}:{os.environ.get('PYTHONPATH', '')}", "CUDA_HOME": str(folder)}


@pytest.fixture(scope="module")
def address(starts_ray: None, starts_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray of two nodes, the second with a driver that is too old."""
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("nodes")
    good, old = (machine(folder / driver, driver) for driver in ("580.65.06", OLD))
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 4, "env_vars": good})
    cluster.add_node(num_cpus=1, num_gpus=4, env_vars=old)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    """A run of three GPUs."""
    return upstream.parse(demo.arguments(str(tmp_path)))


def test_a_node_whose_driver_is_too_old_is_named(
    address: str, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    old = f"the NVIDIA driver {OLD} lists 4 GPU(s) (Pretended GPU), but torch sees none, because the driver is too old"
    # The other node alone has GPUs enough, but Ray may take this one.
    said = preflight_gpus.check_gpus(args, True)
    assert old in said and said.startswith("node ") and said.endswith("(if Ray places a part of the run there)")
    assert said.count("node ") == 1
    args.vllm.num_engines = 7
    with pytest.raises(PreflightError, match="install driver 580 or newer") as error:
        preflight_gpus.check_gpus(args, True)
    assert "\n" not in str(error.value)


def test_a_node_that_does_not_answer_is_named(
    address: str, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PreflightError, match=r"waited 0.001 s for node [\d.]+, [\d.]+ to say its driver and the size"):
        preflight_gpus.check_nodes(args, 0.001)


def reply(node: NodeFacts, store: int = 0) -> Reply:
    """The answer of a node with three GPUs and an object store of `store` bytes."""
    return Reply(Node("ab", "10.0.0.7", 3, store, False), node, "", 0.0, 1.0)


@pytest.mark.parametrize(
    ("node", "options", "words"),
    [
        (NodeFacts("", 80 * 2**30, 2**40), {}, ""),
        (NodeFacts("", 2**20, 2**40), {}, "a GPU of the engine needs at least"),
        (
            NodeFacts("", 80 * 2**30, 2**26),
            {"transport": "buffer"},
            "/dev/shm has 64.0 MiB, but the weight buffer needs",
        ),
        (NodeFacts("", 80 * 2**30, 2**26), {"transport": "openrlhf"}, ""),
    ],
)
def test_memory_and_shared_memory_of_a_node_are_planned(
    node: NodeFacts, options: dict[str, str], words: str, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.weights.transport = options.get("transport", "auto")
    monkeypatch.setattr(preflight_gpus, "_answers", lambda timeout_s: [reply(node)])
    if not words:
        assert preflight_gpus.check_nodes(args) == []
        return
    with pytest.raises(PreflightError, match="^node 10.0.0.7: ") as error:
        preflight_gpus.check_nodes(args)
    assert words in str(error.value)


def test_this_machine_has_shared_memory() -> None:
    assert preflight_gpus.facts().shm == os.statvfs(resources.SHM).f_blocks * os.statvfs(resources.SHM).f_frsize


def test_rays_object_store_counts_against_shared_memory(args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeFacts("", 80 * 2**30, 4 * 2**30)
    args.weights.transport = "buffer"
    for store, words in (
        (2 * 2**30, []),
        (2**42, ["Ray's object store may take 4,096.0 GiB of the 4.0 GiB of /dev/shm"]),
    ):
        monkeypatch.setattr(preflight_gpus, "_answers", lambda timeout_s, store=store: [reply(node, store)])
        said = preflight_gpus.check_nodes(args)
        assert [sentence.partition(", and the weight")[0].partition(": ")[2] for sentence in said] == words
