"""Bad input costs one clear sentence, before anything is started."""

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, get_scheduler
from transformers.trainer_utils import SchedulerType

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import preflight, preflight_models, train_ppo_ray, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import model_name
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import V1, V2_ASYNC, DraftingSettings
from rhyme_openrlhf.settings.upstream_ranges import SCHEDULERS
from tests.latency import formula

pytest.importorskip("openrlhf")


@pytest.fixture(autouse=True, scope="module")
def right_files_are_imported_once(starts_python: None) -> Iterator[None]:
    """A reward file is imported in a process of its own, with torch: once that it can be is enough for the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_check_import", functools.cache(preflight._check_import))
        yield


def model(folder: Path, of: Path = embedded.MODEL, **config: object) -> Path:
    """A copy of a model's directory with another configuration."""
    shutil.copytree(of, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def profile_of_the_demo(path: Path, **changes: object) -> Path:
    """A profile's file, as if measured of the demo's model on this machine."""
    subject = dataclasses.replace(
        formula.SUBJECT, model=model_name(AutoConfig.from_pretrained(embedded.MODEL), DraftingSettings())
    )
    profiles.write(formula.profile(subject=dataclasses.replace(subject, **changes)), path)
    return path


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs, each wrong in one way but `right.json`, a profile, and `head`, an EAGLE head."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = {
        "empty.jsonl": "",
        "broken.jsonl": "{no json\n",
        "long.jsonl": '{"input": "1+1=", "label": "2"}\n' + json.dumps({"input": "1" * 700, "label": "x"}) + "\n",
        "lacking.py": "import no_such_module\n",
        "nameless.py": "def reward(q, p, l): ...\n",
        "unread.py": "def reward_func(:\n",
        "awaits.py": "async def reward_func(queries, prompts, labels): ...\n",
        "yields.py": "def reward_func(queries, prompts, labels):\n    yield 1.0\n",
        "two.py": "def reward_func(queries, prompts): ...\n",
    }
    for name, content in texts.items():
        (folder / name).write_text(content)
    model(folder / "heads", num_attention_heads=12, num_key_value_heads=6)
    model(folder / "vocabulary", embedded.DRAFT_MODEL, vocab_size=96)
    model(folder / "head", embedded.DRAFT_MODEL, architectures=["LlamaForCausalLMEagle3"], model_type="llama")
    numbered = model(folder / "numbered", embedded.DRAFT_MODEL) / "tokenizer.json"
    content = json.loads(numbered.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    numbered.write_text(json.dumps(content))
    profile_of_the_demo(folder / "else.json", model="Llama 2x64", tensor_parallel_size=4)
    lines = profile_of_the_demo(folder / "right.json").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("    ["))
    (folder / "corrupt.json").write_text("\n".join([*lines[:at], lines[at].replace("[", "[-1, ", 1), *lines[at + 1 :]]))
    return folder


def check(folder: Path, flags: str, on_gpus: bool = False) -> preflight.Checked:
    """Run the checks on the demo's arguments with these flags more."""
    return preflight.check(upstream.parse([*arguments(str(folder)), *flags.split()]), on_gpus)


