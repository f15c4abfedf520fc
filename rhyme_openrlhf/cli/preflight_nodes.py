"""Facts of each GPU node of a Ray cluster before a run starts there: driver, compiler, memory, /dev/shm.

One tiny task a node reads them, without a CPU slot or a GPU, so it waits for no other job. The wait is bounded, and an
error names each node that does not answer.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.run import model_shape, resources
from rhyme_openrlhf.run.resources import required_gpus

# A worker starts and imports torch from a shared disk.
ANSWER_SECONDS = 120
# Ray hides all GPUs from a task that asks for none, unless this says otherwise (as engine/factory.py).
SEES_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class NodeFacts:
    """A node of a run. `broken`: why its GPUs cannot train, "" where they can; sizes in bytes, `shm` of /dev/shm."""

    broken: str
    gpu_memory: int | None
    shm: int


def facts() -> NodeFacts:
    """Return what this machine says of itself; runs on each node."""
    import torch

    found, cuda = nvidia.read(), torch.version.cuda or ""
    broken = ""
    if found.gpus and not torch.cuda.is_available():
        broken = nvidia.unusable([gpu.name for gpu in found.gpus], found.version, cuda)
    elif cuda and not nvidia.deepspeed_is_compiled():
        broken = nvidia.cannot_compile(nvidia.toolkit(), cuda)
    return NodeFacts(broken, nvidia.smallest_memory(found), shutil.disk_usage(resources.SHM).total)


def check_nodes(args: SimpleNamespace, timeout_s: float = ANSWER_SECONDS) -> list[str]:
    """Return a sentence for each node that does not do where the others have GPUs enough; raise PreflightError else."""
    judged = [(node, gpus, _problem(args, answer)) for node, gpus, answer in _answers(timeout_s)]
    problems = [f"node {node}: {problem}" for node, _, problem in judged if problem]
    if problems and sum(gpus for _, gpus, problem in judged if not problem) < required_gpus(args):
        raise PreflightError(problems[0])
    return [f"{problem} (if Ray places a part of the run there)" for problem in problems]


def _answers(timeout_s: float) -> list[tuple[str, int, NodeFacts]]:
    """Ask every node that has GPUs: its address, its GPUs and its answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with ray.init(log_to_driver=False, logging_level="ERROR"):
        ask: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": SEES_GPUS})(facts)
        asked = {}
        for node in ray.nodes():
            if node["Alive"] and (gpus := int(node["Resources"].get("GPU", 0))):
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                asked[ask.options(scheduling_strategy=there).remote()] = (node["NodeManagerAddress"], gpus)
        _, silent = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        if silent:
            names = ", ".join(asked[one][0] for one in silent)
            raise PreflightError(
                f"waited {timeout_s:g} s for node {names} to say its driver and the size of /dev/shm: look at "
                "`ray status`, and end a node that does not answer"
            )
        found = []
        for one, (node, gpus) in asked.items():
            try:
                found.append((node, gpus, ray.get(one)))
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                raise PreflightError(f"node {node} cannot be checked: is rhyme-openrlhf there? {reason}") from error
        return found


def _problem(args: SimpleNamespace, node: NodeFacts) -> str:
    """Return why a run cannot have this node's GPUs, in one sentence; "" where it can."""
    if node.broken:
        return node.broken
    shape = model_shape.read_shape(model_shape.named_by_command(args.actor.model_name_or_path))
    if shape is None:
        return ""
    layout = resources.layout_of(args)
    wanted = resources.shared_memory(shape, layout)
    if layout.buffer and wanted > node.shm:
        return (
            f"/dev/shm has {resources.memory(node.shm)}, but the weight buffer needs {resources.memory(wanted)}: "
            "enlarge it (Docker: --shm-size), or give --weights.transport openrlhf"
        )
    # Engines of several layouts are planned by preflight_layouts.
    return "" if args.tp_switch.enable else resources.plan(shape, layout, node.gpu_memory).problem
