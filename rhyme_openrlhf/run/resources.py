"""The resources of a run, planned before it starts: how many GPUs, and how much memory of each. Pure.

The number of GPUs (without any: pretended ones) follows the placement in OpenRLHF 0.11.2
`cli/train_ppo_ray.py::train`. `rhyme train --plan`, `rhyme doctor`, the checks before a run and the New run page all
show the memory plan. Weights, gradients and optimizer states follow the ZeRO paper's 16 bytes a parameter (Rajbhandari
et al. 2020, section 3.1), keys and values the model's shape. A critic or reward model whose shape is not known is left
out of the plan, which says so. Activations, CUDA graphs and buffers are left out, too, so a plan that does not fit
never runs, and a plan that fits just so may still fail. Sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.engine.rows import profiled_rows, reserved_bytes, reserved_rows
from rhyme_openrlhf.run.model_shape import WEIGHT_BYTES, ModelShape, Shapes
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import HISTORY, V2_ASYNC
from rhyme_openrlhf.settings.engine import VLLM_SAMPLES, VLLM_STEP_TOKENS

# CPU slots beyond one for each GPU: controllers, queues, locks, recorder; they mostly wait.
SPARE_CPUS = 8
ENGINES = "engines"
# Each of what shares a GPU asks Ray for a fifth of it (OpenRLHF's 0.2).
SHARES = 5


@dataclass(frozen=True)
class Share:
    """GPUs that these models have for themselves: "engines", "actor", "reference", "critic", "reward"."""

    models: tuple[str, ...]
    gpus: int


def shares(args: SimpleNamespace) -> list[Share]:
    """Return which placement groups and actors get which GPUs; those without any are left out."""
    engines = args.vllm.num_engines * args.vllm.tensor_parallel_size
    sizes = {
        "actor": _group(args.actor),
        "reference": _group(args.ref) if args.algo.kl.init_coef > 0 else 0,
        "critic": _group(args.critic) if args.critic.model_name_or_path else 0,
        "reward": _group(args.reward) if not args.reward.remote_url else 0,
    }
    there = tuple(name for name, size in sizes.items() if size)
    if args.train.colocate_all:
        # One placement group for all models; the engines share it only when generation and training take turns.
        if args.train.async_enable:
            found = [Share((ENGINES,), engines), Share(there, sizes["actor"])]
        else:
            found = [Share((ENGINES, *there), sizes["actor"])]
        return [share for share in found if share.gpus]
    pairs = []
    if args.train.colocate_actor_ref:
        pairs.append(("actor", "reference"))
    if args.train.colocate_critic_reward and sizes["critic"]:
        pairs.append(("critic", "reward"))
    found = [Share((ENGINES,), engines)]
    for name, size in sizes.items():
        first = next((pair for pair in pairs if name in pair), (name,))
        if name == first[0]:
            found.append(Share(tuple(one for one in first if sizes[one]), size))
    return [share for share in found if share.gpus]


def required_gpus(args: SimpleNamespace) -> int:
    """GPUs of all placement groups and actors of a run."""
    return sum(share.gpus for share in shares(args))


def shortage(args: SimpleNamespace, there: int, may_grow: bool = False) -> str:
    """Return one sentence where a run asks for more GPUs than are `there`, "" where they do.

    `may_grow`: they are those of a cluster, for more of which the run waits.
    """
    needed = required_gpus(args)
    if needed <= there:
        return ""
    if may_grow:
        return (
            f"the run asks for {needed} GPUs, but the cluster has {there} now: it waits until {needed - there} more "
            "join (Ray's autoscaler, or a node that you start)"
        )
    return (
        f"the run asks for {needed} GPUs (engines, policy, reference, critic and reward model), but there are {there}: "
        "lower --*.num_gpus_per_node, --vllm.num_engines or --vllm.tensor_parallel_size, or colocate "
        "(--train.colocate_all)"
    )


def _group(model: SimpleNamespace) -> int:
    return model.num_nodes * model.num_gpus_per_node


# Adam in mixed precision: weights and gradients in 16 bits; master weights, momentum and variance in 32. Muon has no
# variance for the matrices, which are nearly all.
GRADIENT_BYTES, OPTIMIZER_BYTES, MUON_BYTES = 2, 12, 8
# The weight buffer keeps two versions on a node (weights/node.py).
BUFFER_COPIES = 2
# Ray's object store for samples and for buckets of weights on their way to other nodes, and NCCL.
SHM_BYTES = 2**30
# vLLM's share of a GPU is rounded down to this when a plan proposes one.
SHARE_STEPS = 20
# A plan proposes no fewer samples at once for an engine.
FEW_SAMPLES = 8
_NAMES = {
    ENGINES: "engine",
    "actor": "policy",
    "reference": "reference model",
    "critic": "critic",
    "reward": "reward model",
}
_GIB = 2**30


@dataclass(frozen=True)
class Layout:
    """The settings of a run that decide about memory.

    `muon`: models that Muon trains. `weight_bytes`, `trained`: bytes of a model's parameter, and the part of the
    parameters that is trained (LoRA: 0, its own are few). `sequences`, `step_tokens`: samples that an engine runs at
    once, and tokens of its step. `drafts`: tokens of the longest draft, 0 without speculation. `runner`: vLLM's model
    runner. `utilization`: the engine's part of a GPU.
    """

    shares: tuple[Share, ...]
    sizes: Mapping[str, int]
    zero_stage: int = 2
    adam_offload: bool = False
    muon: frozenset[str] = frozenset()
    trained: float = 1.0
    weight_bytes: float = WEIGHT_BYTES
    policy_parallel: int = 1
    offloaded: frozenset[str] = frozenset()
    tensor_parallel: int = 1
    utilization: float = 0.95
    engines_sleep: bool = False
    trainer_sleeps: bool = False
    sequences: int = VLLM_SAMPLES
    step_tokens: int = VLLM_STEP_TOKENS
    drafts: int = 0
    runner: str = V2_ASYNC
    longest: int = 1
    history_gb: float = 0.0
    buffer: bool = True

    @property
    def rows(self) -> int:
        """Rows of logits that a step of an engine has at most."""
        return reserved_rows(self.sequences, self.drafts, self.step_tokens)

    def sampler_bytes(self, vocabulary: int) -> int:
        """Return the memory that an engine reserves for these rows."""
        rows = profiled_rows(self.rows, self.sequences, self.drafts)
        return reserved_bytes(rows, self.sequences, vocabulary, self.runner)

    def optimizer_bytes(self, model: str) -> int:
        """Return bytes of the optimizer's states for each parameter."""
        return MUON_BYTES if model in self.muon else OPTIMIZER_BYTES


