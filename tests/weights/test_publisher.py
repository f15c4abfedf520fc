"""The policy's ranks write a version into their node's segment: side by side, and what the model has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("openrlhf")

from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM

from rhyme_openrlhf import embedded
from rhyme_openrlhf.weights import publisher as weight_publisher
from rhyme_openrlhf.weights.buckets import Segment, writers, written_by
from rhyme_openrlhf.weights.node import SegmentStore
from rhyme_openrlhf.weights.publisher import WeightPublisher
from rhyme_openrlhf.weights.segment_file import SegmentFile, SegmentFiles, tensors

MEGABYTE = 1024**2
NODE = "node"


def model() -> torch.nn.Module:
    """Eight layers of half a megabyte: two for each bucket."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(362, 362, bias=False) for _ in range(8)))


def read(segment: Segment) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(SegmentFiles().open(segment), segment.version)}


def orders(publisher: WeightPublisher, ranks: int) -> list[set[int]]:
    """Which buckets each rank of a node writes."""
    return list(map(set, written_by(writers(publisher.buckets, [NODE] * ranks, [NODE]), ranks)))


class Zero3:
    """Stands for DeepSpeed's gathering: every rank must take part in each, in the same order."""

    def __init__(self, ranks: int, log: list[str]) -> None:
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.log = log

    @contextmanager
    def gathered(self, parameters: list[torch.nn.Parameter], enabled: bool) -> Iterator[None]:
        assert enabled
        self.barrier.wait()
        self.log.append(f"gather {len(parameters)}")
        yield


def zero3_model() -> torch.nn.Module:
    made = model()
    for parameter in made.parameters():
        parameter.ds_shape = parameter.shape
    return made


def test_ranks_of_a_node_write_one_segment_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(weight_publisher.deepspeed.zero, "GatheredParameters", Zero3(2, log).gathered)
    ranks = [WeightPublisher(zero3_model(), 3, 2, 1) for _ in range(2)]
    assert len(ranks[0].buckets) == 4
    segment = SegmentStore(ranks[0].buckets, tmp_path).begin(7)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(WeightPublisher.publish, ranks, [segment] * 2, orders(ranks[0], 2)))
    found = read(segment)
    assert all(torch.equal(found[name], parameter) for name, parameter in model().named_parameters())
    # A bucket is gathered once by each rank, however many parameters it has.
    assert log == ["gather 2"] * 8


def test_without_zero3_a_rank_touches_its_own_buckets_alone(tmp_path: Path) -> None:
    publisher = WeightPublisher(model(), 2, 2, 1)
    segment = SegmentStore(publisher.buckets, tmp_path).begin(0)
    mine, others = orders(publisher, 2)
    assert mine and others and not mine & others
    publisher.publish(segment, mine)
    file = SegmentFile(segment.path)
    assert {number // 2 for number, there in enumerate(file.versions()) if there == 0} == mine
    publisher.publish(segment, others)
    assert (file.versions() == 0).all()


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_adapters_are_added_to_the_weights_that_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    """Engines get the names of the model without PEFT, and what PEFT itself merges."""
    policy = AutoModelForCausalLM.from_pretrained(embedded.MODEL, dtype=torch.float32)
    names = [name for name, _ in policy.named_parameters()]
    policy = get_peft_model(policy, LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules="all-linear"))
    torch.manual_seed(0)
    for parameter in policy.parameters():
        parameter.ds_shape = parameter.shape
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    monkeypatch.setattr(weight_publisher.deepspeed.zero, "GatheredParameters", gathered := Gathered())
    publisher = WeightPublisher(policy, zero_stage, 1, 1)
    segment = SegmentStore(publisher.buckets, tmp_path).begin(1)
    publisher.publish(segment, range(len(publisher.buckets)))
    found = read(segment)
    assert list(found) == names
    assert {id(parameter) for parameter in policy.parameters()} == gathered.parameters
    merged = dict(policy.merge_and_unload().named_parameters())
    assert all(torch.equal(found[name], merged[name]) for name in names)


class Router(torch.nn.Module):
    """A router whose bias is a buffer that is saved; another buffer is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8))
        self.register_buffer("e_score_correction_bias", torch.randn(4))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("inv_freq", torch.randn(4), persistent=False)


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("adapted", [False, True])
def test_buffers_that_a_checkpoint_has_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int, adapted: bool
) -> None:
    """vLLM has a parameter for a router's bias, and a version without it is refused."""
    torch.manual_seed(0)
    made: torch.nn.Module = torch.nn.ModuleDict({"proj": torch.nn.Linear(4, 4), "gate": Router()})
    plain = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    made = get_peft_model(made, LoraConfig(r=2, target_modules=["proj"])) if adapted else made
    for parameter in made.parameters():
        parameter.ds_shape = parameter.shape
    gathered = Gathered()
    monkeypatch.setattr(weight_publisher.deepspeed.zero, "GatheredParameters", gathered)
    publisher = WeightPublisher(made, zero_stage, 1, 1)
    segment = SegmentStore(publisher.buckets, tmp_path).begin(1)
    publisher.publish(segment, range(len(publisher.buckets)))
    found = read(segment)
    assert found.keys() == plain.keys() and "gate.inv_freq" not in found
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    # DeepSpeed gathers parameters alone.
    assert gathered.parameters == {id(parameter) for parameter in made.parameters()}


class Gathered:
    """Stands for DeepSpeed's gathering: notes what was gathered."""

    def __init__(self) -> None:
        self.parameters: set[int] = set()

    def __call__(self, parameters: list[torch.nn.Parameter], enabled: bool) -> Any:
        self.parameters |= set(map(id, parameters))
        return nullcontext()


class Cuda:
    """Stands for torch.cuda: a copy is done when its event is waited for."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.events = 0

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> None:
        return None

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def Event(self) -> Any:
        number, self.events = self.events, self.events + 1
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"copy {number}"),
            query=lambda: False,
            synchronize=lambda: self.log.append(f"wait {number}"),
        )


def test_on_a_gpu_a_bucket_is_copied_while_the_next_one_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    cuda = Cuda(log)
    monkeypatch.setattr(weight_publisher, "gpu_present", lambda: True)
    for name in ("Stream", "current_stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(weight_publisher.deepspeed.zero, "GatheredParameters", Zero3(1, log).gathered)
    publisher = WeightPublisher(zero3_model(), 3, 1, 1)
    segment = SegmentStore(publisher.buckets, tmp_path).begin(1)
    marked: list[int] = []
    monkeypatch.setattr(SegmentFile, "mark", lambda self, first, end, version: marked.append(len(log)))
    publisher.publish(segment, range(4))
    assert log == [
        "gather 2", "copy 0", "gather 2", "copy 1", "wait 0", "gather 2", "copy 2", "wait 1", "gather 2", "copy 3",
        "wait 2", "wait 3",
    ]  # fmt: skip
    # A bucket is marked right after its copies were waited for.
    assert [log[at - 1] for at in marked] == ["wait 0", "wait 1", "wait 2", "wait 3"]
