"""Checks of a run's GPUs before anything is started: their number, nodes, memory and the compiler.

Each check raises PreflightError with one sentence: what is wrong, where, what to do. On a cluster (RAY_ADDRESS) the
driver's machine says nothing of the others' memory and compilers, so each node is asked (`preflight_nodes`).
"""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.cli.preflight_nodes import check_nodes
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.run import model_shape, resources
from rhyme_openrlhf.run.resources import ENGINES, Share, shortage


def check_gpus(args: SimpleNamespace, on_gpus: bool) -> str:
    """Raise PreflightError where the GPUs do not do; return a sentence about what is slow, "" if nothing is.

    `on_gpus` is `platform.run_has_gpus()`.
    """
    _check_ring(args)
    cluster = bool(os.environ.get("RAY_ADDRESS"))
    if not on_gpus and not cluster:
        # Ray is started with as many pretended GPUs as the run asks for.
        return ""
    found = nvidia.read()
    nodes = _cluster_nodes() if cluster else [_visible_gpus(found)]
    lack = shortage(args, sum(nodes))
    if lack:
        raise PreflightError(lack)
    said = _across_nodes(args, nodes)
    if on_gpus and cluster:
        said = ". ".join(filter(None, [said, *check_nodes(args)]))
    elif on_gpus:
        _check_compiler()
        _check_memory(args, resources.layout_of(args), nvidia.smallest_memory(found))
    return said


def check_engines_alone(args: SimpleNamespace, engines: int, on_gpus: bool) -> None:
    """Raise PreflightError where the GPUs do not suffice for `engines` engines and nothing else.

    No training follows, so no compiler and no memory for a policy are needed.
    """
    if not on_gpus:
        return
    cluster = bool(os.environ.get("RAY_ADDRESS"))
    found, size = nvidia.read(), args.vllm.tensor_parallel_size
    there = sum(_cluster_nodes()) if cluster else _visible_gpus(found)
    if engines * size > there:
        raise PreflightError(
            f"engines need {engines} x {size} GPUs (--vllm.tensor_parallel_size {size}), but there are {there}: lower "
            f"it{' or --beside' if engines > 1 else ''}"
        )
    if not cluster:
        layout = dataclasses.replace(resources.layout_of(args), shares=(Share((ENGINES,), engines * size),))
        _check_memory(args, layout, nvidia.smallest_memory(found))


def _check_ring(args: SimpleNamespace) -> None:
    """Raise PreflightError unless the policy's GPUs form a grid of replicas, ring attention and tensor parallelism."""
    gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    if gpus % (args.ds.ring_attn_size * args.ds.tensor_parallel_size):
        raise PreflightError(
            f"--ds.ring_attn_size {args.ds.ring_attn_size} times --ds.tensor_parallel_size "
            f"{args.ds.tensor_parallel_size} does not divide the policy's {gpus} GPUs: lower them, or change "
            "--actor.num_gpus_per_node"
        )


def _visible_gpus(found: nvidia.Driver) -> int:
    import torch

    return len(found.gpus) or torch.cuda.device_count()


def _cluster_nodes() -> list[int]:
    """Return the GPUs of each node that is alive."""
    import ray

    with ray.init(log_to_driver=False, logging_level="ERROR"):
        return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]


def _across_nodes(args: SimpleNamespace, nodes: list[int]) -> str:
    """Return a sentence where an engine's ranks cannot be on one node; "" where each engine can."""
    size, engines = args.vllm.tensor_parallel_size, args.vllm.num_engines
    whole = sum(gpus // size for gpus in nodes)
    if whole >= engines:
        return ""
    return (
        f"--vllm.tensor_parallel_size {size}: {engines - whole} of {engines} engines will span nodes, because nodes "
        f"have room for {whole} (the largest has {max(nodes)} GPUs), and wait for the network at every layer: lower it"
    )


def _check_compiler() -> None:
    import torch

    if torch.version.cuda and not nvidia.deepspeed_is_compiled():
        problem = nvidia.cannot_compile(nvidia.toolkit(), torch.version.cuda)
        if problem:
            raise PreflightError(problem)


def _check_memory(args: SimpleNamespace, layout: resources.Layout, size: int | None) -> None:
    # Engines of several layouts are planned by preflight_layouts.
    if size is None or args.tp_switch.enable:
        return
    shape = model_shape.read_shape(model_shape.named_by_command(args.actor.model_name_or_path))
    if shape is None:
        return
    problem = resources.plan(shape, layout, size).problem
    if problem:
        raise PreflightError(f"{problem} (rhyme train --plan shows the whole plan)")