@dataclass(frozen=True)
class Part:
    """`size` bytes of `what` of `model`: "engines", "actor", "reference", "critic" or "reward"."""

    model: str
    what: str
    size: float

    @property
    def owner(self) -> str:
        """Return the model in words."""
        return _NAMES[self.model]


@dataclass(frozen=True)
class GpuPlan:
    """A GPU of one share of a run's GPUs.

    `parts`: what lies on it. `least`: the smallest GPU's memory that holds the parts. `size`: the memory of the GPUs
    there are, None where it is not known. `lack`: that the parts do not fit, "" where they fit; `mend`: the flags that
    would make them fit. `samples`: samples of full length that the engine's KV cache holds, None without an engine or
    without `size`. `unknown`: models of unknown shape on it, in words; `parts` has nothing of them.
    """

    share: Share
    parts: tuple[Part, ...]
    least: float
    size: int | None = None
    lack: str = ""
    mend: str = ""
    samples: float | None = None
    unknown: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """Return one sentence: what does not fit, and what to do; "" where all fits."""
        return f"{self.lack}: {self.mend}" if self.lack else ""

    @property
    def name(self) -> str:
        """Return who shares the GPU, in words."""
        return _names(self.share)


def _names(share: Share) -> str:
    return " + ".join(_NAMES[model] for model in share.models)