PARALLEL = "--ds.tensor_parallel_size 2 --actor.num_gpus_per_node 2"
DRAFT_MODEL = "--drafting.source draft_model --drafting.model"
PIPELINED = "--histopipe.enable --train.async_enable"
# {there} is the folder above. The flags, and the sentence that they cost.
REFUSED = (
    ("--data.prompt_dataset nowhere.jsonl", "^--data.prompt_dataset: nowhere.jsonl does not exist$"),
    ("--data.prompt_dataset {there}/empty.jsonl", "^--data.prompt_dataset: {there}/empty.jsonl is empty$"),
    ("--data.prompt_dataset {there}/broken.jsonl", "{there}/broken.jsonl cannot be loaded"),
    ("--data.label_key answer", r"has no column 'answer' \(--data.label_key\).*input, label"),
    (
        "--data.prompt_dataset {there}/long.jsonl",
        "row 2 of .*/long.jsonl has 700 tokens.*raise --data.max_len",
    ),
    ("--eval.dataset gone.jsonl", "--eval.dataset: gone.jsonl does not exist"),
    ("--reward.remote_url {there}/lacking.py", "lacking.py cannot be imported: ModuleNotFoundError.*no_such_module"),
    ("--reward.remote_url {there}/nameless.py", "^--reward.remote_url: {there}/nameless.py.*it defines no reward_func"),
    ("--reward.remote_url {there}/unread.py", "^--reward.remote_url: {there}/unread.py.*SyntaxError"),
    ("--reward.remote_url {there}/awaits.py", "must return rewards, and neither await nor yield"),
    ("--reward.remote_url {there}/yields.py", "must return rewards, and neither await nor yield"),
    ("--reward.remote_url {there}/two.py", r"its reward_func\(queries, prompts\) must take three arguments"),
    ("--reward.remote_url gone.py", "^--reward.remote_url: gone.py does not exist$"),
    ("--reward.remote_url rewards", "is neither a .py file nor an address"),
    ("--reward.remote_url reward_server:8000", "is neither a .py file nor an address"),
    ("--reward.remote_url http://there:1,there", "is neither a .py file nor an address"),
    ("--actor.model_name_or_path /no/such/model", "^--actor.model_name_or_path: /no/such/model does not exist$"),
    ("--actor.model_name_or_path {there}", "has no config.json"),
    (
        "--critic.model_name_or_path {there}/none --algo.advantage.estimator gae --critic.num_gpus_per_node 1",
        "^--critic.model_name_or_path: {there}/none does not exist$",
    ),
    (
        "--ref.num_gpus_per_node 0 --algo.kl.init_coef 0.1",
        "^--ref.num_nodes times --ref.num_gpus_per_node is 0",
    ),
    ("--vllm.tensor_parallel_size 3", "tensor_parallel_size 3 does not divide the model's.*possible: 1, 2, 4"),
    ("--actor.model_name_or_path {there}/heads --vllm.tensor_parallel_size 4", "6 key-value heads"),
    (
        "--latency.profile {there}/else.json",
        "^--latency.profile: {there}/else.json is a profile of something else: model is 'Llama 2x64' there"
        ".*tensor_parallel_size is 4 there and 1 here",
    ),
    ("--latency.profile nowhere.json", "nowhere.json cannot be read"),
    ("--latency.profile {there}/corrupt.json", r"line \d+:"),
    (
        f"{DRAFT_MODEL} {{there}}/vocabulary",
        "^--drafting.model: {there}/vocabulary has a vocabulary of 96 tokens, the policy one of 128$",
    ),
    (f"{DRAFT_MODEL} {{there}}/numbered", "numbers its tokens differently.*2 of 128"),
    (f"{DRAFT_MODEL} /nowhere", "^--drafting.model: /nowhere does not exist$"),
    (
        f"--drafting.source eagle3 --drafting.model {embedded.DRAFT_MODEL}",
        r"is no EAGLE head \(its architecture is Qwen3ForCausalLM\)",
    ),
    ("--drafting.source eagle3 --drafting.model {there}/head", "runs on GPUs only"),
    ("--drafting.source ngram --no-histospec.enable", "needs speculation"),
    ("--drafting.runner v2-async", "needs a GPU"),
    ("--train.colocate_all --vllm.num_engines 1 --weights.transport openrlhf", "needs GPUs.*by CUDA IPC"),
    ("--reallocation.enable --vllm.num_engines 1", "needs two engines"),
    ("--reallocation.enable --latency.profile none", "needs step times .* or the number as"),
    ("--reallocation.enable --no-histospec.enable", "needs step times .* or the number as"),
    ("--histopipe.enable", "--histopipe.enable .*--train.async_enable"),
    *(
        (f"{PIPELINED} {flags}", f"--histopipe.enable .*{flags.split()[0]}")
        for flags in (
            "--train.async_queue_size 2",
            "--rollout.vllm_generate_batch_size 99",
            "--train.partial_rollout_enable",
            "--algo.dynamic_filtering_enable --histopipe.defer",
            "--train.colocate_all",
            "--weights.transport openrlhf",
            "--run.reproducible",
            "--move.enable --train.agent_func_path agent.py",
            "--tp_switch.enable --train.agent_func_path agent.py",
            "--reallocation.enable",
        )
    ),
)
REFUSED_ON_GPUS = (
    (f"{PARALLEL} --weights.transport buffer", "parallel_size above 1 needs --weights.transport openrlhf"),
    (f"{PARALLEL} --move.enable", "parallel_size above 1 .*--move.enable"),
    (
        "--ds.lora.rank 8 --weights.transport openrlhf",
        "lora.rank above 0 needs --weights.transport buffer",
    ),
    ("--ds.lora.rank 8 --ds.load_in_4bit", "--ds.load_in_4bit does not go with --ds.lora.rank: "),
    (
        "--ds.lora.rank 8 --ds.load_in_4bit --weights.transport buffer",
        "--ds.load_in_4bit does not go with --ds.lora.rank: ",
    ),
    ("--drafting.runner v2-async --no-histospec.enable", "that speculate"),
    (
        "--drafting.runner v2-async --emulate.profile {there}/right.json",
        "v2-async does not go with --emulate.profile",
    ),
    ("--drafting.runner v2-async --run.reproducible", "v2-async does not go with --run.reproducible: "),
)
PASSES = (
    "",
    "--latency.profile {there}/right.json",
    "--latency.profile none",
    f"{DRAFT_MODEL} {embedded.DRAFT_MODEL}",
    "--reward.remote_url http://there:8000/reward,https://here",
    "--train.colocate_all --vllm.num_engines 1",
    "--reallocation.enable --latency.profile none --reallocation.threshold 8",
    "--reallocation.enable --no-histospec.enable --reallocation.threshold 8",
)
PASSES_ON_GPUS = (
    PARALLEL,
    "--ds.lora.rank 8 --move.enable",
    "--ds.load_in_4bit",
    "--drafting.source eagle3 --drafting.model {there}/head",
    "--drafting.runner v2-async",
    "--drafting.runner v2-async --reallocation.enable",
    "--drafting.runner v2-async --vllm.tensor_parallel_size 2",
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which all that decides by GPUs says that it has some."""
    monkeypatch.setattr(preflight_models, "gpu_present", lambda: True)


def refusal(tmp_path: Path, there: Path, flags: str, on_gpus: bool) -> str:
    with pytest.raises(preflight.PreflightError) as error:
        check(tmp_path, flags.format(there=there), on_gpus)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_bad_input_is_refused_in_one_sentence(tmp_path: Path, there: Path, flags: str, sentence: str) -> None:
    assert re.search(sentence.format(there=there), refusal(tmp_path, there, flags, on_gpus=False))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("flags", "sentence"), REFUSED_ON_GPUS)
def test_what_gpus_cannot_do_is_refused_in_one_sentence(tmp_path: Path, there: Path, flags: str, sentence: str) -> None:
    assert re.search(sentence.format(there=there), refusal(tmp_path, there, flags, on_gpus=True))


@pytest.mark.parametrize("flags", PASSES)
def test_good_input_passes(tmp_path: Path, there: Path, flags: str) -> None:
    rows = (embedded.DATA / "mixed_train.jsonl").read_text().splitlines()
    assert check(tmp_path, flags.format(there=there)).prompts == len(rows)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("flags", PASSES_ON_GPUS)
def test_good_input_passes_on_gpus(tmp_path: Path, there: Path, flags: str) -> None:
    assert check(tmp_path, flags.format(there=there), on_gpus=True).prompts > 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--data.prompt_dataset nowhere.jsonl", "--data.prompt_dataset: nowhere.jsonl does not exist"),
        ("--ds.packing_samples", "--ds.packing_samples needs a GPU"),
        ("--ds.load_in_4bit", "--ds.load_in_4bit needs a GPU"),
        ("--histospec.window_max 500", "--histospec.window_max must be from 1 to 128, got 500"),
    ],
)
def test_the_command_exits_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, sentence: str
) -> None:
    assert train_ppo_ray.main([*arguments(str(tmp_path)), *flags.split()]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"rhyme train: error: {sentence}")


@pytest.mark.parametrize(
    ("flags", "on_gpus", "taken"),
    [
        ([], True, "openrlhf"),
        ([], False, "buffer"),
        (["--move.enable"], True, "buffer"),
        (["--reallocation.enable", "--reallocation.threshold", "8"], True, "buffer"),
        (["--histopipe.enable", "--train.async_enable"], True, "buffer"),
        (["--ds.lora.rank", "8"], True, "buffer"),
        (["--weights.transport", "openrlhf", "--move.enable"], True, "openrlhf"),
        (["--weights.transport", "buffer"], True, "buffer"),
    ],
)
def test_weights_go_by_what_the_machine_and_the_run_need(
    tmp_path: Path, flags: list[str], on_gpus: bool, taken: str
) -> None:
    args = upstream.parse([*arguments(str(tmp_path)), "--vllm.num_engines", "2", *flags])
    settings = RhymeSettings.from_namespace(args)
    preflight.check(args, on_gpus)
    assert args.weights.transport == taken
    decided = settings.with_transport(on_gpus, lora="--ds.lora.rank" in flags).with_runner(V2_ASYNC if on_gpus else V1)
    assert decided == RhymeSettings.from_namespace(args)
    assert decided.weights_by_buffer == (taken == "buffer")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--weights.transport buffer", ""),
        ("--weights.transport buffer --vllm.sync_backend gloo", "--vllm.sync_backend gloo has no effect: the weight"),
        (
            "--move.enable --vllm.sync_backend gloo --vllm.sync_with_ray",
            "--vllm.sync_backend gloo and --vllm.sync_with_ray have no effect: the weight",
        ),
        ("--weights.transport openrlhf --vllm.sync_backend gloo --vllm.sync_with_ray", ""),
    ],
)
def test_options_without_effect_beside_the_buffer_are_said(tmp_path: Path, flags: str, said: str) -> None:
    found = preflight.check(upstream.parse([*arguments(str(tmp_path)), *flags.split()]), on_gpus=True).said
    shown = [sentence for sentence in found if "no effect" in sentence]
    assert len(shown) == bool(said) and all(sentence.startswith(said) for sentence in shown)


HYBRID = ["qwen3_next", "jamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2", "mamba2", "minimax"]
ATTENTION = ["qwen3", "llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "mistral", "cohere2"]


@pytest.mark.parametrize("kind", [*HYBRID, *ATTENTION])
def test_models_with_states_are_known(kind: str) -> None:
    assert preflight_models.is_hybrid(AutoConfig.for_model(kind)) == (kind in HYBRID)


def test_a_hybrid_model_runs_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_models, "is_hybrid", lambda config: True)
    # However short they are, and of every source.
    for flags in ("", "--histospec.window_max 2", "--drafting.source ngram --drafting.tokens 1"):
        message = refusal(tmp_path, tmp_path, flags, on_gpus=False)
        assert "Mamba-like layers, and vLLM loses part" in message and "--no-histospec.enable" in message
    check(tmp_path, "--no-histospec.enable")


def test_the_schedulers_are_those_that_transformers_makes_of_what_openrlhf_gives() -> None:
    def works(name: str) -> bool:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        more = {"min_lr_rate": 0.1} if name in {"cosine_with_min_lr", "cosine_warmup_with_min_lr"} else {}
        try:
            made = get_scheduler(
                name, optimizer, num_warmup_steps=1, num_training_steps=10, scheduler_specific_kwargs=more
            )
            optimizer.step()
            made.step()
        except (TypeError, ValueError):
            return False
        return True

    assert {one.value for one in SchedulerType if works(one.value)} == set(SCHEDULERS)
