"""The model runner of a run's drafts, as preflight decides and says it: on a machine with a pretended GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rhyme_openrlhf.cli import preflight, preflight_models, preflight_runner, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.latency.profile import to_text
from rhyme_openrlhf.settings.drafting import V1, V2_ASYNC
from tests import nvml
from tests.latency import formula

Decide = Callable[..., tuple[str, tuple[str, ...]]]


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Decide:
    """Return the runner of a run with these flags, and what preflight says."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nvml.install(monkeypatch, tmp_path)

    def decided(*flags: str, on_gpus: bool = True) -> tuple[str, tuple[str, ...]]:
        args = upstream.parse([*arguments(str(tmp_path)), *flags])
        _, said = preflight.check_features(args, on_gpus)
        return args.drafting.runner, said

    return decided


PROVES = "^--drafting.runner auto is v2-async: each engine proves before its first sample"


@pytest.mark.parametrize(
    ("flags", "runner", "said"),
    [
        ("", V2_ASYNC, PROVES),
        ("--move.enable", V2_ASYNC, PROVES),
        ("--vllm.tensor_parallel_size 2", V2_ASYNC, PROVES),
        ("--tp_switch.enable --vllm.num_engines 2", V2_ASYNC, "auto is v2-async"),
        # Features that keep the first runner.
        ("--drafting.source ngram", V1, "--drafting.source ngram can be cut there alone"),
        ("--run.reproducible", V1, "with v2-async, how long drafts may be depends"),
        ("--emulate.profile {profile}", V1, "steps on another machine's clock"),
        # Nothing is said where nothing is chosen.
        ("--drafting.runner v1", V1, "^$"),
        ("--no-histospec.enable", V1, "^$"),
    ],
)
def test_the_runner_and_what_is_said_of_it(
    decide: Decide, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, runner: str, said: str
) -> None:
    monkeypatch.setattr(preflight_models, "gpu_present", lambda: True)
    profile = tmp_path / "profile.json"
    profile.write_text(to_text(formula.profile()))
    found, sentences = decide(*flags.format(profile=profile).split())
    assert found == runner and re.search(said, " ".join(sentences))


def test_the_runs_gpus_count_wherever_they_are(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submitted job knows its cluster by RAY_ADDRESS, and a driver may sit on a node without a GPU."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert decide()[0] == V2_ASYNC
    assert decide(on_gpus=False) == (V1, ())


def test_drafts_beside_a_plug_in_that_changes_logits_are_refused(
    decide: Decide, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = EntryPoint("house_style", "house:Style", preflight_runner.LOGITS_PLUGINS)
    monkeypatch.setattr(preflight_runner, "entry_points", lambda group: [plugin] if group == plugin.group else [])
    with pytest.raises(preflight.PreflightError, match="house_style changes logits.*add --no-histospec.enable"):
        decide()
    assert decide("--no-histospec.enable") == (V1, ())