@dataclass(frozen=True)
class Need:
    """`size` bytes of main memory for `what`, on each `where`."""

    what: str
    where: str
    size: float


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of every kind of GPU of a run, and of its nodes."""

    shape: ModelShape
    gpus: tuple[GpuPlan, ...]
    nodes: tuple[Need, ...]

    @property
    def problem(self) -> str:
        """Return why the run does not fit, in one sentence; "" where it fits."""
        return next((gpu.problem for gpu in self.gpus if gpu.problem), "")

    @property
    def unknown(self) -> str:
        """Return one sentence on the models that the plan leaves out; "" where it has all."""
        names = [name for gpu in self.gpus for name in gpu.unknown]
        if not names:
            return ""
        return (
            f"the memory plan leaves out the {' and the '.join(names)}: no config.json of a kind that it knows is on "
            "this machine; download the model first, or name its directory"
        )


def no_shape(model: str | None) -> str:
    """Return one sentence that says why there is no plan of a model."""
    return (
        f"there is no memory plan of {model or 'a model without a name (--actor.model_name_or_path)'}: its config.json "
        "is not on this machine, or is of a kind that the plan does not know; download the model first, or name its "
        "directory"
    )


def layout_of(args: SimpleNamespace) -> Layout:
    """Return what upstream's nested arguments, with ours among them, say about memory."""
    settings = RhymeSettings.from_namespace(args).with_transport(on_gpus=True, lora=args.ds.lora.rank > 0)
    return Layout(
        shares=tuple(shares(args)),
        sizes={
            "actor": args.actor.num_nodes * args.actor.num_gpus_per_node,
            "critic": args.critic.num_nodes * args.critic.num_gpus_per_node,
            "reference": args.ref.num_nodes * args.ref.num_gpus_per_node,
            "reward": args.reward.num_nodes * args.reward.num_gpus_per_node,
        },
        zero_stage=args.ds.zero_stage,
        adam_offload=args.ds.adam_offload,
        muon=frozenset(name for name, node in (("actor", args.actor), ("critic", args.critic)) if node.optim == "muon"),
        trained=0.0 if args.ds.lora.rank else 1.0,
        weight_bytes=WEIGHT_BYTES / (4 if args.ds.load_in_4bit else 1),
        policy_parallel=args.ds.tensor_parallel_size,
        offloaded=frozenset(name for name, node in (("reference", args.ref), ("reward", args.reward)) if node.offload),
        tensor_parallel=args.vllm.tensor_parallel_size,
        utilization=args.vllm.gpu_memory_utilization,
        engines_sleep=args.vllm.enable_sleep and args.train.colocate_all,
        trainer_sleeps=args.ds.enable_sleep and args.train.colocate_all,
        sequences=settings.engine.samples,
        step_tokens=settings.engine.step_tokens,
        drafts=longest_draft(args),
        runner=settings.gpu_runner[0],
        longest=args.data.max_len,
        history_gb=args.history.memory_gb if args.histospec.enable else 0.0,
        buffer=settings.weights_by_buffer,
    )


def longest_draft(args: SimpleNamespace) -> int:
    """Return how many tokens a sample's draft has at most; 0 without speculation."""
    if not args.histospec.enable:
        return 0
    history = args.histospec.window_max if args.drafting.source.startswith(HISTORY) else 0
    return int(max(history, 0 if args.drafting.source == HISTORY else args.drafting.tokens))


def plan(shapes: Shapes, layout: Layout, size: int | None = None) -> MemoryPlan:
    """Return the plan of a run whose GPUs have `size` bytes each, None where that is not known.

    A critic or reward model of unknown shape is left out, and named in `MemoryPlan.unknown`.
    """
    gpus = tuple(_gpu_plan(shapes, layout, share, size) for share in layout.shares)
    return MemoryPlan(shapes.policy, gpus, tuple(_nodes(shapes, layout)))


def fits(shapes: Shapes, layout: Layout, size: int) -> bool:
    """Return whether `plan` lacks nothing on GPUs of `size` bytes, without a search for flags that would mend it."""
    return all(_least(layout, _parts_of(shapes, layout, share)) <= size for share in layout.shares)


def _gpu_plan(shapes: Shapes, layout: Layout, share: Share, size: int | None) -> GpuPlan:
    parts = _parts_of(shapes, layout, share)
    least, samples, lack, mend = _least(layout, parts), None, "", ""
    if size is not None:
        if ENGINES in share.models:
            fixed = sum(part.size for part in parts if part.model == ENGINES and part.what != _ONE_SAMPLE)
            one = shapes.policy.kv_bytes(layout.tensor_parallel) * layout.longest
            samples = max(layout.utilization * size - fixed, 0.0) / one
        if least > size:
            needed = "more memory than any GPU has" if math.isinf(least) else f"at least {memory(least)}"
            lack = f"a GPU of the {_names(share)} needs {needed}, but has {memory(size)}"
            mend = _mend(shapes, layout, share, size)
    unknown = tuple(_NAMES[model] for model in share.models if _shape(shapes, model) is None)
    return GpuPlan(share, parts, least, size, lack, mend, samples, unknown)


def _shape(shapes: Shapes, model: str) -> ModelShape | None:
    return {"critic": shapes.critic, "reward": shapes.reward}.get(model, shapes.policy)


def _parts_of(shapes: Shapes, layout: Layout, share: Share) -> tuple[Part, ...]:
    return tuple(part for model in share.models for part in _parts(shapes, layout, share, model))


