"""Changes that would make a run fit its GPUs: the nearest ones, each checked by the planner before it is named. Pure.

A change is tried alone first; two together only where no single one is enough. Each kind of change gives its smallest
sufficient amount, so nothing is proposed that takes more from the run than needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.api.launch.spec import (
    Arguments,
    SpecError,
    check_tied,
    gpus_needed,
    merged,
    upstream_arguments,
    value_of,
)
from rhyme_openrlhf.run import resources
from rhyme_openrlhf.run.model_shape import Shapes

# More than these are not compared by a reader.
MOST_PROPOSALS = 4
# Engines' shares of a GPU are proposed in these steps; below the least one no model is useful.
SHARES = (0.95, *(step / 10 for step in range(9, 0, -1)))
# Of two kinds of change together, as many pairs of amounts are tried, the smallest first: half a second in all.
MOST_PAIRS = 40
MODELS = ("actor", "ref", "critic", "reward")

Values = dict[tuple[str, str], Any]


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a run may have: their number and the memory of each in bytes, None where not known."""

    count: int | None
    memory: int | None


@dataclass(frozen=True)
class Change:
    """A change of some options, in words."""

    words: str
    values: tuple[tuple[str, str, Any], ...]

    @property
    def flags(self) -> str:
        """Return the change as it stands on a command line; a switch is written without a value."""
        return " ".join(_flag(group, name, value) for group, name, value in self.values)

    @property
    def by_key(self) -> dict[str, Any]:
        """Return the new values by the keys of the form's fields."""
        return {f"{group}.{name}": value for group, name, value in self.values}


def lack(arguments: Arguments, shapes: Shapes | None, gpus: Gpus) -> str:
    """Return what keeps the run from fitting, in one sentence; "" where it fits or nothing is known of the GPUs."""
    needed = gpus_needed(arguments)
    if gpus.count is not None and needed > gpus.count:
        return f"The run needs {needed} GPUs, but the cluster has {gpus.count}."
    if shapes is None or gpus.memory is None:
        return ""
    found = resources.plan(shapes, resources.layout_of(upstream_arguments(arguments)), gpus.memory)
    short = next((gpu.lack for gpu in found.gpus if gpu.lack), "")
    return f"{short[:1].upper()}{short[1:]}." if short else ""


def proposals(arguments: Arguments, shapes: Shapes | None, gpus: Gpus) -> list[Change]:
    """Return the nearest changes that make checked arguments fit; none where they fit, or where none was found."""
    if not lack(arguments, shapes, gpus):
        return []
    kinds = [list(kind) for kind in _kinds(arguments, gpus)]
    alone = [found for kind in kinds if (found := _first(arguments, shapes, gpus, kind))]
    if alone:
        return alone[:MOST_PROPOSALS]
    together = []
    for one, other in itertools.combinations(kinds, 2):
        amounts = itertools.islice(itertools.product(one, other), MOST_PAIRS)
        pairs = [_both(first, second) for first, second in amounts]
        if found := _first(arguments, shapes, gpus, pairs):
            together.append(found)
        if len(together) == MOST_PROPOSALS:
            break
    return together


def _first(arguments: Arguments, shapes: Shapes | None, gpus: Gpus, changes: Sequence[Change]) -> Change | None:
    return next((change for change in changes if _fits(arguments, shapes, gpus, change)), None)


def _fits(arguments: Arguments, shapes: Shapes | None, gpus: Gpus, change: Change) -> bool:
    edits: dict[str, dict[str, Any]] = {}
    for group, name, value in change.values:
        edits.setdefault(group, {})[name] = value
    changed = merged(arguments, edits)
    asked = upstream_arguments(changed)
    if gpus.count is not None and resources.required_gpus(asked) > gpus.count:
        return False
    if (
        shapes is not None
        and gpus.memory is not None
        and not resources.fits(shapes, resources.layout_of(asked), gpus.memory)
    ):
        return False
    try:
        check_tied(changed)
    except SpecError:
        return False
    return True


def _both(first: Change, second: Change) -> Change:
    values = {(group, name): value for group, name, value in (*first.values, *second.values)}
    return Change(f"{first.words}, and {second.words}", tuple((*key, value) for key, value in values.items()))


def _kinds(arguments: Arguments, gpus: Gpus) -> Iterator[Iterator[Change]]:
    """Yield the kinds of change, those that cost the run least first; each yields its changes, the smallest first."""
    yield _utilization(arguments)
    yield _zero(arguments)
    yield _colocated(arguments)
    yield _fewer_engines(arguments)
    yield _split_engines(arguments)
    yield _offloaded(arguments)
    yield _fewer_samples_at_once(arguments)
    yield _smaller_models(arguments)


