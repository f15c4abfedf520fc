"""People's data with anything in it: one sentence that names the flag and the row, or a run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("openrlhf")

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import preflight_data, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.cli.preflight_models import PreflightError
from tests.examples import examples

GOOD = {"input": "1+1=", "label": "2"}
CHAT = [{"role": "user", "content": "1+1="}]


def check(folder: Path, rows: list[Any], *flags: str) -> int:
    """Check the demo's arguments with these rows as its data set."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return preflight_data.check_data(
        upstream.parse([*arguments(str(folder)), "--data.prompt_dataset", str(data), *flags])
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input": None, "label": "2"}, "row 2 of DATA has nothing in 'input', which must be a text"),
        ({"input": "", "label": "2"}, "the prompt in row 2 of DATA is empty"),
        ({"input": "1" * 700, "label": "2"}, "the prompt in row 2 of DATA has 700 tokens"),
    ],
    ids=["null", "empty", "long"],
)
def test_a_row_that_gives_no_prompt_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(PreflightError) as error:
        check(tmp_path, [GOOD, row, GOOD])
    assert said.replace("DATA", str(tmp_path / "data.jsonl")) in str(error.value)


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        ([{"input": 7, "label": "2"}], [], "row 1 of DATA has 7 in 'input', which must be a text"),
        ([{"input": {"a": "b"}, "label": "2"}], [], "which must be a text"),
        ([{"input": CHAT, "label": "2"}], [], "give --data.apply_chat_template"),
        ([GOOD], ["--data.prompt_split", "validation"], "it has no split 'validation' (--data.prompt_split)"),
        ([GOOD], ["--eval.dataset", "DATA", "--eval.split", "test"], "it has no split 'test' (--eval.split)"),
        ([GOOD], ["--data.prompt_probs", "0.5,0.5"], "has 2 numbers, but --data.prompt_dataset names 1 data sets"),
        ([GOOD], ["--data.prompt_dataset", "DATA,"], "names nothing before or behind a comma"),
        ([GOOD], ["--data.prompt_probs", "much"], "must be numbers"),
        ([GOOD], ["--data.prompt_probs", "0.5"], "add up to 1"),
        ([GOOD], ["--data.input_template", "{} {question}"], "cannot be filled in"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(
    tmp_path: Path, rows: list[Any], flags: list[str], said: str
) -> None:
    path = str(tmp_path / "data.jsonl")
    with pytest.raises(PreflightError) as error:
        check(tmp_path, rows, *(flag.replace("DATA", path) for flag in flags))
    assert said.replace("DATA", path) in str(error.value) and "\n" not in str(error.value)


def test_a_row_that_is_no_text_is_named(tmp_path: Path) -> None:
    """The reader of files takes the bytes for text, and fails when the row is read."""
    data = tmp_path / "latin.jsonl"
    data.write_bytes('{"input": "1+1=", "label": "2"}\n{"input": "é", "label": "2"}\n'.encode("latin-1"))
    argv = [*arguments(str(tmp_path)), "--data.prompt_dataset", str(data)]
    with pytest.raises(PreflightError, match=r"latin.jsonl (cannot be read|cannot be loaded)"):
        preflight_data.check_data(upstream.parse(argv))


def test_a_tokenizer_that_is_another_models_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_data, "_vocabulary", lambda args: 20)
    with pytest.raises(PreflightError, match=r"row 1 of .* has the token \d+, but the model has 20"):
        check(tmp_path, [{"input": "zz", "label": "2"}])


def test_a_model_without_a_chat_template_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded.MODEL, model, ignore=shutil.ignore_patterns("*.safetensors", "chat_template*"))
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    with pytest.raises(PreflightError, match="has no chat template"):
        check(tmp_path, [GOOD], "--data.apply_chat_template", "--actor.model_name_or_path", str(model))


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "tokenizer.json").write_text("{no json")
    with pytest.raises(PreflightError, match=r"the tokenizer of .*model cannot be loaded"):
        check(tmp_path, [GOOD], "--actor.model_name_or_path", str(model))


def test_what_is_wrong_with_a_file_is_said_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="cannot be loaded") as error:
        check(tmp_path, [GOOD, [1, 2]])
    assert "An error occurred while generating" not in str(error.value)


def test_a_name_that_no_file_can_have_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="does not exist"):
        check(tmp_path, [GOOD], "--data.prompt_dataset", "x" * 300 + ".jsonl")


def test_modelscope_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(upstream.ArgumentsError, match="--use_ms needs a package that is not installed"):
        check(tmp_path, [GOOD], "--use_ms")


