"""Each flag of OpenRLHF that is judged refused or different is given to the check that refuses it or says so."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openrlhf")

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import demo, preflight, preflight_gpus, upstream
from rhyme_openrlhf.platform import PlatformError
from rhyme_openrlhf.platform.cpu_arguments import adapt_arguments, cpu_engine_arguments
from rhyme_openrlhf.run.directory_lock import DirectoryLockError, held
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.engine import CpuSettings
from rhyme_openrlhf.settings.options import SettingsError
from rhyme_openrlhf.settings.redaction import redact_command
from rhyme_openrlhf.settings.upstream_flags import UPSTREAM_FLAGS
from rhyme_openrlhf.telemetry.services import ResumePoint
from rhyme_openrlhf.training import resume
from rhyme_openrlhf.training.resume import ResumeError, prepare
from tests import nvml

CRITIC = f"--critic.model_name_or_path {embedded.MODEL} --algo.advantage.estimator gae"
REWARD_MODEL = f"--reward.remote_url {{none}} --reward.model_name_or_path {embedded.MODEL}"
WITH_REFERENCE = "--algo.kl.init_coef 0.1"
PIPELINE = "--histopipe.enable --train.async_enable"
TOO_MANY, NOT_PIPELINED = r"the run asks for \d+ GPUs", "--histopipe.enable does not go with "
NO_GPU, NO_EFFECT = " needs a GPU, and this machine has none", "has no effect: the weight buffer carries the weights"
BUFFER = "--weights.transport buffer"
# By flag: flags to give with three GPUs, and what they cost.
WITH_GPUS = {
    "--actor.num_nodes": ("--actor.num_nodes 3 --train.batch_size 96", TOO_MANY),
    "--actor.num_gpus_per_node": ("--actor.num_gpus_per_node 3", TOO_MANY),
    "--critic.num_nodes": (f"{CRITIC} --critic.num_gpus_per_node 1 --critic.num_nodes 3", TOO_MANY),
    "--critic.num_gpus_per_node": (f"{CRITIC} --critic.num_gpus_per_node 3", TOO_MANY),
    "--ref.num_nodes": (f"{WITH_REFERENCE} --ref.num_gpus_per_node 1 --ref.num_nodes 3", TOO_MANY),
    "--ref.num_gpus_per_node": (f"{WITH_REFERENCE} --ref.num_gpus_per_node 3", TOO_MANY),
    "--reward.num_nodes": (f"{REWARD_MODEL} --reward.num_gpus_per_node 1 --reward.num_nodes 3", TOO_MANY),
    "--reward.num_gpus_per_node": (f"{REWARD_MODEL} --reward.num_gpus_per_node 3", TOO_MANY),
    "--vllm.num_engines": ("--vllm.num_engines 3", TOO_MANY),
    "--vllm.tensor_parallel_size": ("--vllm.tensor_parallel_size 2", TOO_MANY),
    "--vllm.gpu_memory_utilization": ("--vllm.gpu_memory_utilization 0.00001", "gpu_memory_utilization .* make it fit"),
    "--ds.tensor_parallel_size": (
        f"--ds.tensor_parallel_size 2 --actor.num_gpus_per_node 2 {BUFFER}",
        "--ds.tensor_parallel_size above 1 needs --weights.transport openrlhf",
    ),
    "--ds.lora.rank": ("--ds.lora.rank 8 --weights.transport openrlhf", "--ds.lora.rank above 0 needs"),
    "--ds.load_in_4bit": ("--ds.load_in_4bit --ds.lora.rank 8", "--ds.load_in_4bit does not go with --ds.lora.rank"),
}
# By flag: flags to give on a machine without a GPU, and what they cost.
WITHOUT_GPU = {
    "--ds.packing_samples": ("--ds.packing_samples", f"--ds.packing_samples{NO_GPU}"),
    "--ds.use_liger_kernel": ("--ds.use_liger_kernel", f"--ds.use_liger_kernel{NO_GPU}"),
    "--ds.ring_attn_size": (
        "--ds.packing_samples --ds.ring_attn_size 2 --actor.num_gpus_per_node 2", f"{NO_GPU}",
    ),
    "--ds.load_in_4bit": ("--ds.load_in_4bit", f"--ds.load_in_4bit{NO_GPU}"),
    "--ds.tensor_parallel_size": (
        "--ds.tensor_parallel_size 2 --actor.num_gpus_per_node 2", f"--ds.tensor_parallel_size{NO_GPU}"
    ),
    "--ds.attn_implementation": ("--ds.attn_implementation flash_attention_2", "flash_attention_2 becomes sdpa"),
    "--vllm.num_engines": ("--vllm.num_engines 0", "--vllm.num_engines must be at least 1"),
    "--vllm.tensor_parallel_size": ("--vllm.tensor_parallel_size 3", "does not divide the model's"),
    "--actor.model_name_or_path": ("--actor.model_name_or_path /no/model", "^--actor.model_name_or_path: /no/model "),
    "--reward.model_name_or_path": (
        "--reward.remote_url {none} --reward.num_gpus_per_node 1 --reward.model_name_or_path /no/model",
        "^--reward.model_name_or_path: /no/model ",
    ),
    "--critic.model_name_or_path": (
        "--critic.model_name_or_path /no/model --algo.advantage.estimator gae --critic.num_gpus_per_node 1",
        "^--critic.model_name_or_path: /no/model ",
    ),
    "--data.prompt_dataset": ("--data.prompt_dataset {bad}", "row 1 of .* has nothing in 'input'"),
    "--data.max_len": ("--data.max_len 8 --rollout.max_new_tokens 7", "raise --data.max_len, or shorten the prompt"),
    "--rollout.max_new_tokens": (
        "--data.max_len 8 --rollout.max_new_tokens 8", "--rollout.max_new_tokens 8 leaves no room"
    ),
    "--train.batch_size": ("--train.batch_size 97", "--train.batch_size 97 is no multiple of"),
    "--train.micro_batch_size": ("--train.micro_batch_size 7", "--train.micro_batch_size 7 times"),
    "--ckpt.output_dir": ("--ckpt.output_dir {file}", "^--ckpt.output_dir: {file} is not a directory"),
    "--logger.tensorboard_dir": (
        "--logger.tensorboard_dir {file}", "^--logger.tensorboard_dir: {file} is not a directory"
    ),
    "--train.async_enable": ("--train.async_enable --tp_switch.enable", "--tp_switch.enable .*--train.async_enable"),
    "--train.async_queue_size": (
        f"{PIPELINE} --train.async_queue_size 2", f"{NOT_PIPELINED}--train.async_queue_size above 1"
    ),
    "--train.partial_rollout_enable": (
        f"{PIPELINE} --train.partial_rollout_enable", f"{NOT_PIPELINED}--train.partial_rollout_enable"
    ),
    "--train.colocate_all": (f"{PIPELINE} --train.colocate_all", f"{NOT_PIPELINED}--train.colocate_all"),
    "--rollout.vllm_generate_batch_size": (
        f"{PIPELINE} --rollout.vllm_generate_batch_size 99", f"{NOT_PIPELINED}--rollout.vllm_generate_batch_size"
    ),
    "--algo.dynamic_filtering_enable": (
        f"{PIPELINE} --algo.dynamic_filtering_enable --histopipe.defer",
        f"{NOT_PIPELINED}--algo.dynamic_filtering_enable",
    ),
    "--train.agent_func_path": (
        f"{PIPELINE} --move.enable --train.agent_func_path a.py", f"{NOT_PIPELINED}--train.agent_func_path"
    ),
    "--vllm.sync_backend": (f"--vllm.sync_backend gloo {BUFFER}", f"--vllm.sync_backend gloo {NO_EFFECT}"),
    "--vllm.sync_with_ray": (f"--vllm.sync_with_ray {BUFFER}", f"--vllm.sync_with_ray {NO_EFFECT}"),
    "--reward.remote_url": ("--reward.remote_url {raises}", "raises.py cannot be imported: ValueError: no"),
    "--ckpt.max_num": ("--ckpt.max_num 1", "--ckpt.max_num is 2"),
    "--ckpt.load_enable": ("--ckpt.load_enable --ckpt.path {foreign}", "names 'theirs', which is no checkpoint"),
    "--ds.use_universal_ckpt": (
        "--ckpt.load_enable --ds.use_universal_ckpt --ckpt.path {foreign}", "latest_universal names no checkpoint there"
    ),
}  # fmt: skip
# What no check before the start shows.
IN_A_RUN = {
    "--ckpt.path": "cli/test_judged_flags.py::test_two_runs_do_not_share_their_checkpoints",
    "--ckpt.save_steps": "training/test_stop_request.py::test_a_trainer_stops_only_when_asked_and_saves_first",
    "--ds.param_dtype": "cli/test_judged_flags.py::test_without_a_gpu_weights_are_32_bits_unless_bfloat16_is_asked_for",
    "--logger.wandb.key": "cli/test_judged_flags.py::test_a_key_of_wandb_is_hidden",
    "--vllm.enable_sleep": "cli/test_judged_flags.py::test_engines_without_a_gpu_never_sleep",
    "--train.enable_ema": "cli/test_judged_flags.py::test_a_moving_average_starts_anew_after_a_resume",
}
TESTS = Path(__file__).parents[1]
CASES = [
    *((flag, *case, 3) for flag, case in WITH_GPUS.items()),
    *((flag, *case, 0) for flag, case in WITHOUT_GPU.items()),
]


@pytest.fixture(autouse=True, scope="module")
def right_files_are_imported_once(starts_python: None) -> Iterator[None]:
    """A reward file is imported in a process of its own, with torch: once that it can be is enough for the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_check_import", functools.cache(preflight._check_import))
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files that are wrong, by the names that `CASES` has."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "bad.jsonl").write_text(json.dumps({"input": None, "label": "2"}))
    (folder / "file").write_text("")
    (folder / "raises.py").write_text("raise ValueError('no')")
    for save in ("theirs", "global_step1"):
        (folder / "foreign" / "_actor" / save).mkdir(parents=True)
    (folder / "foreign" / "_actor" / "latest").write_text("theirs")
    names = {"bad": "bad.jsonl", "file": "file", "raises": "raises.py", "foreign": "foreign"}
    return {"none": "", **{name: str(folder / file) for name, file in names.items()}}


