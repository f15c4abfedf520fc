"""The typed view of every option, and that the file of upstream's is what its parser has."""

from __future__ import annotations

import json

import pytest

from rhyme_openrlhf.api.launch.schema import UPSTREAM_FILE, TypedOption, by_flag, options, upstream_version
from rhyme_openrlhf.settings.config import RhymeSettings


def option(flag: str) -> TypedOption:
    return by_flag()[flag]


def test_the_file_is_what_the_installed_parser_has() -> None:
    pytest.importorskip("openrlhf")
    import importlib.util
    from pathlib import Path

    script = Path(__file__).parents[3] / "scripts" / "write_upstream_schema.py"
    spec = importlib.util.spec_from_file_location("write_upstream_schema", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(UPSTREAM_FILE.read_text()) == module.build(), "run scripts/write_upstream_schema.py"
    assert upstream_version() == "0.11.2"


def test_both_sides_are_there_and_each_flag_means_one_option() -> None:
    sources = [one.source for one in options().values()]
    assert sources.count("openrlhf") > 150
    ours = {(group, name) for group, fields in RhymeSettings().to_dict().items() for name in fields}
    assert {key for key, one in options().items() if one.source == "rhyme"} == ours
    flags = [flag for one in options().values() for flag in (one.flag, one.off_flag) if flag]
    assert len(flags) == len(set(flags))
    for (group, name), one in options().items():
        assert group == "openrlhf" or one.flag == f"--{group}.{name}"


def test_defaults_keep_their_own_rules() -> None:
    """An option whose default its own rule refuses would be refused when a form sends it back."""
    odd = {"--ckpt.max_mem", "--ds.lora.target_modules", "--ds.attn_implementation"}
    for one in options().values():
        if one.default is not None and not one.refused and one.flag not in odd:
            assert one.check(one.default) is None, one.flag


@pytest.mark.parametrize(
    ("flag", "value", "wrong"),
    [
        ("--train.seed", 7, None),
        ("--train.seed", 7.5, "must be a whole number"),
        ("--train.seed", True, "must be a whole number"),
        ("--train.seed", 2**60, "must be a whole number"),
        ("--actor.adam.lr", 1, None),
        ("--actor.adam.lr", "1e-6", "must be a number"),
        ("--actor.adam.lr", float("nan"), "must be a number"),
        ("--actor.adam.lr", 10**400, "must be a number"),
        ("--actor.adam.betas", [0.9, 0.95], None),
        ("--actor.adam.betas", [0.9], "must be a list of 2 values, each a number"),
        ("--vllm.enforce_eager", 1, "must be true or false"),
        ("--algo.kl.estimator", "k4", "must be one of k1, k2, k3"),
        ("--ds.attn_implementation", "kernels-community/vllm-flash-attn3", "must be one of eager, sdpa"),
        ("--ds.lora.target_modules", ["q_proj", "--x"], "must not begin with '-'"),
        ("--data.input_key", "a\0b", "must be at most"),
        ("--data.input_key", "\ud800", "must be at most"),
        ("--histospec.window_max", 129, "must be a whole number from 1 to 128"),
        ("--vllm.num_engines", 0, "must be a whole number at least 1"),
    ],
)
def test_values_are_checked_and_the_allowed_range_is_named(flag: str, value: object, wrong: str | None) -> None:
    said = option(flag).check(value)
    assert said is None if wrong is None else said is not None and said.startswith(wrong)


def test_what_the_service_sets_and_secrets_cannot_be_given() -> None:
    for flag in ("--run.dir", "--run.name", "--logger.wandb.key", "--local_rank", "--use_ms"):
        assert option(flag).refused, flag
    assert all(one.refused for (group, _), one in options().items() if group == "control")


def test_the_answer_of_the_api_is_strict_json() -> None:
    for one in options().values():
        assert json.loads(json.dumps(one.model_dump(mode="json"), allow_nan=False))["flag"] == one.flag
