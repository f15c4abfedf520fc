"""Forward passes begin early, on the micro-batches that upstream would make of the whole step."""

from __future__ import annotations

import queue
from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

from openrlhf.trainer.ppo_utils import experience_maker as upstream

from rhyme_openrlhf.pipeline.batch import PromptGroup
from rhyme_openrlhf.pipeline.controller import StepEnd
from rhyme_openrlhf.pipeline.trainer import StreamedBatches, StreamingExperienceMaker


class Maker(StreamingExperienceMaker):
    """Two policy ranks, micro-batches of two samples; passes are only noted."""

    def __init__(self, dynamic: bool = False, reference_ranks: int = 0) -> None:
        args = NS(
            train=NS(dynamic_batch_enable=dynamic), rollout=NS(micro_batch_size=2), algo=NS(advantage=NS(estimator=""))
        )
        policy = NS(_actor_handlers=[0, 1], duplicate_actors=1)
        reference = NS(_actor_handlers=[0] * reference_ranks, duplicate_actors=1) if reference_ranks else None
        super().__init__(policy, None, None, reference, None, NS(args=args), NS(pad_token_id=0))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The samples of each micro-batch, for every call of upstream's passes."""
    calls: list[list[list[int]]] = []

    def make_experience(self: Any, batches: list[Any]) -> list[Any]:
        calls.append([batch.samples for batch in batches])
        return batches

    def concatenated(samples: list[Any], pad: int) -> Any:
        index = [number for sample in samples for number in sample.index]
        return NS(samples=[sample.name for sample in samples], index=index)

    monkeypatch.setattr(upstream.RemoteExperienceMaker, "make_experience", make_experience)
    monkeypatch.setattr(upstream, "Experience", NS(concat_experiences=concatenated))
    return calls


def test_whole_units_are_computed_as_they_come_and_the_rest_at_the_end(passes: list[list[list[int]]]) -> None:
    maker = Maker()
    samples = [NS(name=number, info={}) for number in range(15)]
    for first in range(0, 15, 3):
        maker.take(samples[first : first + 3], of=15)
    # Two micro-batches at a time, one for each rank; what is left is never fewer than that.
    assert passes == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    rest = maker.split_rollout_samples(samples)
    made = maker.make_experience(rest)
    assert passes[2:] == [[[8, 9], [10, 11], [12, 13], [14]]]
    assert [batch.samples for batch in made] == [[*range(n, min(n + 2, 15))] for n in range(0, 15, 2)]
    assert [number for batch in made for number in batch.index] == list(range(15))
    # The next step begins anew.
    maker.take([NS(name=number, info={}) for number in range(8)], of=8)
    assert passes[3:] == [[[0, 1], [2, 3]]]


def test_a_unit_has_a_micro_batch_for_each_rank_of_the_model_with_most(passes: list[list[list[int]]]) -> None:
    maker = Maker(reference_ranks=4)
    maker.take([NS(name=number, info={}) for number in range(20)], of=20)
    assert passes == [[[0, 1], [2, 3], [4, 5], [6, 7]]]


def test_other_samples_than_those_that_came_are_refused(passes: list[list[list[int]]]) -> None:
    maker = Maker()
    samples = [NS(name=number, info={}) for number in range(4)]
    maker.take(samples, of=4)
    with pytest.raises(ValueError, match="not those that came"):
        maker.split_rollout_samples(samples[::-1])


def test_batches_made_by_length_need_the_whole_step(passes: list[list[list[int]]]) -> None:
    maker = Maker(dynamic=True)
    maker.take([NS(name=number, info={}) for number in range(8)], of=8)
    assert passes == []


def test_the_trainer_sees_whole_steps_and_evaluations_in_the_order_in_which_they_were_sent() -> None:
    sent: queue.Queue[Any] = queue.Queue()
    taken: list[tuple[list[str], int]] = []
    trainer = NS(
        experience_maker=NS(take=lambda samples, of: taken.append((samples, of))),
        args=NS(rollout=NS(n_samples_per_prompt=2), algo=NS(dynamic_filtering_enable=False)),
        services=NS(settings=NS(histopipe=NS(defer=False))),
        _weights=NS(prepare=lambda: None),
    )
    slots: queue.Queue[float] = queue.Queue()
    stream = StreamedBatches(sent, slots, trainer)
    for step in (4, 5):
        for place in (1, 0):
            sent.put(PromptGroup(step, place, 2, [f"{step}{place}a", f"{step}{place}b"], [[step - 1]] * 2, step, 2))
        sent.put(StepEnd(step, 2, {"episode": 0}, 1.5))
        sent.put(("eval", step, {}))
    sent.put("done")
    assert stream.get(block=True) == (["41a", "41b", "40a", "40b"], {"episode": 0}, None, 1.5)
    assert stream.get(block=True) == ("eval", 4, {})
    assert stream.get(block=True)[0] == ["51a", "51b", "50a", "50b"]
    assert [stream.get(block=True), stream.get(block=True)] == [("eval", 5, {}), "done"]
    assert [of for _, of in taken] == [4] * 4
