"""Command lines and specs say the same: round trips through our reader and through OpenRLHF's own parser."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.api.launch.schema import TypedOption, options
from rhyme_openrlhf.api.launch.spec import Arguments, SpecError, check, gpus_needed
from rhyme_openrlhf.api.launch.spec_command import from_argv, from_command, to_argv, to_command
from tests import nvml
from tests.examples import examples

FREE = [one for one in options().values() if not one.refused]


def values(one: TypedOption) -> st.SearchStrategy[Any]:
    def bounded(value: Any) -> bool:
        return one.check(value) is None

    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    number = st.floats(allow_nan=False, allow_infinity=False)
    single: dict[str, st.SearchStrategy[Any]] = {
        # A switch of upstream's that cannot be switched off is only ever on in a checked spec.
        "bool": st.booleans() if one.off_flag else st.just(True),
        "int": st.integers(int(one.low or -(2**53)), int(one.high or 2**53)),
        "float": number if one.low is None else st.floats(one.low, one.high or 1e9),
        "str": st.sampled_from(one.choices) if one.choices else text,
    }
    if one.items is None:
        return single[one.type].filter(bounded)
    least, most = one.items
    return st.lists(single[one.type], min_size=least, max_size=most or 4).filter(bounded)


@st.composite
def some_arguments(draw: st.DrawFn) -> Arguments:
    arguments: Arguments = {}
    for one in draw(st.lists(st.sampled_from(FREE), unique_by=lambda one: one.flag, max_size=8)):
        arguments.setdefault(one.group, {})[one.name] = draw(values(one))
    return arguments


@given(some_arguments())
@settings(max_examples=examples(300), deadline=None)
def test_a_spec_survives_the_way_to_a_command_line_and_back(arguments: Arguments) -> None:
    assert from_argv(to_argv(arguments)) == (None, arguments)
    assert from_command(to_command("a-name", arguments)) == ("a-name", arguments)


@given(some_arguments())
@settings(max_examples=examples(100), deadline=None)
def test_upstreams_own_parser_reads_the_same(arguments: Arguments) -> None:
    pytest.importorskip("openrlhf")
    from rhyme_openrlhf.cli import upstream
    from rhyme_openrlhf.settings.config import SETTINGS_CLASSES
    from rhyme_openrlhf.settings.options import add_options

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for action in upstream.options():
        parser._add_action(action)
    add_options(parser, SETTINGS_CLASSES)
    parsed = vars(parser.parse_args(to_argv(arguments)))
    for group, fields in arguments.items():
        for name, value in fields.items():
            assert parsed[f"{group}.{name}"] == value


@pytest.mark.parametrize(
    "command",
    [
        "rhyme train --train.seed 7 --actor.adam.lr=1e-5",
        "python -m rhyme_openrlhf.cli.train_ppo_ray --train.seed 7 \\\n   --actor.adam.lr 1e-5",
        "/venv/bin/python3.11 -m openrlhf.cli.train_ppo_ray --train.seed=7 --actor.adam.lr 1e-5",
        'ray job submit --address=http://127.0.0.1:8265 --runtime-env-json=\'{"working_dir": "/x"}\' '
        "-- python3 -m openrlhf.cli.train_ppo_ray --train.seed 7 --actor.adam.lr 1e-5",
    ],
)
def test_pasted_commands(command: str) -> None:
    assert from_command(command) == (None, {"train": {"seed": 7}, "actor": {"adam.lr": 1e-5}})


@pytest.mark.parametrize(
    ("gpus", "engines", "colocated", "needed"), [(0, 2, None, 3), (1, 1, True, 1), (2, 1, None, 2), (8, 2, None, 3)]
)
def test_the_demo_is_placed_on_the_gpus_of_the_machine(
    gpus: int, engines: int, colocated: bool | None, needed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=gpus)
    _, arguments = from_command("rhyme demo")
    assert (arguments["vllm"]["num_engines"], arguments["train"].get("colocate_all")) == (engines, colocated)
    assert gpus_needed(check(arguments, [tmp_path])) == needed


def test_the_demo_is_a_spec_without_a_place_for_checkpoints() -> None:
    name, arguments = from_command("rhyme demo --train.num_episodes 2 --no-histospec.enable")
    assert name == "demo" and arguments["train"]["num_episodes"] == 2
    assert arguments["histospec"] == {"enable": False} and "ckpt" not in arguments


@pytest.mark.parametrize(
    ("command", "field", "message"),
    [
        ("", "command", "must begin with 'rhyme train"),
        ("bash -c 'rhyme train'", "command", "must begin with 'rhyme train"),
        ("CUDA_VISIBLE_DEVICES=0 rhyme train", "command", "must begin with 'rhyme train"),
        ("python -m os --train.seed 7", "command", "must begin with 'rhyme train"),
        ("rhyme train 'unclosed", "command", "cannot be parsed as a shell command"),
        ("rhyme train --no_such 3", "command", "there is no option '--no_such'"),
        ("rhyme train; rm -rf /", "command", "must begin with 'rhyme train"),
        ("rhyme train --train.seed $(id)", "arguments.train.seed", "must be a whole number"),
        ("rhyme train --train.see 3", "command", "there is no option '--train.see'"),
        ("rhyme train --train.sed=3", "command", "'--train.sed=3' (did you mean --train.seed?)"),
        ("rhyme train --histospec.widow_max 3", "command", "(did you mean --histospec.window_max?)"),
        ("rhyme train --actor.adam.betas 1", "command", "expected 2 arguments"),
        ("rhyme train --run.name 'a b'", "name", "must be a short name"),
        ("rhyme train --train.seed", "command", "expected one argument"),
        ("rhyme train " + "x" * 100_000, "command", "must have at most"),
    ],
)
def test_what_is_no_such_command_is_refused_with_its_field(command: str, field: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_command(command)
    assert any(fault.field == field and message in fault.message for fault in refused.value.faults)


def test_a_shell_reads_the_command_as_we_do() -> None:
    arguments: Arguments = {"data": {"input_template": 'it\'s $HOME; `id` "{}"\n-- x'}}
    words = shlex.split(to_command("n", arguments))
    assert from_argv(words[2:]) == ("n", arguments)
