"""The pool of engines: what the engines of a check are made with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf")

from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.engine import EngineSettings
from rhyme_openrlhf.verify import engines
from rhyme_openrlhf.verify.engines import EngineFacts, EnginePool

ARGS = SimpleNamespace(
    vllm=SimpleNamespace(
        tensor_parallel_size=1, enable_prefix_caching=False, enforce_eager=True, gpu_memory_utilization=0.9
    ),
    actor=SimpleNamespace(model_name_or_path="model"),
    train=SimpleNamespace(seed=1, full_determinism_enable=False),
    data=SimpleNamespace(max_len=64),
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every engine actor, as Ray would get them."""
    found: list[dict[str, Any]] = []

    def create(*arguments: Any) -> list[Any]:
        # As upstream does with its class, which stands at that name.
        return [engines.upstream.RolloutRayActor.options(num_gpus=1).remote(dtype="bfloat16", model=arguments[2])]

    facts = vars(EngineFacts("float32", async_scheduling=False, speculates=False, model_runner="V1"))
    monkeypatch.setattr(engines.upstream, "create_vllm_engines", create)
    monkeypatch.setattr(engines.upstream, "RolloutRayActor", None)
    monkeypatch.setattr(engines, "wait", lambda ref, timeout_s, what: facts if "describe" in what else None)
    monkeypatch.setattr(engines.ray, "cluster_resources", lambda: {"GPU": 2.0})
    monkeypatch.setattr(EnginePool, "start_ray", lambda self, engines=2: None)
    monkeypatch.setattr(EnginePool, "_place", lambda self: None)
    return found


def actor(found: list[dict[str, Any]]) -> Any:
    """Stands for a Ray actor class, and for the actors of it."""

    class Actor:
        ready = facts = SimpleNamespace(remote=lambda: None)

        @classmethod
        def options(cls, **options: Any) -> type[Actor]:
            return cls

        @classmethod
        def remote(cls, **arguments: Any) -> Any:
            found.append(arguments)
            return cls()

    return Actor


def test_one_engine_drafts_in_every_step_and_the_other_never(made: list[dict[str, Any]]) -> None:
    settings = RhymeSettings(histospec=HistoSpecSettings(siblings=True))
    assert settings.drafting.probe_share > 0
    EnginePool(ARGS, settings, False, actor(made)).pair("float32")
    plain, speculating = (arguments["rhyme"] for arguments in made)
    assert speculating.histospec.enable and not plain.histospec.enable
    # Steps without drafts, and drafts from a prompt's other samples, would be none of what a check installed.
    histospec = speculating.histospec
    assert speculating.drafting.probe_share == 0 and not histospec.siblings and not histospec.shared_tokens
    assert {arguments["dtype"] for arguments in made} == {"float32"}


def test_a_benchmark_gives_its_engines_more_room(made: list[dict[str, Any]]) -> None:
    settings = RhymeSettings(engine=EngineSettings(max_num_seqs=512))
    EnginePool(ARGS, settings, False, actor(made)).pair("bfloat16")
    found = [(arguments["rhyme"].engine.arguments()["max_num_seqs"], arguments["dtype"]) for arguments in made]
    assert found == [(512, "bfloat16")] * 2
