"""Bad input costs one clear sentence, before anything is started."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, get_scheduler
from transformers.trainer_utils import SchedulerType

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import preflight, preflight_models, preflight_runner, train_ppo_ray, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import model_name, to_text
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import V1, DraftingSettings
from rhyme_openrlhf.settings.upstream_ranges import SCHEDULERS
from tests.latency import formula

pytest.importorskip("openrlhf")


@pytest.fixture(autouse=True, scope="module")
def right_files_are_imported_once(starts_python: None) -> Iterator[None]:
    """A reward file is imported in a process of its own, with torch: once that it can be is enough for the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_check_import", functools.cache(preflight._check_import))
        yield


def check(tmp_path: Path, **changed: str) -> preflight.Checked:
    """Run the checks on the demo's arguments with some flags changed (`__` for a dot)."""
    argv = arguments(str(tmp_path))
    for name, value in changed.items():
        argv += ["--" + name.replace("__", "."), value]
    return preflight.check(upstream.parse(argv))


def refused(tmp_path: Path, **changed: str) -> str:
    with pytest.raises(preflight.PreflightError) as error:
        check(tmp_path, **changed)
    assert "\n" not in str(error.value)
    return str(error.value)


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
    decided = settings.with_transport(on_gpus, lora="--ds.lora.rank" in flags).with_runner(V1)
    assert decided == RhymeSettings.from_namespace(args)
    assert decided.weights_by_buffer == (taken == "buffer")


def test_what_one_transport_cannot_send_is_refused_with_it_alone(tmp_path: Path) -> None:
    def checked(*more: str) -> None:
        preflight.check(upstream.parse([*arguments(str(tmp_path)), *more]), on_gpus=True)

    parallel = ("--ds.tensor_parallel_size", "2", "--actor.num_gpus_per_node", "2")
    checked(*parallel)
    with pytest.raises(preflight.PreflightError, match="parallel_size above 1 needs --weights.transport openrlhf"):
        checked(*parallel, "--weights.transport", "buffer")
    with pytest.raises(preflight.PreflightError, match="parallel_size above 1 .*--move.enable"):
        checked(*parallel, "--move.enable")
    checked("--ds.lora.rank", "8", "--move.enable")
    with pytest.raises(preflight.PreflightError, match="lora.rank above 0 needs --weights.transport buffer"):
        checked("--ds.lora.rank", "8", "--weights.transport", "openrlhf")
    for more in ((), ("--weights.transport", "buffer")):
        with pytest.raises(preflight.PreflightError, match="--ds.load_in_4bit does not go with --ds.lora.rank: "):
            checked("--ds.lora.rank", "8", "--ds.load_in_4bit", *more)
    checked("--ds.load_in_4bit")


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


def test_without_a_gpu_colocated_weights_go_by_the_buffer(tmp_path: Path) -> None:
    colocated = ("--train.colocate_all", "--vllm.num_engines", "1")
    preflight.check(upstream.parse([*arguments(str(tmp_path)), *colocated]))
    args = upstream.parse([*arguments(str(tmp_path)), *colocated, "--weights.transport", "openrlhf"])
    with pytest.raises(preflight.PreflightError, match="needs GPUs, because OpenRLHF then shares weights by CUDA IPC"):
        preflight.check(args)


def test_the_demo_passes(tmp_path: Path) -> None:
    rows = (embedded.DATA / "mixed_train.jsonl").read_text().splitlines()
    assert check(tmp_path).prompts == len(rows)


def test_missing_data_set(tmp_path: Path) -> None:
    assert (
        refused(tmp_path, data__prompt_dataset="nowhere.jsonl") == "--data.prompt_dataset: nowhere.jsonl does not exist"
    )