def _utilization(arguments: Arguments) -> Iterator[Change]:
    now = value_of(arguments, "vllm", "gpu_memory_utilization")
    for share in sorted(SHARES, key=lambda one: abs(one - now)):
        word = "a smaller" if share < now else "a larger"
        yield _change(f"{word} share of the GPU for the engines", {("vllm", "gpu_memory_utilization"): share})


def _zero(arguments: Arguments) -> Iterator[Change]:
    for stage in range(value_of(arguments, "ds", "zero_stage") + 1, 4):
        yield _change("training states sharded over the trainer's GPUs", {("ds", "zero_stage"): stage})


def _colocated(arguments: Arguments) -> Iterator[Change]:
    pairs: Values = {}
    if not value_of(arguments, "train", "colocate_actor_ref"):
        pairs["train", "colocate_actor_ref"] = True
        yield _change("policy and reference model on the same GPUs", pairs)
    if value_of(arguments, "train", "colocate_all") or value_of(arguments, "train", "async_enable"):
        return
    policy = value_of(arguments, "actor", "num_nodes") * value_of(arguments, "actor", "num_gpus_per_node")
    parallel = value_of(arguments, "vllm", "tensor_parallel_size")
    if policy % parallel:
        return
    every: Values = {("train", "colocate_all"): True, ("vllm", "num_engines"): policy // parallel}
    for model in MODELS[1:]:
        for name in ("num_nodes", "num_gpus_per_node"):
            if value_of(arguments, model, name) != value_of(arguments, "actor", name):
                every[model, name] = value_of(arguments, "actor", name)
    every |= {("vllm", "enable_sleep"): True, ("ds", "enable_sleep"): True}
    for share in sorted(SHARES, reverse=True):
        yield _change(
            "all models on the same GPUs, in turns", {**every, ("vllm", "gpu_memory_utilization"): share}, arguments
        )


def _fewer_engines(arguments: Arguments) -> Iterator[Change]:
    if value_of(arguments, "train", "colocate_all") and not value_of(arguments, "train", "async_enable"):
        return  # the engines share the policy's GPUs: fewer of them free none
    for count in range(value_of(arguments, "vllm", "num_engines") - 1, 0, -1):
        yield _change("fewer engines", {("vllm", "num_engines"): count})


def _split_engines(arguments: Arguments) -> Iterator[Change]:
    engines, now = value_of(arguments, "vllm", "num_engines"), value_of(arguments, "vllm", "tensor_parallel_size")
    for parallel in (2, 4, 8):
        if parallel > now and engines * now % parallel == 0:
            yield _change(
                "each engine over more GPUs",
                {("vllm", "tensor_parallel_size"): parallel, ("vllm", "num_engines"): engines * now // parallel},
                arguments,
            )


def _offloaded(arguments: Arguments) -> Iterator[Change]:
    for words, group, name in (
        ("reference model in main memory", "ref", "offload"),
        ("reward model in main memory", "reward", "offload"),
        ("optimizer in main memory", "ds", "adam_offload"),
    ):
        if not value_of(arguments, group, name):
            yield _change(words, {(group, name): True})


def _fewer_samples_at_once(arguments: Arguments) -> Iterator[Change]:
    now = value_of(arguments, "engine", "max_num_seqs") or resources.VLLM_SAMPLES
    while now > 1:
        now //= 2
        yield _change("fewer samples at once in an engine", {("engine", "max_num_seqs"): now})


def _smaller_models(arguments: Arguments) -> Iterator[Change]:
    most = value_of(arguments, "actor", "num_gpus_per_node")
    for count in range(most - 1, 0, -1):
        found: Values = {
            (model, "num_gpus_per_node"): count
            for model in MODELS
            if value_of(arguments, model, "num_gpus_per_node") > count
        }
        yield _change("fewer GPUs for training", found)


def _change(words: str, values: Values, arguments: Arguments | None = None) -> Change:
    """Return the change; with `arguments`, without what they say already."""
    kept = {key: value for key, value in values.items() if arguments is None or value_of(arguments, *key) != value}
    return Change(words, tuple((*key, value) for key, value in kept.items()))


def _flag(group: str, name: str, value: Any) -> str:
    flag = options()[group, name].flag
    return flag if value is True else f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