def test_a_label_that_cannot_be_sent_to_a_reward_server_is_named(tmp_path: Path) -> None:
    data = str(tmp_path / "rows.parquet")
    labels = [b"2", b"3", None]
    datasets.Dataset.from_dict({"input": ["1+1="] * 3, "label": labels}).to_parquet(data)
    flags = ["--data.prompt_dataset", data]
    # A function gets it as it is.
    assert check(tmp_path, [], *flags) == 3
    with pytest.raises(PreflightError, match=r"row 1 of .*rows.parquet has b'2' in 'label', which cannot be sent"):
        check(tmp_path, [], *flags, "--reward.remote_url", "http://there:1")


def test_labels_that_json_has_go_to_a_reward_server(tmp_path: Path) -> None:
    rows = [{"input": "1+1=", "label": label} for label in ({"a": ["2"]}, {"a": None}, None)]
    assert check(tmp_path, rows, "--reward.remote_url", "http://there:1") == 3


def test_other_columns_are_not_read(tmp_path: Path) -> None:
    data = str(tmp_path / "rows.parquet")
    rows = datasets.Dataset.from_dict(
        {**{key: [value] * 2 for key, value in GOOD.items()}, "images": [{"bytes": b"no image", "path": None}] * 2},
        features=datasets.Features(
            {"input": datasets.Value("string"), "label": datasets.Value("string"), "images": datasets.Image()}
        ),
    )
    rows.to_parquet(data)
    assert check(tmp_path, [], "--data.prompt_dataset", data) == 2


def test_a_check_of_many_rows_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(preflight_data, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert check(tmp_path, [GOOD] * 3500) == 3500
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["rhyme train: --data.prompt_dataset: checked row 2,000 of 3,500"]
    assert check(tmp_path, [GOOD] * 999) == 999
    assert "checked row" not in capsys.readouterr().err


TEXTS = st.one_of(st.sampled_from(["1+1=", "", " ", "\u00e9\n", "{}", "1" * 300]), st.text(max_size=8))
ROWS = st.one_of(
    st.fixed_dictionaries({"input": TEXTS, "label": TEXTS}),
    st.fixed_dictionaries({"input": st.one_of(TEXTS, st.none(), st.integers(), st.just(CHAT), st.just([]))}),
    st.dictionaries(st.sampled_from(["input", "label", "images"]), st.one_of(TEXTS, st.integers()), max_size=3),
)
NUMBERS = ["-1", "0", "1", "2", "3", "16", "1.5", "nan", "inf", "1e30", "", "x"]
WORDS = ["", "x", " ", "/nowhere/x", "a@b", ",", "{}", "\u00e9", "x" * 300, "gloo", "cosine", "auto"]
TEMPLATES = ["{}", "Q: {}", "{} {0}", "{} {x}", "{} {", "no place"]


def values(action: argparse.Action) -> st.SearchStrategy[tuple[str, ...]]:
    """Return what may follow a flag: of the right kind and not."""
    flag = st.just(action.option_strings[0])
    if action.nargs == 0:
        return st.tuples(flag)
    if action.choices:
        return st.tuples(flag, st.sampled_from([*map(str, action.choices), "nonsense"]))
    one = st.sampled_from(NUMBERS if action.type in (int, float) else WORDS)
    if action.nargs is None:
        return st.tuples(flag, one)
    return st.tuples(flag, one, one) | st.tuples(flag, one)


OPTIONS = st.lists(
    st.one_of(
        st.sampled_from([action for action in upstream.options() if action.option_strings]).flatmap(values),
        st.tuples(st.sampled_from(["--data.prompt_split", "--data.input_key", "--data.label_key"]), TEXTS),
        st.tuples(st.just("--data.input_template"), st.sampled_from(TEMPLATES)),
        st.tuples(st.sampled_from(["--histopipe.enable", "--move.enable", "--reallocation.enable"])),
    ),
    max_size=4,
)


# 500 of them: RHYME_FUZZ=500 pytest -k any_options
@settings(
    max_examples=int(os.environ.get("RHYME_FUZZ", "0")) or examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=st.lists(ROWS, max_size=4), chosen=OPTIONS)
def test_any_options_and_rows_start_or_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], chosen: list[tuple[str, ...]]
) -> None:
    """The checks of `rhyme train` up to the start, without the reward file's process."""
    from rhyme_openrlhf.cli import preflight, train_arguments

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [part for flag in chosen for part in ([f"{flag[0]}={flag[1]}"] if len(flag) == 2 else flag)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_check_import", lambda *_: None)
        # A name without a file is looked up on the hub otherwise.
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        try:
            args, ours = train_arguments.parse([*arguments(str(tmp_path)), f"--data.prompt_dataset={data}", *options])
            train_arguments.checked(args, ours, lambda said: None)
        except SystemExit as error:
            assert error.code == 2
            said = capsys.readouterr().err
            assert said.startswith("rhyme train: error: ") and said.count("\n") <= 2
        except train_arguments.BadInputError as error:
            assert str(error) and "\n" not in str(error) and "Traceback" not in str(error)