def test_empty_data_set(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert refused(tmp_path, data__prompt_dataset=str(empty)) == f"--data.prompt_dataset: {empty} is empty"


def test_unreadable_data_set(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{no json\n")
    assert f"{broken} cannot be loaded" in refused(tmp_path, data__prompt_dataset=str(broken))


def test_missing_column(tmp_path: Path) -> None:
    message = refused(tmp_path, data__label_key="answer")
    assert "has no column 'answer' (--data.label_key)" in message and "input, label" in message


def test_prompt_longer_than_the_limit(tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    rows = [{"input": "1+1=", "label": "2"}, {"input": "1" * 700, "label": "x"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refused(tmp_path, data__prompt_dataset=str(data))
    assert f"the prompt in row 2 of {data} has 700 tokens" in message and "raise --data.max_len" in message


def test_eval_prompts_are_checked_too(tmp_path: Path) -> None:
    assert "--eval.dataset: gone.jsonl does not exist" in refused(tmp_path, eval__dataset="gone.jsonl")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("import no_such_module\n", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def reward(q, p, l): ...\n", "it defines no reward_func"),
        ("def reward_func(:\n", "SyntaxError"),
    ],
)
def test_reward_file_that_does_not_import(content: str, reason: str, tmp_path: Path) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text(content)
    message = refused(tmp_path, reward__remote_url=str(reward))
    assert message.startswith(f"--reward.remote_url: {reward}") and reason in message


def test_missing_reward_file(tmp_path: Path) -> None:
    assert refused(tmp_path, reward__remote_url="gone.py") == "--reward.remote_url: gone.py does not exist"


def test_model_path_that_does_not_exist(tmp_path: Path) -> None:
    message = refused(tmp_path, actor__model_name_or_path="/no/such/model")
    assert message == "--actor.model_name_or_path: /no/such/model does not exist"


def test_directory_that_is_no_model(tmp_path: Path) -> None:
    assert "has no config.json" in refused(tmp_path, actor__model_name_or_path=str(tmp_path))


def test_tensor_parallel_size_that_does_not_divide_the_heads(tmp_path: Path) -> None:
    message = refused(tmp_path, vllm__tensor_parallel_size="3")
    assert "--vllm.tensor_parallel_size 3 does not divide the model's" in message and "possible: 1, 2, 4" in message


def test_key_value_heads_that_fit_in_no_way(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded.MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_attention_heads": 12, "num_key_value_heads": 6}))
    message = refused(tmp_path, actor__model_name_or_path=str(model), vllm__tensor_parallel_size="4")
    assert "6 key-value heads" in message


def test_the_command_exits_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*arguments(str(tmp_path)), "--data.prompt_dataset", "nowhere.jsonl"]
    assert train_ppo_ray.main(argv) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[-1] == "rhyme train: error: --data.prompt_dataset: nowhere.jsonl does not exist"


@pytest.mark.parametrize("flag", ["--ds.packing_samples", "--ds.load_in_4bit"])
def test_options_that_need_a_gpu_are_refused_without_one(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_ppo_ray.main([*arguments(str(tmp_path)), flag]) == 2
    assert f"{flag} needs a GPU" in capsys.readouterr().err


def test_a_bad_setting_of_ours_exits_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert train_ppo_ray.main([*arguments(str(tmp_path)), "--histospec.window_max", "500"]) == 2
    assert "--histospec.window_max must be from 1 to 128, got 500" in capsys.readouterr().err


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    from rhyme_openrlhf.telemetry.run_directory import RunDirectoryError, make_run_directory

    (tmp_path / "something").touch()
    with pytest.raises(RunDirectoryError, match="is not empty"):
        make_run_directory(str(tmp_path), "x", 0.0)


def profile_of_the_demo(path: Path, **changes: object) -> str:
    """A profile's file, as if measured of the demo's model on this machine."""
    subject = dataclasses.replace(
        formula.SUBJECT, model=model_name(AutoConfig.from_pretrained(embedded.MODEL), DraftingSettings())
    )
    profiles.write(formula.profile(subject=dataclasses.replace(subject, **changes)), path)
    return str(path)


def test_a_profile_of_this_model_passes(tmp_path: Path) -> None:
    check(tmp_path, latency__profile=profile_of_the_demo(tmp_path / "p.json"))
    check(tmp_path, latency__profile="none")


def test_a_profile_of_something_else_is_named_beside_what_runs(tmp_path: Path) -> None:
    path = profile_of_the_demo(tmp_path / "p.json", model="Llama 2x64", tensor_parallel_size=4)
    message = refused(tmp_path, latency__profile=path)
    assert message.startswith(f"--latency.profile: {path} is a profile of something else: model is 'Llama 2x64' there")
    assert "tensor_parallel_size is 4 there and 1 here" in message


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere.json cannot be read" in refused(tmp_path, latency__profile="nowhere.json")


def test_a_corrupt_profile_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    lines = Path(profile_of_the_demo(path)).read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("    [")) + 1
    lines[at - 1] = lines[at - 1].replace("[", "[-1, ", 1)
    path.write_text("\n".join(lines))
    assert f"line {at}:" in refused(tmp_path, latency__profile=str(path))


def draft_model(folder: Path, **config: object) -> str:
    """A copy of the embedded draft model's directory with another configuration."""
    shutil.copytree(embedded.DRAFT_MODEL, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


def test_the_embedded_draft_model_passes(tmp_path: Path) -> None:
    assert check(tmp_path, drafting__source="draft_model", drafting__model=str(embedded.DRAFT_MODEL)).prompts > 0


def test_a_draft_model_with_another_vocabulary(tmp_path: Path) -> None:
    path = draft_model(tmp_path / "other", vocab_size=96)
    assert refused(tmp_path, drafting__source="draft_model", drafting__model=path) == (
        f"--drafting.model: {path} has a vocabulary of 96 tokens, the policy one of 128"
    )


def test_a_draft_model_that_numbers_its_tokens_differently(tmp_path: Path) -> None:
    path = draft_model(tmp_path / "other")
    file = Path(path) / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(content))
    message = refused(tmp_path, drafting__source="draft_model", drafting__model=path)
    assert "numbers its tokens differently" in message and "2 of 128" in message


def test_a_whole_model_is_no_eagle_head(tmp_path: Path) -> None:
    message = refused(tmp_path, drafting__source="eagle3", drafting__model=str(embedded.DRAFT_MODEL))
    assert "is no EAGLE head (its architecture is Qwen3ForCausalLM)" in message


def test_an_eagle_head_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = draft_model(tmp_path / "head", architectures=["LlamaForCausalLMEagle3"], model_type="llama")
    monkeypatch.setattr(preflight_models, "gpu_present", lambda: False)
    assert "runs on GPUs only" in refused(tmp_path, drafting__source="eagle3", drafting__model=head)
    monkeypatch.setattr(preflight_models, "gpu_present", lambda: True)
    assert check(tmp_path, drafting__source="eagle3", drafting__model=head).prompts > 0


def test_a_draft_model_that_is_not_there(tmp_path: Path) -> None:
    message = refused(tmp_path, drafting__source="draft_model", drafting__model="/nowhere")
    assert message == "--drafting.model: /nowhere does not exist"


def test_a_source_needs_speculation(tmp_path: Path) -> None:
    argv = [*arguments(str(tmp_path)), "--drafting.source", "ngram", "--no-histospec.enable"]
    with pytest.raises(preflight.PreflightError, match="needs speculation"):
        preflight.check(upstream.parse(argv))


def test_the_second_model_runner_needs_a_gpu_and_samples_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_second(*flags: str) -> None:
        preflight.check(upstream.parse([*arguments(str(tmp_path)), "--drafting.runner", "v2", *flags]))

    monkeypatch.setattr(preflight_runner, "gpu_present", lambda: False)
    with pytest.raises(preflight.PreflightError, match="needs a GPU"):
        with_second()
    monkeypatch.setattr(preflight_runner, "gpu_present", lambda: True)
    with_second()
    with pytest.raises(preflight.PreflightError, match="goes with no moves"):
        with_second("--move.enable")
    with pytest.raises(preflight.PreflightError, match="that speculate"):
        with_second("--no-histospec.enable")
    with_second("--vllm.tensor_parallel_size", "2")
    with_second("--vllm.tensor_parallel_size", "2", "--drafting.runner", "v2-async")
    profile = tmp_path / "profile.json"
    profile.write_text(to_text(formula.profile()))
    with_second("--emulate.profile", str(profile))
    with pytest.raises(preflight.PreflightError, match="v2-async does not go with --emulate.profile.* v2$"):
        with_second("--emulate.profile", str(profile), "--drafting.runner", "v2-async")


def test_reallocation_without_what_it_needs(tmp_path: Path) -> None:
    def with_reallocation(*flags: str) -> None:
        preflight.check(upstream.parse([*arguments(str(tmp_path)), "--reallocation.enable", *flags]))

    with pytest.raises(preflight.PreflightError, match="needs two engines"):
        with_reallocation("--vllm.num_engines", "1")
    for unmeasured in (("--latency.profile", "none"), ("--no-histospec.enable",)):
        with pytest.raises(preflight.PreflightError, match="needs step times .* or the number as"):
            with_reallocation(*unmeasured)
        with_reallocation(*unmeasured, "--reallocation.threshold", "8")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--histopipe.enable"], "--train.async_enable"),
        (["--train.async_queue_size", "2"], "--train.async_queue_size"),
        (["--rollout.vllm_generate_batch_size", "99"], "--rollout.vllm_generate_batch_size"),
        (["--train.partial_rollout_enable"], "--train.partial_rollout_enable"),
        (["--algo.dynamic_filtering_enable", "--histopipe.defer"], "--algo.dynamic_filtering_enable"),
        (["--train.colocate_all"], "--train.colocate_all"),
        (["--weights.transport", "openrlhf"], "--weights.transport"),
        (["--run.reproducible"], "--run.reproducible"),
        (["--move.enable", "--train.agent_func_path", "agent.py"], "--move.enable"),
        (["--tp_switch.enable", "--train.agent_func_path", "agent.py"], "--tp_switch.enable"),
        (["--reallocation.enable"], "--reallocation.enable"),
    ],
)
def test_what_cannot_be_pipelined_is_named(tmp_path: Path, flags: list[str], named: str) -> None:
    pipelined = [] if flags == ["--histopipe.enable"] else ["--histopipe.enable", "--train.async_enable"]
    with pytest.raises(preflight.PreflightError, match=f"--histopipe.enable .*{named}") as error:
        preflight.check(upstream.parse([*arguments(str(tmp_path)), *pipelined, *flags]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kind",
    ["qwen3_next", "jamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2", "mamba2", "minimax"],
)
def test_models_with_states_are_known(kind: str) -> None:
    assert preflight_models.is_hybrid(AutoConfig.for_model(kind))


@pytest.mark.parametrize(
    "kind", ["qwen3", "llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "mistral", "cohere2"]
)
def test_models_with_attention_alone_are_none(kind: str) -> None:
    assert not preflight_models.is_hybrid(AutoConfig.for_model(kind))


def test_a_hybrid_model_runs_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_models, "is_hybrid", lambda config: True)
    message = refused(tmp_path)
    assert "Mamba-like layers, and vLLM loses part of their state" in message and "--no-histospec.enable" in message
    # However short they are, and of every source.
    assert refused(tmp_path, histospec__window_max="2") == message
    assert refused(tmp_path, drafting__source="ngram", drafting__tokens="1") == message
    argv = [*arguments(str(tmp_path)), "--no-histospec.enable"]
    preflight.check(upstream.parse(argv))


def test_a_reward_is_a_file_or_an_address(tmp_path: Path) -> None:
    for nothing in ("reward_server:8000", "rewards", "http://there:1,there"):
        assert "is neither a .py file nor an address" in refused(tmp_path, reward__remote_url=nothing)
    check(tmp_path, reward__remote_url="http://there:8000/reward,https://here")


def test_a_critic_that_is_not_there_is_named(tmp_path: Path) -> None:
    gae = {"algo__advantage__estimator": "gae", "critic__num_gpus_per_node": "1"}
    said = refused(tmp_path, critic__model_name_or_path=str(tmp_path / "none"), **gae)
    assert said == f"--critic.model_name_or_path: {tmp_path / 'none'} does not exist"


def test_models_that_cannot_be_placed_are_refused_before_ray_starts(tmp_path: Path) -> None:
    said = refused(tmp_path, ref__num_gpus_per_node="0", algo__kl__init_coef="0.1")
    assert said.startswith("--ref.num_nodes times --ref.num_gpus_per_node is 0")


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
