"""Checks of a run's GPUs before anything is started: their number, nodes, memory and the compiler.

Each check raises PreflightError with one sentence: what is wrong, where, what to do. On a cluster (RAY_ADDRESS) the
driver's machine says nothing of the others' memory and compilers, so each node with GPUs is asked
(platform/cluster.py). An error names each node that does not answer.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.platform.cluster import ANSWER_SECONDS, SILENT, ClusterError, Reply, ask, connected, nodes
from rhyme_openrlhf.run import model_shape, resources
from rhyme_openrlhf.run.resources import ENGINES, Share, required_gpus, shortage


@dataclass(frozen=True)
class NodeFacts:
    """A node of a run. `broken`: why its GPUs cannot train, "" where they can; sizes in bytes, `shm` of /dev/shm.

    `kinds`: the names of its GPUs, each once.
    """

    broken: str
    gpu_memory: int | None
    shm: int
    kinds: tuple[str, ...] = ()


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
    nodes, free = _cluster_gpus() if cluster else ([_visible_gpus(found)], 0)
    there = sum(nodes)
    # A cluster without any GPU would train as a machine without one, on all nodes that join later.
    waits = shortage(args, there, may_grow=True) if cluster and there else ""
    if not waits and (lack := shortage(args, there)):
        raise PreflightError(lack)
    said = [waits or _across_nodes(args, nodes)]
    if cluster and not waits:
        said.append(_taken(args, there, free))
    if on_gpus:
        said.append(_unplanned(args))
    if on_gpus and cluster:
        said += check_nodes(args, may_grow=bool(waits))
    elif on_gpus:
        said.append(_unlike(nvidia.kinds(found)))
        _check_others(args, found)
        _check_compiler()
        _check_memory(args, resources.layout_of(args), nvidia.smallest_memory(found))
    return ". ".join(filter(None, said))


def check_engines_alone(args: SimpleNamespace, engines: int, on_gpus: bool) -> None:
    """Raise PreflightError where the GPUs do not suffice for `engines` engines and nothing else.

    No training follows, so no compiler and no memory for a policy are needed.
    """
    if not on_gpus:
        return
    cluster = bool(os.environ.get("RAY_ADDRESS"))
    found, size = nvidia.read(), args.vllm.tensor_parallel_size
    there = sum(_cluster_gpus()[0]) if cluster else _visible_gpus(found)
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


def _cluster_gpus() -> tuple[list[int], int]:
    """Return the GPUs of each node that is alive, and how many of all are free."""
    import ray

    try:
        with connected():
            return [node.gpus for node in nodes()], int(ray.available_resources().get("GPU", 0))
    except ClusterError as error:
        raise PreflightError(str(error)) from error


def _taken(args: SimpleNamespace, there: int, free: int) -> str:
    """Return a sentence where the run waits for GPUs that others hold; "" where enough are free."""
    if required_gpus(args) <= free:
        return ""
    return (
        f"the run asks for {required_gpus(args)} GPUs, and others hold {there - free} of the cluster's {there}: it "
        f"waits until they are free, at most --limits.stage_s ({args.limits.stage_s:g} s)"
    )


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


def _unlike(kinds: Sequence[str]) -> str:
    """Return a sentence where engines may run on GPUs of several kinds; "" for one kind."""
    if len(kinds) < 2:
        return ""
    return (
        f"the run's GPUs are of {len(kinds)} kinds ({', '.join(kinds)}): decode steps are measured on the first "
        "engine's, and by them every engine plans its drafts at first"
    )


def _check_others(args: SimpleNamespace, found: nvidia.Driver) -> None:
    """Raise PreflightError where other programs leave too few GPUs with the memory that an engine takes."""
    share = args.vllm.gpu_memory_utilization
    busy = [(n, gpu) for n, gpu in enumerate(found.gpus) if gpu.memory - gpu.used < share * gpu.memory]
    if not busy or len(found.gpus) - len(busy) >= required_gpus(args):
        return
    number, gpu = busy[0]
    raise PreflightError(
        f"GPU {number} ({gpu.name}): other programs hold {resources.memory(gpu.used)} of "
        f"{resources.memory(gpu.memory)}, and an engine takes {share:g} of all (--vllm.gpu_memory_utilization): "
        f"end them, name other GPUs in {nvidia.VISIBLE}, or lower the share"
    )


def _check_compiler() -> None:
    import torch

    if problem := _no_compiler(torch.version.cuda):
        raise PreflightError(problem)


def _no_compiler(cuda: str | None) -> str:
    """Return why DeepSpeed cannot be compiled for torch's CUDA version; "" where it can, or need not be."""
    return nvidia.cannot_compile(nvidia.toolkit(), cuda) if cuda and not nvidia.deepspeed_is_compiled() else ""


