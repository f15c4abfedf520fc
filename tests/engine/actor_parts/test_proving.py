"""A real engine proves its drafts: what passes is kept, what fails costs the drafts, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.engine.actor_parts import proving
from rhyme_openrlhf.engine.calls import ProofCalls, SchedulerDrafting
from rhyme_openrlhf.engine.messages import Said
from rhyme_openrlhf.proof import kept
from rhyme_openrlhf.proof.histories import KINDS
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.latency import EmulateSettings
from tests.engine.actors import Actor, an_actor, model_with, stored


@pytest.fixture(scope="module")
def actor(starts_engine: None) -> Iterator[Actor]:
    with an_actor() as found:
        yield found


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proving, "gpu_present", lambda: True)
    # Ten runs of each test with as few found no difference.
    monkeypatch.setattr(proving, "SAMPLES", 150)
    # Of a machine that others use.
    monkeypatch.setattr(proving, "LIMIT_S", 300.0)


def started(actor: Actor) -> Said:
    part: Any = actor.raw.parts[ProofCalls]
    actor.call(part.has_started())
    said = part.proof()
    assert isinstance(said, Said)
    return said


def drafted(actor: Actor) -> int:
    """Draft tokens of a sample whose response is known."""
    part: Any = actor.raw.parts[ProofCalls]

    async def again() -> int:
        prompt = tuple(range(10, 40))
        answer = await part._answer(prompt)
        async with part._histories("right", [prompt], [answer]) as (name,):
            before = await actor.raw.totals()
            await part._answer(prompt, name)
            return (await actor.raw.totals() - before).drafted

    found: int = actor.call(again())
    return found


def test_an_engine_proves_its_drafts_once_and_nothing_stays_behind(actor: Actor) -> None:
    said = started(actor)
    assert said == Said(True, "drafts run on model runner V1, synchronous: proved now that they change nothing")
    subject = actor.call(actor.raw.parts[ProofCalls].subject())
    assert (subject.architecture, subject.dtype, subject.ranks) == ("Qwen3ForCausalLM", "float32", 1)
    assert subject.attention == "CPU_ATTN" and subject.versions["torch"] and kept.date(subject)
    again = started(actor)
    assert again.drafts and f"proved here on {kept.date(subject)[:10]} that they change nothing" in again.text
    assert drafted(actor) > 0
    assert actor.call(actor.raw.scheduler(SchedulerDrafting.read_gain)) == {}


def test_the_proof_compares_every_kind_of_draft(actor: Actor) -> None:
    found = actor.call(actor.raw.parts[ProofCalls].prove())
    assert found.problem == "" and found.by_kind.keys() == set(KINDS) and found.p_values.keys() == {"right", "wrong"}
    assert found.drafted > found.accepted > 500
    assert min(one.compared for one in (found.by_batch_size, *found.by_kind.values())) > 500


def test_drafts_that_change_log_probabilities_are_left_out_and_no_proof_is_kept(
    actor: Actor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stands for a fault of verification: the engine has slightly other weights while it drafts."""
    part: Any = actor.raw.parts[ProofCalls]
    install, versions = part._install, iter((1, 2))

    async def with_other_weights(histories: Any) -> None:
        if next(versions, None) == 1:
            await actor.raw.load_weights(stored(model_with(1.02), 1, tmp_path))
        await install(histories)

    monkeypatch.setattr(part, "_install", with_other_weights)
    said = started(actor)
    actor.call(actor.raw.load_weights(stored(model_with(1.0), 2, tmp_path)))
    assert not said.drafts and "without drafts on model runner V1, synchronous, because with drafts of " in said.text
    assert "log-probabilities differ by" in said.text and not kept.date(actor.call(part.subject()))
    assert drafted(actor) == 0
    monkeypatch.undo()
    actor.call(actor.raw.scheduler(SchedulerDrafting.switch_drafts, True))
    assert drafted(actor) > 0


def test_a_proof_that_is_not_done_in_time_is_none(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "LIMIT_S", 0.2)
    said = started(actor)
    assert not said.drafts and "because their proof took longer than 0.2 s" in said.text
    assert drafted(actor) == 0
    actor.call(actor.raw.scheduler(SchedulerDrafting.switch_drafts, True))


def test_a_proof_that_breaks_costs_the_drafts_and_not_the_run(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    part: Any = actor.raw.parts[ProofCalls]

    async def full(histories: Any) -> None:
        raise RuntimeError("draft index of 9 bytes could not be written to /dev/shm: No space left on device")

    monkeypatch.setattr(part, "_install", full)
    said = started(actor)
    assert not said.drafts and "because their proof failed: draft index of 9 bytes could not" in said.text
    assert not kept.date(actor.call(part.subject()))
    actor.call(actor.raw.scheduler(SchedulerDrafting.switch_drafts, True))


def test_a_proof_of_another_driver_is_named(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    part: Any = actor.raw.parts[ProofCalls]
    subject = actor.call(part.subject())
    kept.write(subject, "2026-11-28")
    monkeypatch.setattr(proving.nvidia, "read", lambda: proving.nvidia.Driver(version="590.2"))
    monkeypatch.setattr(proving, "LIMIT_S", 0.2)
    assert "(the proof kept here is of another engine: driver , now 590.2)" in started(actor).text
    actor.call(actor.raw.scheduler(SchedulerDrafting.switch_drafts, True))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (RhymeSettings(), True),
        (RhymeSettings(histospec=HistoSpecSettings(enable=False)), False),
        (RhymeSettings(drafting=DraftingSettings(source="ngram")), False),
        (RhymeSettings(emulate=EmulateSettings(profile="p.json")), False),
    ],
)
def test_engines_that_draft_from_history_on_a_gpu_prove_themselves(
    monkeypatch: pytest.MonkeyPatch, settings: RhymeSettings, wanted: bool
) -> None:
    assert proving.is_wanted(settings) == wanted
    monkeypatch.setattr(proving, "gpu_present", lambda: False)
    assert not proving.is_wanted(settings)