def told(words: list[str], gpus: bool) -> str:
    """Return what a run's checks say, in the order of `rhyme train`: sentences, or the refusal."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args = upstream.parse(words)
        RhymeSettings.from_namespace(args)
        said = [] if gpus else adapt_arguments(args)
        found = preflight.check(args, gpus)
        said += [*found.said, preflight_gpus.check_gpus(args, gpus), *prepare(args, found.prompts)[1]]
    except SystemExit:
        # As argparse refuses.
        return errors.getvalue()
    except (upstream.ArgumentsError, SettingsError, PlatformError, preflight.PreflightError, ResumeError) as error:
        return str(error)
    return "\n".join(said)


@pytest.mark.parametrize(("flag", "flags", "said", "gpus"), CASES, ids=[f"{case[0]}, {case[3]} GPUs" for case in CASES])
def test_a_flag_costs_the_sentence_that_the_table_announces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, str], flag: str, flags: str, said: str, gpus: int
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight_gpus, "_check_compiler", lambda: None)
    if gpus:
        nvml.install(monkeypatch, tmp_path, gpus=gpus)
    more = [word.format(**inputs) for word in flags.split()]
    assert any(word.startswith(flag) for word in more)
    found = told([*demo.arguments(str(tmp_path / "saved")), *more], bool(gpus))
    assert re.search(said.format(**inputs), found), found


@pytest.mark.parametrize(
    "flag", sorted(flag for flag, judged in UPSTREAM_FLAGS.items() if judged.verdict != "the same")
)
def test_each_flag_that_is_not_the_same_has_a_test(flag: str) -> None:
    tests = [flag in WITH_GPUS, flag in WITHOUT_GPU, flag in IN_A_RUN]
    assert any(tests), "drive its check here"
    if flag in IN_A_RUN:
        file, _, name = IN_A_RUN[flag].partition("::")
        assert f"def {name}(" in (TESTS / file).read_text()


def test_two_runs_do_not_share_their_checkpoints(tmp_path: Path) -> None:
    refused = pytest.raises(DirectoryLockError, match=r"^--ckpt.path ")
    with held({"--ckpt.path": str(tmp_path)}, "first"), refused, held({"--ckpt.path": str(tmp_path)}, "second"):
        pass


@pytest.mark.parametrize(("flags", "dtype"), [("", "fp32"), ("--cpu.dtype bfloat16", "bf16")])
def test_without_a_gpu_weights_are_32_bits_unless_bfloat16_is_asked_for(tmp_path: Path, flags: str, dtype: str) -> None:
    args = upstream.parse([*demo.arguments(str(tmp_path)), "--ds.param_dtype", "bf16", *flags.split()])
    adapt_arguments(args)
    assert args.ds.param_dtype == dtype


def test_engines_without_a_gpu_never_sleep() -> None:
    assert cpu_engine_arguments({"enable_sleep_mode": True}, CpuSettings())["enable_sleep_mode"] is False


def test_a_key_of_wandb_is_hidden() -> None:
    assert "abc123" not in " ".join(redact_command(["--logger.wandb.key", "abc123", "--logger.wandb.key=abc123"]))


def test_a_moving_average_starts_anew_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = upstream.parse(
        [*demo.arguments(str(tmp_path)), "--ckpt.load_enable", "--train.enable_ema", "--ckpt.path", str(tmp_path)]
    )
    monkeypatch.setattr(resume, "_choose", lambda *_: (ResumePoint("global_step3", 3, None, ()), "resumes"))
    assert "the moving average (--train.enable_ema) is in no checkpoint" in prepare(args, 8)[1][-1]
