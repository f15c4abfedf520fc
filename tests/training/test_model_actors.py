"""The policy actor around a weight sync, run on upstream's own `Actor` with stand-ins for what only a GPU has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("openrlhf")

from rhyme_openrlhf.training import model_actors as policy  # first: installs the shims where needed

from openrlhf.models import ring_attn_utils  # isort: skip
from openrlhf.models.actor import Actor  # isort: skip

TOKENS = [5, 3, 7, 1, 6, 2, 4]
VOCABULARY = 8


class TinyModel(torch.nn.Module):
    """A language model whose next token depends on the token before alone. `ready` is asked at each call."""

    def __init__(self, ready: Any = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        self.ready = ready

    @property
    def module(self) -> TinyModel:
        """The model inside DeepSpeed's engine, which this model stands for, too."""
        return self

    def forward(self, sequences: torch.Tensor, **_: Any) -> Any:
        self.ready()

        class Output(dict[str, torch.Tensor]):
            logits = property(lambda self: self["logits"])

        return Output(logits=self.logits(sequences))


def policy_of(model: TinyModel, group: Any = None, packing: bool = False) -> Any:
    """What `score` reads of a policy rank: upstream's actor with a DeepSpeed engine in it, and the strategy."""
    actor = Actor(model, temperature=0.5)
    actor.packing_samples = packing
    return SimpleNamespace(actor=actor, strategy=SimpleNamespace(ring_attn_group=group))


def expected() -> list[float]:
    table = torch.log_softmax(TinyModel().logits.weight.detach(), dim=-1)
    return [table[before, token].item() for before, token in zip(TOKENS[:-1], TOKENS[1:], strict=True)]


def test_a_score_is_at_temperature_one_and_leaves_the_actor_as_it_was() -> None:
    rank = policy_of(TinyModel())
    assert policy.RhymePolicyModelActor.score(rank, TOKENS) == pytest.approx(expected())
    assert rank.actor.temperature == 0.5 and rank.actor.training


class Ring:
    """A group of two ranks, each a thread, with what upstream's ring attention asks of torch.distributed."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.barrier = threading.Barrier(2, timeout=20)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * 2

    def all_gather(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        self.parts[self.here.rank] = tensor
        self.barrier.wait()
        return torch.cat(self.parts)


def test_with_ring_attention_a_score_goes_through_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """ring_flash_attn computes with parameters that upstream's actor sets before each forward pass."""
    ring = Ring()
    distributed = SimpleNamespace(get_rank=lambda group: ring.here.rank, get_world_size=lambda group: 2)
    monkeypatch.setattr(ring_attn_utils, "dist", distributed)
    monkeypatch.setattr(ring_attn_utils, "all_gather", ring.all_gather)
    monkeypatch.setattr(
        ring_attn_utils, "update_ring_attn_params", lambda lengths: setattr(ring.here, "lengths", lengths.tolist())
    )

    def ready() -> None:
        assert getattr(ring.here, "lengths", None) == [0, len(TOKENS) + 1], "ring attention has no parameters"

    ranks = [policy_of(TinyModel(ready), ring, packing=True) for _ in range(2)]

    def score(rank: int) -> list[float]:
        ring.here.rank = rank
        return policy.RhymePolicyModelActor.score(ranks[rank], TOKENS)

    with ThreadPoolExecutor(2) as pool:
        for scores in pool.map(score, range(2)):
            assert scores == pytest.approx(expected())


def test_cached_gpu_memory_is_given_back_around_a_sync_and_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on the same device wakes between the two, and needs the memory (upstream: ppo_actor.py)."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty_cache"))
    rank = policy_of(TinyModel(lambda: done.append("forward")))
    rank._publisher = SimpleNamespace(publish=lambda *_: done.append("publish"))
    rank._mine = frozenset()
    policy.RhymePolicyModelActor.publish_weights(rank, None)
    assert done == ["empty_cache", "publish", "empty_cache"]
    done.clear()
    policy.RhymePolicyModelActor.score(rank, TOKENS)
    assert done == ["empty_cache", "forward", "empty_cache"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_found_by_name(value: float) -> None:
    model = TinyModel()
    assert policy.not_finite(model) == ""
    with torch.no_grad():
        model.logits.weight[-1, -1] = value
    assert policy.not_finite(model) == "logits.weight"


def test_one_changed_weight_changes_the_sums() -> None:
    model = TinyModel()
    before = policy.sums(model)
    assert policy.sums(model) == before
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    assert policy.sums(model) != before