SHM = "/dev/shm"
_ONE_SAMPLE = "KV cache of one sample at full length"


def _parts(shapes: Shapes, layout: Layout, share: Share, model: str) -> Iterator[Part]:
    shape = _shape(shapes, model)
    if shape is None:
        return
    if model == ENGINES:
        parallel = layout.tensor_parallel
        yield Part(model, "weights", WEIGHT_BYTES * shape.parameters / parallel)
        yield Part(model, "rows of the sampler", layout.sampler_bytes(shape.vocabulary))
        yield Part(model, _ONE_SAMPLE, shape.kv_bytes(parallel) * layout.longest)
        return
    # The value head of a critic or reward model is one row in place of the output layer.
    whole = shape.parameters - (shape.head if model in ("critic", "reward") else 0)
    count, ranks = whole / layout.policy_parallel, layout.sizes[model] / layout.policy_parallel
    stage = layout.zero_stage

    def part(each: float, sharded_from: int) -> float:
        return each * count / (ranks if stage >= sharded_from else 1)

    if model in ("reference", "reward"):
        if model not in layout.offloaded:
            yield Part(model, "weights", part(layout.weight_bytes, 3))
        return
    yield Part(model, "weights", part(layout.weight_bytes, 3))
    yield Part(model, "gradients", part(GRADIENT_BYTES * layout.trained, 2))
    if not layout.adam_offload:
        yield Part(model, "optimizer", part(layout.optimizer_bytes(model) * layout.trained, 1))


def _least(layout: Layout, parts: Sequence[Part]) -> float:
    """Return the memory of the smallest GPU that holds `parts`: while it trains, and while it generates."""
    engine = sum(part.size for part in parts if part.model == ENGINES)
    trainer = sum(part.size for part in parts if part.model != ENGINES)
    if not engine:
        return trainer
    # A trainer that sleeps keeps its 16-bit weights; one whose optimizer is offloaded does not sleep.
    asleep = layout.trainer_sleeps and not layout.adam_offload
    resting = sum(part.size for part in parts if part.model != ENGINES and (part.what == "weights" or not asleep))
    # An engine takes its whole part of the GPU, and keeps it while the trainer works unless it sleeps.
    left = 1 - layout.utilization
    beside = 0.0 if layout.engines_sleep else layout.utilization
    return max(
        engine / layout.utilization,
        _over(resting, left),
        _over(trainer, 1 - beside),
    )


def _over(size: float, part: float) -> float:
    if not size:
        return 0.0
    return size / part if part > 0 else math.inf


def _mend(shapes: Shapes, layout: Layout, share: Share, size: int) -> str:
    """Return the flags that would make a GPU's parts fit: one alone if possible, else as few of the cheapest."""
    changes = list(_changes(shapes, layout, share, size))
    tried = [[change] for change in changes] + [changes[:count] for count in range(2, len(changes) + 1)]
    for chosen in tried:
        changed = layout
        for _, values in chosen:
            changed = dataclasses.replace(changed, **values)
        # A part of the GPU that was right for the unchanged layout may be wrong for the changed one.
        changed, flag = _fitting_share(shapes, changed, share, size)
        if _least(changed, _parts_of(shapes, changed, share)) <= size:
            flags = [name for name, _ in chosen] + ([flag] if flag else [])
            return f"{' '.join(flags)} would make it fit"
    return "no flag makes it fit on as many GPUs, so take more of them (--*.num_gpus_per_node) or larger ones"


