"""The generator's state travels with each batch to the trainer, and from a checkpoint back to the generator."""

from __future__ import annotations

import queue
from types import SimpleNamespace as NS

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.training import trainer_async
from rhyme_openrlhf.training.samples_generator import GeneratorState
from rhyme_openrlhf.training.trainer_async import (
    GENERATOR,
    LOADER,
    QueuedBatches,
    RhymeGenerateSamplesActor,
    StateQueue,
)


def test_a_batch_carries_the_state_of_its_own_moment() -> None:
    steps = iter((1, 2))
    batches: queue.Queue = queue.Queue()
    to_trainer = StateQueue(batches, NS(state=lambda: GeneratorState(next(steps))))
    for number in (1, 2):
        to_trainer.put((["samples"], {"episode": number}, None, 0.5), block=True)
    to_trainer.put(("eval", 2, {}), block=True)
    to_trainer.put("done", block=True)
    source = QueuedBatches(batches, None, None)  # type: ignore[arg-type]
    for number in (1, 2):
        _, client_states, _, _ = batches.get()
        # OpenRLHF's own states go on without it: plain OpenRLHF can load them.
        assert source.state_after(client_states).step == number
        assert client_states == {"episode": number}
    assert (batches.get(), batches.get()) == (("eval", 2, {}), "done")


def test_a_resume_brings_both_states_to_the_generator() -> None:
    actor = RhymeGenerateSamplesActor.__new__(RhymeGenerateSamplesActor)
    loaded: list[object] = []
    actor.prompts_dataloader = NS(load_state_dict=loaded.append)
    actor.samples_generator = NS(restore=loaded.append)
    actor.load_state_dict({LOADER: {"yielded": 3}, GENERATOR: GeneratorState(7)})
    assert loaded == [{"yielded": 3}, GeneratorState(7)]


@pytest.mark.parametrize("reproducible", [False, True])
def test_only_a_reproducible_runs_generator_is_seeded_and_before_upstream_draws(
    reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    plain = trainer_async.PlainGenerateSamplesActor
    monkeypatch.setattr(plain, "__init__", lambda self, *_, **__: done.append("upstream"))
    monkeypatch.setattr(plain, "samples_generator", None, raising=False)
    monkeypatch.setattr(trainer_async, "seed_controller", done.append)
    monkeypatch.setattr(trainer_async, "with_record", lambda made, services, cls: cls)
    services = NS(settings=NS(run=NS(reproducible=reproducible)))
    parts = NS(samples_generator="ours", generation=lambda actor: actor.samples_generator)
    actor = RhymeGenerateSamplesActor("model", NS(services=services, seed=7), parts=parts)
    assert done == [7] * reproducible + ["upstream"] and actor._generation == "ours"
