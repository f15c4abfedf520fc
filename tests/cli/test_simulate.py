"""`rhyme simulate`: its tables and page, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhyme_openrlhf.cli import simulate as command
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.settings.options import BAD_INPUT
from tests.latency import formula

SMALL = [
    "--profile",
    "pat-a40",
    "--tp",
    "2",
    "--steps",
    "3",
    "--prompts",
    "4",
    "--samples",
    "4",
    "--steps-per-epoch",
    "1",
]


def test_an_ablation_prints_a_table_and_writes_page_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    page, out = tmp_path / "p.html", tmp_path / "p.json"
    argv = [*SMALL, "--features", "sync,tp-switch", "--ablate", "--html", str(page), "--json", str(out)]
    assert command.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("simulated: pat-deepscaler") and "seed 1" in printed and "(derived)" in printed
    assert "weight loads are not profiled" in printed and "+ tp-switch" in printed
    # In a pipe, too, no cell is cut.
    assert "samples/s" in printed and "\u2026" not in printed
    text = page.read_text()
    assert "Simulated, not measured" in text and "seed 1" in text and "<script src" not in text
    content = json.loads(out.read_text())
    assert content["kind"] == "simulated" and [run["name"] for run in content["runs"]] == [
        "async",
        "+ sync",
        "+ tp-switch",
    ]
    assert content["runs"][2]["samples_per_second"] >= content["runs"][1]["samples_per_second"]
    # No profile of the user's own is there to be named.
    advice = content["recommendation"]
    assert advice["run"] == "+ tp-switch" and "PROFILE_OF_TP_8" in advice["flags"]
    words = f"settings to use (simulated, + tp-switch): rhyme train ... {' '.join(advice['flags'])}"
    assert words in printed and words in text
    assert "TP switches have never been run on a GPU" in printed


@pytest.mark.usefixtures("starts_python")
def test_a_sweep_is_the_same_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        argv = [*SMALL, "--features", "pipeline,two-tier", "--sweep", "rank-groups=1,2", "--jobs", jobs]
        assert command.main([*argv, "--json", str(out)]) == 0
        found.append(out.read_text())
    assert found[0] == found[1] and "rank-groups = 2" in found[0]


def test_a_sweep_of_what_nothing_uses_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SMALL, "--features", "pipeline", "--sweep", "alpha=0.1,0.2"]) == 0
    assert "alpha changes nothing here" in capsys.readouterr().out
    assert command.main([*SMALL, "--features", "pipeline", "--sweep", "nodes=1,2"]) == 0
    assert "changes nothing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--features", "warp"], "no feature 'warp'"),
        (["--features", "async,two-tier"], "of the streaming pipeline"),
        (["--sweep", "colour=1,2"], "no setting 'colour' to sweep"),
        (["--sweep", "alpha"], "--sweep takes SETTING=A,B"),
        (["--sweep", "alpha=x"], "'x' is no value of alpha"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--tp", "4"], "no profile of --tp 4"),
        (["--advise"], "--advise needs a recorded run: --from-run DIRECTORY"),
        (["--acceptance", "1"], "--acceptance takes"),
        (["--trace", "nowhere.jsonl"], "cannot be read"),
        (["--profile", "nowhere.json"], "cannot be read"),
        (["--profile", "pat-a40"], "second profile of tensor-parallel size 2"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = command.main([*SMALL, *argv])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    assert code == BAD_INPUT
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_profiles_of_different_hardware_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles.write(formula.profile(), tmp_path / "p.json")
    assert command.main([*SMALL, "--profile", str(tmp_path / "p.json")]) == BAD_INPUT
    assert "must be of one model and hardware" in capsys.readouterr().err


def test_a_kv_cache_that_is_too_small_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles.write(formula.profile(kv_cache_tokens=500), tmp_path / "p.json")
    assert command.main(["--profile", str(tmp_path / "p.json"), "--steps", "1"]) == BAD_INPUT
    assert "KV cache of 500 tokens" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    printed = capsys.readouterr().out
    assert "rhyme simulate --profile pat-a40" in printed and "nothing runs on a device" in printed.lower()
