"""The model runner of a run's drafts, as preflight decides and says it: on a machine with a pretended GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

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


def test_the_second_runner_where_it_is_verified_with_a_sentence(decide: Decide) -> None:
    runner, (said,) = decide()
    assert runner == V2
    assert said == (
        "--drafting.runner auto is v2, because `rhyme verify` has passed with it for Qwen3ForCausalLM on 2026-01-02"
    )


def test_other_versions_or_another_gpu_prove_nothing(decide: Decide) -> None:
    old = {**PROVED.versions, "torch": "0.0.1"}
    for other in ({"device": "Another GPU"}, {"versions": old}, {"proofs": {}}):
        runner, (said,) = decide(entry=dataclasses.replace(PROVED, **other))
        assert runner == V1 and "auto is v1, because `rhyme verify` has not passed with another" in said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--move.enable",), "moves .* read the state of samples there"),
        (("--drafting.source", "ngram"), "--drafting.source ngram can be cut there alone"),
        (("--run.reproducible",), "a reproducible run"),
    ],
)
def test_features_that_keep_the_first_runner(decide: Decide, flags: tuple[str, ...], reason: str) -> None:
    runner, said = decide(*flags)
    assert runner == V1
    assert re.search(reason, " ".join(said))


def test_another_machine_s_clock_keeps_the_first_runner(decide: Decide, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(to_text(formula.profile()))
    runner, said = decide("--emulate.profile", str(profile))
    assert runner == V1 and "steps on another machine's clock" in " ".join(said)


def test_a_cluster_keeps_the_first_runner(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert decide()[0] == V1


def test_nothing_is_said_where_nothing_is_chosen(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide("--drafting.runner", "v1") == (V1, ())
    assert decide("--no-histospec.enable") == (V1, ())
    monkeypatch.setattr(preflight_runner, "gpu_present", lambda: False)
    assert decide() == (V1, ())
