"""Starts the engines of all layouts on the same devices, by OpenRLHF's own `create_vllm_engines`.

Given a placement group, OpenRLHF 0.11.2 asks for a fifth of a GPU for each rank of an engine, in the bundle of its
device, so that several ranks share it (trainer/ray/vllm_engine.py; its colocated runs do that). So all layouts get one
group: colocated runs' own, or else one that is made here as OpenRLHF would make it for the aligned engines alone.
Engine n of size s is on devices n*s to (n+1)*s of the group: a tail engine is on those of the aligned engines whose
samples it is to get.

Invariants: a layout starts when the one before it has started, because vLLM wants what it is to take free at its
start; where KV caches take turns, those of the layouts that have started sleep meanwhile, and in the end the aligned
one is awake; an engine is on one node. Never run on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openrlhf.trainer.ray.utils as upstream
import ray
from ray.util.placement_group import placement_group, placement_group_table

from rhyme_openrlhf.engine.calls import DeviceCalls, RemoteMethod
from rhyme_openrlhf.engine.factory import EngineFactory
from rhyme_openrlhf.scheduling.layouts import ALIGNED, check_nodes
from rhyme_openrlhf.telemetry.services import Layouts, RunServices
from rhyme_openrlhf.training.base_trainer import wait_for_engines
from rhyme_openrlhf.training.layouts import engine_arguments, layout_settings


def with_tail_layouts(create: Callable[..., list[Any]], factory: EngineFactory, services: RunServices) -> Any:
    """Upstream's `create_vllm_engines`, which makes the engines of all layouts, aligned ones first."""
    plan = services.layouts
    assert plan is not None
    parameters = inspect.signature(create)

    def create_all(*args: Any, **kwargs: Any) -> list[Any]:
        asked = parameters.bind(*args, **kwargs).arguments
        if asked.get("shared_pg") is None:
            asked["shared_pg"] = _devices(plan.devices, services.settings.limits.stage_s)
        check_nodes(_nodes(asked["shared_pg"], plan.devices), plan.sizes)
        engines: list[list[Any]] = []
        for layout, size in enumerate(plan.sizes):
            if engines:
                _make_room(engines[-1], plan, services)
            factory.use(layout_settings(services.settings, plan, layout), engine_arguments(plan, layout))
            of_layout = {"num_engines": plan.devices // size, "tensor_parallel_size": size}
            engines.append(create(**{**asked, **of_layout}))
        if not plan.both_awake:
            _make_room(engines[-1], plan, services)
            _call(engines[ALIGNED], DeviceCalls.wake_kv, services)
        return [engine for of_layout in engines for engine in of_layout]

    return create_all


@contextmanager
def taking_turn(engines: Sequence[Any], layout: int, services: RunServices) -> Iterator[None]:
    """Within it, before any sample runs, the engines of a layout have their KV caches, whichever have room."""
    plan = services.layouts
    if plan is None or plan.both_awake or layout == ALIGNED:
        yield
        return
    aligned, own = ([engines[number] for number in plan.numbers(one)] for one in (ALIGNED, layout))
    _call(aligned, DeviceCalls.sleep_kv, services)
    _call(own, DeviceCalls.wake_kv, services)
    try:
        yield
    finally:
        _call(own, DeviceCalls.sleep_kv, services)
        _call(aligned, DeviceCalls.wake_kv, services)


def _make_room(engines: list[Any], plan: Layouts, services: RunServices) -> None:
    """For the next layout to start."""
    wait_for_engines(engines, services)
    if not plan.both_awake:
        _call(engines, DeviceCalls.sleep_kv, services)


def _call(engines: list[Any], method: RemoteMethod[[], None], services: RunServices) -> None:
    ray.get([getattr(engine, method.__name__).remote() for engine in engines], timeout=services.settings.limits.stage_s)


def _devices(count: int, limit_s: float) -> Any:
    """As upstream makes it for engines that share with nobody. Raises RuntimeError if they are not to be had."""
    group = placement_group([{"GPU": 1, "CPU": 1} for _ in range(count)], strategy="PACK")
    if not group.wait(limit_s):
        raise RuntimeError(
            f"waited {limit_s:g} s (--limits.stage_s) for {count} GPUs with a CPU core each, for the engines of all "
            "layouts: other jobs of this Ray cluster hold them, or there are fewer; see: ray status"
        )
    return group


def _nodes(group: Any, count: int) -> list[str]:
    """The node of each device, in the order in which upstream gives them to engines."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in upstream.get_bundle_indices(group, 0, count)]
