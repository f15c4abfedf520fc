"""The model runner of a run's drafts, as preflight decides and says it: on a machine with a pretended GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.cli import preflight, preflight_runner, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.latency.profile import to_text
from rhyme_openrlhf.settings.drafting import V1, V2
from rhyme_openrlhf.verify import record
from tests import nvml
from tests.latency import formula

Decide = Callable[..., tuple[str, tuple[str, ...]]]


# V2 has passed everything.
PROVED = record.Entry(
    "Pretended GPU",
    record.installed(),
    {
        record.Engines(V2, "Qwen3ForCausalLM", 1).proof(name): "2026-01-02T03:04:05"
        for name in ("lossless-greedy", "lossless-sampled", "weights-buffer")
    },
)


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Decide:
    """Return the runner of a run with these flags, and what preflight says, where this is on record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight_runner, "gpu_present", lambda: True)
    nvml.install(monkeypatch, tmp_path)

    def decided(*flags: str, entry: record.Entry = PROVED) -> tuple[str, tuple[str, ...]]:
        record.write(record.path(), [entry])
        args = upstream.parse([*arguments(str(tmp_path)), *flags])
        _, said = preflight.check_features(args)
        return args.drafting.runner, said

    return decided


VERIFIED = "--drafting.runner auto is v2, because `rhyme verify` has passed with it for Qwen3ForCausalLM on 2026-01-02"
UNVERIFIED = "auto is v1, because `rhyme verify` has not passed with another"


@pytest.mark.parametrize(
    ("changed", "flags", "runner", "said"),
    [
        ({}, "", V2, f"^{re.escape(VERIFIED)}$"),
        ({}, "--move.enable", V2, f"^{re.escape(VERIFIED)}$"),
        # Other versions or another GPU prove nothing.
        ({"device": "Another GPU"}, "", V1, UNVERIFIED),
        ({"versions": {**PROVED.versions, "torch": "0.0.1"}}, "", V1, UNVERIFIED),
        ({"proofs": {}}, "", V1, UNVERIFIED),
        # Features that keep the first runner.
        ({}, "--tp_switch.enable --vllm.num_engines 2", V1, "layouts take turns there alone"),
        ({}, "--drafting.source ngram", V1, "--drafting.source ngram can be cut there alone"),
        ({}, "--run.reproducible", V1, "a reproducible run"),
        ({}, "--emulate.profile {profile}", V1, "steps on another machine's clock"),
        # Nothing is said where nothing is chosen.
        ({}, "--drafting.runner v1", V1, "^$"),
        ({}, "--no-histospec.enable", V1, "^$"),
    ],
)
def test_the_runner_and_what_is_said_of_it(
    decide: Decide, tmp_path: Path, changed: dict[str, Any], flags: str, runner: str, said: str
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(to_text(formula.profile()))
    found, sentences = decide(*flags.format(profile=profile).split(), entry=dataclasses.replace(PROVED, **changed))
    assert found == runner and re.search(said, " ".join(sentences))


def test_a_cluster_and_a_machine_without_a_gpu_keep_the_first_runner(
    decide: Decide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert decide()[0] == V1
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(preflight_runner, "gpu_present", lambda: False)
    assert decide() == (V1, ())