def _check_memory(args: SimpleNamespace, layout: resources.Layout, size: int | None) -> None:
    if problem := _memory_problem(args, layout, size):
        raise PreflightError(f"{problem} (rhyme train --plan shows the whole plan)")


def _memory_problem(args: SimpleNamespace, layout: resources.Layout, size: int | None) -> str:
    """Return why the run does not fit into GPUs of `size` bytes; "" where it does, or nothing is known."""
    shapes = model_shape.shapes_of(args)
    # Engines of several layouts are planned by preflight_layouts.
    return "" if shapes is None or args.tp_switch.enable else resources.plan(shapes, layout, size).problem


def _unplanned(args: SimpleNamespace) -> str:
    """Return a sentence on the models whose memory nothing here knows; "" where all are planned."""
    shapes = model_shape.shapes_of(args)
    if shapes is None:
        return resources.no_shape(args.actor.model_name_or_path)
    return resources.plan(shapes, resources.layout_of(args)).unknown


def facts() -> NodeFacts:
    """Return what this machine says of itself; runs on each node."""
    import torch

    found, cuda = nvidia.read(), torch.version.cuda or ""
    if found.gpus and not torch.cuda.is_available():
        broken = nvidia.unusable([gpu.name for gpu in found.gpus], found.version, cuda)
    else:
        broken = _no_compiler(cuda)
    shm = shutil.disk_usage(resources.SHM).total
    return NodeFacts(broken, nvidia.smallest_memory(found), shm, tuple(nvidia.kinds(found)))


def check_nodes(args: SimpleNamespace, timeout_s: float = ANSWER_SECONDS, may_grow: bool = False) -> list[str]:
    """Return a sentence for each node that does not do where the others have GPUs enough; raise PreflightError else.

    `may_grow`: the run waits for nodes anyway, which may be other ones, so nothing is refused.
    """
    replies = _answers(timeout_s)
    judged = [(reply, _problem(args, reply.answer)) for reply in replies]
    problems = [f"node {reply.node.address}: {problem}" for reply, problem in judged if problem]
    enough = sum(reply.node.gpus for reply, problem in judged if not problem)
    if problems and not may_grow and enough < required_gpus(args):
        raise PreflightError(problems[0])
    said = [f"{problem} (if Ray places a part of the run there)" for problem in problems]
    crowded = [f"node {reply.node.address}: {text}" for reply in replies if (text := _crowded(args, reply))]
    unlike = _unlike(sorted({kind for reply in replies for kind in reply.answer.kinds}))
    return [*said, *crowded[:1], *filter(None, [unlike])]


def _answers(timeout_s: float) -> list[Reply]:
    """Ask every node that has GPUs. Raises PreflightError unless each answers."""
    try:
        with connected():
            replies = ask([node for node in nodes() if node.gpus], facts, timeout_s=timeout_s)
    except ClusterError as error:
        raise PreflightError(str(error)) from error
    if silent := [reply.node.address for reply in replies if reply.problem.startswith(SILENT)]:
        raise PreflightError(
            f"waited {timeout_s:g} s for node {', '.join(silent)} to say its driver and the size of /dev/shm: look at "
            "`ray status`, and end a node that does not answer"
        )
    for reply in replies:
        if reply.problem:
            raise PreflightError(f"node {reply.node.address} cannot be checked: {reply.problem}")
    return replies


def _crowded(args: SimpleNamespace, reply: Reply) -> str:
    """Return a sentence where Ray's object store, once it is full, leaves too little of /dev/shm; "" elsewhere."""
    shapes, layout = model_shape.shapes_of(args), resources.layout_of(args)
    if shapes is None or not layout.buffer:
        return ""
    wanted = resources.shared_memory(shapes.policy, layout) - resources.SHM_BYTES
    if wanted + reply.node.store <= reply.answer.shm:
        return ""
    store, shm = resources.memory(reply.node.store), resources.memory(reply.answer.shm)
    return (
        f"Ray's object store may take {store} of the {shm} of /dev/shm, and the weight buffer needs "
        f"{resources.memory(wanted)}: start Ray there with a smaller "
        "--object-store-memory"
    )


def _problem(args: SimpleNamespace, node: NodeFacts) -> str:
    """Return why a run cannot have this node's GPUs, in one sentence; "" where it can."""
    shapes, layout = model_shape.shapes_of(args), resources.layout_of(args)
    if node.broken or shapes is None:
        return node.broken
    wanted = resources.shared_memory(shapes.policy, layout)
    if layout.buffer and wanted > node.shm:
        return (
            f"/dev/shm has {resources.memory(node.shm)}, but the weight buffer needs {resources.memory(wanted)}: "
            "enlarge it (Docker: --shm-size), or give --weights.transport openrlhf"
        )
    return _memory_problem(args, layout, node.gpu_memory)
