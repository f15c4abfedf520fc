"""Engines of all layouts on the same devices: by Ray's own placement, and OpenRLHF's own function.

Ray's GPUs are pretended; which of them each engine's processes get is what is looked at. Never run with real ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.scheduling.layouts import LayoutError, LayoutPlan, Tail
from rhyme_openrlhf.settings.config import RhymeSettings

ray = pytest.importorskip("ray")
pytest.importorskip("openrlhf")

PER_WORKER, BUNDLES = "VLLM_RAY_PER_WORKER_GPUS", "VLLM_RAY_BUNDLE_INDICES"


class Worker:
    """A worker that says which GPU it has, started as vLLM's Ray executor does (v1/executor/ray_executor_v2.py)."""

    def gpu(self) -> list[int]:
        return list(ray.get_gpu_ids())


class Engine:
    """Has its devices as OpenRLHF's engine actor has: one by itself, or a worker in each bundle it is named."""

    async def __init__(self, **arguments: Any) -> None:  # type: ignore[misc]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._given = arguments
        self._gpus = [ray.get_gpu_ids()]
        if arguments["bundle_indices"] is not None:
            self._gpus = []
            group = ray.util.get_current_placement_group()
            for bundle in arguments["bundle_indices"]:
                strategy = PlacementGroupSchedulingStrategy(group, bundle, True)
                worker = ray.remote(num_cpus=0, num_gpus=arguments["num_gpus"], scheduling_strategy=strategy)(Worker)
                self._gpus.append(await worker.remote().gpu.remote())
        self.told: list[str] = []

    def ready(self) -> bool:
        return True

    def proof(self) -> None:
        """Nothing had to be proved."""

    def visible(self) -> str | None:
        """What CUDA, and so torch, would see."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def gpus(self) -> list[int]:
        """Those of its ranks, in order."""
        return [gpu for of_rank in self._gpus for gpu in of_rank]

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in self._given.items() if name not in ("history_workers", "rhyme", "parts")}

    def kv_cache_mb(self) -> int:
        return int(self._given["rhyme"].cpu.kv_cache_mb)

    def sleep_kv(self) -> None:
        self.told.append("sleep_kv")

    def wake_kv(self) -> None:
        self.told.append("wake_kv")

    def heard(self) -> list[str]:
        return self.told


@pytest.fixture(scope="module")
def cluster(starts_ray: None, starts_cluster: None) -> Iterator[None]:
    # Ray's processes do not find the tests.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    yield
    ray.shutdown()


def create(plan: LayoutPlan, monkeypatch: pytest.MonkeyPatch, shared: Any = None) -> list[Any]:
    """As a run does."""
    from rhyme_openrlhf.engine.factory import EngineFactory  # first: installs the shims where needed
    from rhyme_openrlhf.training import engines as layout_placement

    import openrlhf.trainer.ray.vllm_engine as upstream  # isort: skip

    order: list[str] = []
    real = layout_placement._call

    def call(engines: list[Any], method: Any, services: Any) -> None:
        order.append(f"{method.__name__} of {len(engines)}")
        real(engines, method, services)

    monkeypatch.setattr(layout_placement, "_call", call)
    factory = EngineFactory(
        RhymeSettings(),
        [],
        1,
        ray.remote(Engine),
        lambda index, _: order.append(f"start {index}"),
        bool(plan.device_shares),
        # Those of a run would import vLLM in each process.
        parts=lambda engine: {},
    )
    monkeypatch.setattr(upstream, "RolloutRayActor", factory)
    services: Any = SimpleNamespace(layouts=plan, settings=RhymeSettings(), record=lambda *_: None)
    both = layout_placement.with_tail_layouts(upstream.create_vllm_engines, factory, services)
    # As openrlhf/cli/train_ppo_ray.py calls it.
    engines = both(plan.engines, plan.size, "model", 1, False, True, False, 100, shared, 0.95, False, None)
    create.order = order  # type: ignore[attr-defined]
    return list(engines)


def test_a_tail_engine_is_on_the_devices_of_its_aligned_engines(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four aligned engines and two of two devices, in a colocated run's placement group of four GPUs."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"GPU": 1, "CPU": 1}] * 4, strategy="PACK")
    ray.get(group.ready())
    plan = LayoutPlan(4, 1, (Tail(2, 2, 20),), 40, True, (0.4, 0.3))
    engines = create(plan, monkeypatch, group)
    gpus = ray.get([engine.gpus.remote() for engine in engines])
    assert sorted(gpu for own in gpus[:4] for gpu in own) == [0, 1, 2, 3]
    assert [set(gpus[4]), set(gpus[5])] == [{*gpus[0], *gpus[1]}, {*gpus[2], *gpus[3]}]
    assert len(gpus[4]) == len(gpus[5]) == 2
    given = ray.get([engine.given.remote() for engine in engines])
    assert [one["kv_cache_memory_bytes"] for one in given] == [m * 1024**2 for m in (40, 40, 40, 40, 20, 20)]
    assert [one["gpu_memory_utilization"] for one in given] == [0.4] * 4 + [0.3] * 2
    assert [one["tensor_parallel_size"] for one in given] == [1] * 4 + [2] * 2
    assert create.order == [f"start {index}" for index in range(6)]  # type: ignore[attr-defined]
    for engine in engines:
        ray.kill(engine)
    remove_placement_group(group)


@pytest.mark.parametrize("on_gpus", [True, False])
def test_without_colocation_all_layouts_share_a_group_of_their_own(
    cluster: None, monkeypatch: pytest.MonkeyPatch, on_gpus: bool
) -> None:
    """And where KV caches take turns, no two layouts have theirs while another starts."""
    from ray.util.placement_group import remove_placement_group

    from rhyme_openrlhf.training import engines as layout_placement

    groups: list[Any] = []
    made = layout_placement._devices
    monkeypatch.setattr(layout_placement, "_devices", lambda *asked: groups.append(made(*asked)) or groups[-1])
    plan = LayoutPlan(2, 1, (Tail(1, 2, 20),), 40, False, (0.4, 0.2) if on_gpus else ())
    engines = create(plan, monkeypatch)
    gpus = ray.get([engine.gpus.remote() for engine in engines])
    assert sorted(gpus[0] + gpus[1]) == sorted(gpus[2]) and len(gpus[2]) == 2
    assert create.order == [  # type: ignore[attr-defined]
        "start 0", "start 1", "sleep_kv of 2", "start 2", "sleep_kv of 1", "wake_kv of 2",
    ]  # fmt: skip
    assert ray.get([engine.heard.remote() for engine in engines]) == [["sleep_kv", "wake_kv"]] * 2 + [["sleep_kv"]]
    # An engine whose ranks have its GPUs knows all the same that there are some.
    assert ray.get(engines[2].visible.remote()) == (None if on_gpus else "")
    # Without GPUs KV caches are sized by settings, and nothing else is changed.
    given = ray.get([engine.given.remote() for engine in engines])
    assert all(one.get("enable_cumem_allocator", False) == on_gpus for one in given)
    assert [one["gpu_memory_utilization"] for one in given] == ([0.4, 0.4, 0.2] if on_gpus else [0.95] * 3)
    assert ray.get([engine.kv_cache_mb.remote() for engine in engines]) == ([256] * 3 if on_gpus else [40, 40, 20])

    services: Any = SimpleNamespace(layouts=plan, settings=RhymeSettings())
    with layout_placement.taking_turn(engines, 1, services):
        assert ray.get(engines[2].heard.remote())[-1] == "wake_kv"
        assert ray.get(engines[0].heard.remote())[-1] == "sleep_kv"
    assert [ray.get(engine.heard.remote())[-1] for engine in engines] == ["wake_kv", "wake_kv", "sleep_kv"]
    for engine in engines:
        ray.kill(engine)
    remove_placement_group(groups[0])


def test_devices_that_are_not_to_be_had_are_not_waited_for_without_end(cluster: None) -> None:
    from rhyme_openrlhf.training import engines as layout_placement

    with pytest.raises(RuntimeError, match=r"waited 0.5 s \(--limits.stage_s\) for 64 GPUs"):
        layout_placement._devices(64, 0.5)


def test_an_engine_over_two_nodes_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from rhyme_openrlhf.training import engines as layout_placement

    monkeypatch.setattr(layout_placement, "_nodes", lambda group, count: ["a", "a", "b", "b"])
    plan = LayoutPlan(4, 1, (Tail(1, 4),))
    with pytest.raises(LayoutError, match="do not divide into engines of 4 on one node each"):
        create(plan, monkeypatch, object())


def test_the_names_that_vllm_reads_are_upstreams() -> None:
    """What places a tail engine's ranks: OpenRLHF writes it, vLLM reads it."""
    import inspect

    import openrlhf.trainer.ray.vllm_engine as upstream
    import vllm.envs

    source = inspect.getsource(upstream)
    assert all(f'"{name}"' in source and name in vllm.envs.environment_variables for name in (PER_WORKER, BUNDLES))
