"""`rhyme profile show`, and bad input to `rhyme profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf import platform
from rhyme_openrlhf.cli import demo
from rhyme_openrlhf.cli import profile as command
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.settings.options import BAD_INPUT
from tests import nvml
from tests.latency import formula


def test_show_prints_points_and_quality_and_draws_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles.write(formula.profile(), tmp_path / "p.json")
    assert command.main(["show", str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html")]) == 0
    printed = capsys.readouterr().out
    assert "Qwen2ForCausalLM 4x128" in printed and "held out" in printed
    page = (tmp_path / "p.html").read_text()
    assert "Steps that verify drafts" in page and "Prefill" in page
    # Self-contained: the script is in the page.
    assert "<script src" not in page


def test_show_of_a_broken_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.json").write_text("{")
    assert command.main(["show", str(tmp_path / "p.json")]) == BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize(
    ("argv", "gpus", "words"),
    [
        ([], {"gpus": 1, "driver": "550.54.15"}, "too old for torch's CUDA 13.0: install driver 580"),
        (["--vllm.tensor_parallel_size", "2"], {"gpus": 1}, "(--vllm.tensor_parallel_size 2), but there are 1"),
        (["--beside", "2", "--out", "p.json"], {"gpus": 2}, "engines need 3 x 1 GPUs"),
        ([], {"gpus": 1, "memory": 2**20}, "a GPU of the engine needs at least"),
    ],
    ids=["driver", "gpus", "beside", "memory"],
)
def test_gpus_that_do_not_do_are_one_sentence_before_an_engine_starts(
    argv: list[str], gpus: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    torch = pytest.importorskip("torch")
    nvml.install(monkeypatch, tmp_path, **gpus)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if "driver" not in gpus:
        # Preflight's other checks stay those of a machine whose torch sees no GPU.
        monkeypatch.setattr(platform, "run_has_gpus", lambda: True)
    monkeypatch.setattr(command, "_measure", lambda *_: pytest.fail("an engine was started"))
    assert command.main([*argv, *demo.arguments("unused")]) == BAD_INPUT
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--beside", "1"], "say where it goes (--out)"),
        (["--beside", "-1", "--out", "p.json"], "--beside must be from 0"),
        (["--no-histospec.enable"], "no verifying steps"),
        (["--actor.model_name_or_path", "/no/such/model"], "--actor.model_name_or_path"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*demo.arguments("unused"), *argv]) == BAD_INPUT
    assert words in capsys.readouterr().err.splitlines()[-1]
