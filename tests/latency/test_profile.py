"""A profile, its file, and the names by which it is found."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency import profile as subjects
from rhyme_openrlhf.latency.profile import ProfileError, StepPoint, Subject
from rhyme_openrlhf.settings.drafting import DraftingSettings
from tests.latency import formula


@pytest.fixture
def file(tmp_path: Path) -> Path:
    profiles.write(formula.profile(), tmp_path / "p.json")
    return tmp_path / "p.json"


def test_what_is_written_is_read(file: Path) -> None:
    assert profiles.read(file) == formula.profile()
    assert [path.name for path in file.parent.iterdir()] == ["p.json"]


def test_a_torn_file_names_its_line(file: Path) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:20]))
    with pytest.raises(ProfileError, match=r"p\.json is no JSON: line 20"):
        profiles.read(file)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("[1, 32, 0, -0.5, 0.0001, 20]", "seconds must be finite and not negative, got -0.5"),
        ("[1.5, 32, 0, 0.5, 0.0001, 20]", "running must be a whole number, got 1.5"),
        ('[1, 32, 0, "fast", 0.0001, 20]', "seconds must be a number, got 'fast'"),
        ("[1, 32]", "a point of 'steps' is 6 numbers"),
        ("7", "a point of 'steps' is 6 numbers"),
    ],
)
def test_an_impossible_point_names_its_line(file: Path, bad: str, said: str) -> None:
    lines = file.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"steps"' in line) + 3
    lines[at] = f"    {bad},"
    file.write_text("\n".join(lines))
    with pytest.raises(ProfileError, match=rf"line {at + 1}: ") as raised:
        profiles.read(file)
    assert said in str(raised.value)


def test_another_format_is_refused(file: Path) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(ProfileError, match="format 99; this version reads format 1"):
        profiles.read(file)


@pytest.mark.parametrize("field", ["subject", "padded_rows", "versions"])
def test_a_missing_field_is_named(file: Path, field: str) -> None:
    content = json.loads(file.read_text())
    del content[field]
    file.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=f"lacks '{field}'"):
        profiles.read(file)


@pytest.mark.parametrize("value", [-0.5, True, "fast"])
def test_an_impossible_rate_is_named(file: Path, value: object) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "kv_bytes_per_second": value}))
    with pytest.raises(ProfileError, match="kv_bytes_per_second must be a number that is finite and not negative"):
        profiles.read(file)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        profiles.read(tmp_path / "none.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="is no text"):
        profiles.read(tmp_path / "b.json")


def test_a_profile_of_something_else_is_named_side_by_side() -> None:
    wanted = dataclasses.replace(formula.SUBJECT, hardware="H200", tensor_parallel_size=2)
    with pytest.raises(ProfileError, match="hardware is 'test' there and 'H200' here; tensor_parallel_size is 1 there"):
        formula.profile().check_fits(wanted, "p.json")
    formula.profile().check_fits(formula.SUBJECT, "p.json")


def test_points_that_make_no_model_are_refused() -> None:
    point = StepPoint(1, 32, 0, 0.01, 0.0, 5)
    for steps in (
        (),
        (point, point),
        (dataclasses.replace(point, drafts=2),),
        (dataclasses.replace(point, seconds=0.0),),
    ):
        with pytest.raises(ValueError, match="profile|takes time"):
            formula.profile(steps=steps)


def test_engines_beside_are_kept_and_checked() -> None:
    shared = formula.profile(beside=2)
    assert profiles.parse(profiles.to_text(shared), "it") == shared
    assert profiles.parse(profiles.to_text(shared).replace('  "beside": 2,\n', ""), "it").beside == 0
    with pytest.raises(ProfileError, match="beside must be a whole number of engines, got 1.5"):
        profiles.parse(profiles.to_text(shared).replace('"beside": 2', '"beside": 1.5'), "it")


def test_steps_without_speculation_are_written_and_read(tmp_path: Path) -> None:
    found = formula.profile(unspeculated=formula.unspeculated(0.8))
    profiles.write(found, tmp_path / "p.json")
    assert profiles.read(tmp_path / "p.json") == found
    with pytest.raises(ValueError, match="a decode step without speculation verifies no drafts"):
        formula.profile(unspeculated=(StepPoint(1, 32, 3, 0.01, 0.0, 20),))


def test_a_profile_of_before_has_none(file: Path) -> None:
    """Its file has no such section."""
    content = json.loads(file.read_text())
    assert content.pop("unspeculated") == []
    file.write_text(json.dumps(content))
    assert profiles.read(file) == formula.profile()


CONFIG = SimpleNamespace(
    architectures=["Qwen2ForCausalLM"],
    num_hidden_layers=4,
    hidden_size=128,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=512,
    head_dim=16,
)


def test_what_vllm_drafts_with_is_part_of_the_name() -> None:
    drafting = DraftingSettings(source="draft_model", model="/models/half/", tokens=3)
    assert subjects.model_name(CONFIG, drafting).endswith("vocabulary 512, 3 drafts by draft_model half")
    assert subjects.model_name(CONFIG, DraftingSettings(source="ngram")).endswith(", 4 drafts by ngram")


def test_two_trained_copies_of_a_model_share_a_profile() -> None:
    assert subjects.model_name(CONFIG, DraftingSettings()) == "Qwen2ForCausalLM 4x128 heads 8/2 vocabulary 512"


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_grouped_query_heads_are_counted_once_and_replicated_ones_on_each_rank(ranks: int, heads: int) -> None:
    assert subjects.kv_bytes_per_token(CONFIG, "float32", ranks) == 2 * 4 * heads * 16 * 4


def test_the_file_name_says_what_is_in_it() -> None:
    name = subjects.file_name(Subject("Qwen2 4x128", "AMD EPYC (TM), 2 cores", "float32", 2))
    assert name == "qwen2-4x128-amd-epyc-tm-2-cores-float32-tp2.json"


def test_a_machine_has_a_name() -> None:
    assert "cores" in subjects.hardware_name(())
    assert subjects.hardware_name(("NVIDIA H200", "NVIDIA H200")) == "NVIDIA H200"


def test_what_is_no_profile_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "digits").write_text("9" * 5000)
    for name in ("pipe", "huge", "deep", "digits"):
        with pytest.raises(ProfileError, match=f"the profile {tmp_path / name} "):
            profiles.read(tmp_path / name)