def _changes(shapes: Shapes, layout: Layout, share: Share, size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield flags that take memory from a GPU of this share, the cheapest first, each with what it changes."""
    trains = {"actor", "critic"} & set(share.models)
    if ENGINES in share.models:
        chosen, flag = _fitting_share(shapes, layout, share, size)
        if flag:
            yield flag, {"utilization": chosen.utilization}
        if trains and not layout.engines_sleep:
            yield "--vllm.enable_sleep", {"engines_sleep": True}
    if trains and layout.zero_stage < 3:
        yield "--ds.zero_stage 3", {"zero_stage": 3}
    if trains and ENGINES in share.models and not layout.trainer_sleeps and not layout.adam_offload:
        yield "--ds.enable_sleep", {"trainer_sleeps": True}
    if "reference" in share.models and "reference" not in layout.offloaded:
        yield "--ref.offload", {"offloaded": layout.offloaded | {"reference"}}
    if "reward" in share.models and "reward" not in layout.offloaded:
        yield "--reward.offload", {"offloaded": layout.offloaded | {"reward"}}
    if trains and not layout.adam_offload:
        yield "--ds.adam_offload", {"adam_offload": True}
    if ENGINES in share.models and layout.sequences > FEW_SAMPLES:
        yield _fewer_samples(shapes, layout, share, size)
    if ENGINES in share.models:
        gpus = share.gpus
        for parallel in (2, 4, 8):
            if parallel > layout.tensor_parallel and gpus % parallel == 0 and shapes.policy.kv_heads % parallel == 0:
                engines = gpus // parallel
                yield (
                    f"--vllm.tensor_parallel_size {parallel} --vllm.num_engines {engines}",
                    {"tensor_parallel": parallel},
                )


def _fewer_samples(shapes: Shapes, layout: Layout, share: Share, size: int) -> tuple[str, dict[str, Any]]:
    """Return the flag for fewer samples at once, as many as fit by halves, or FEW_SAMPLES; and what it changes."""
    samples = layout.sequences
    while samples > FEW_SAMPLES:
        samples = max(samples // 2, FEW_SAMPLES)
        changed = dataclasses.replace(layout, sequences=samples)
        if _least(changed, _parts_of(shapes, changed, share)) <= size:
            break
    return f"--engine.max_num_seqs {samples}", {"sequences": samples}


def _fitting_share(shapes: Shapes, layout: Layout, share: Share, size: int) -> tuple[Layout, str]:
    """Return the layout with the largest part of the GPU for its engine that fits, and the flag; "" for no change."""
    if ENGINES not in share.models:
        return layout, ""
    parts = _parts_of(shapes, layout, share)
    if _least(layout, parts) <= size:
        return layout, ""
    for step in range(SHARE_STEPS - 1, 0, -1):
        changed = dataclasses.replace(layout, utilization=step / SHARE_STEPS)
        if _least(changed, parts) <= size:
            return changed, f"--vllm.gpu_memory_utilization {changed.utilization:g}"
    return layout, ""


def _nodes(shapes: Shapes, layout: Layout) -> Iterator[Need]:
    if layout.adam_offload:
        for model in ("actor", "critic"):
            shape = _shape(shapes, model)
            if shape is not None and any(model in share.models for share in layout.shares):
                states = layout.optimizer_bytes(model) * layout.trained * shape.parameters / layout.sizes[model]
                yield Need("optimizer, offloaded", f"process of the {_NAMES[model]}", states)
    yield Need(SHM, "node with an engine or the policy", shared_memory(shapes.policy, layout))
    if layout.history_gb:
        yield Need("history, at most", "node with a history worker", layout.history_gb * _GIB)


def shared_memory(shape: ModelShape, layout: Layout) -> float:
    """Return what a node's `/dev/shm` must hold."""
    return SHM_BYTES + (BUFFER_COPIES * WEIGHT_BYTES * shape.parameters if layout.buffer else 0)


def as_text(found: MemoryPlan) -> str:
    """Return a plan as lines for a terminal."""
    lines = [
        f"memory plan (estimated, without activations and CUDA graphs): {found.shape.name}, "
        f"{found.shape.parameters / 1e6:,.1f} million parameters"
    ]
    for gpu in found.gpus:
        count = f"{gpu.share.gpus} GPU{'s' if gpu.share.gpus > 1 else ''}"
        least = "no GPU holds it" if math.isinf(gpu.least) else f"at least {memory(gpu.least)} each"
        there = f", {memory(gpu.size)} are there" if gpu.size is not None else ""
        lines.append(f"  {gpu.name}, {count}: {least}{there}")
        for part in gpu.parts:
            lines.append(f"    {part.owner + ': ' + part.what:<52}{memory(part.size):>12}")
        if gpu.samples is not None:
            lines.append(f"    {'engine: samples of full length that its KV cache holds':<52}{gpu.samples:>12,.0f}")
        lines += [f"    {name}: not known, not counted" for name in gpu.unknown]
        if gpu.problem:
            lines.append(f"    does not fit: {gpu.problem}")
    if found.unknown:
        lines.append(f"  {found.unknown}")
    lines.append("  main memory")
    lines += [f"    {need.what + ', each ' + need.where:<52}{memory(need.size):>12}" for need in found.nodes]
    return "\n".join(lines)


def memory(size: float) -> str:
    """Return a size for a person."""
    return f"{size / _GIB:,.1f} GiB" if size >= 0.1 * _GIB else f"{size / 2**20:,.1f} MiB"
