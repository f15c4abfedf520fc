"""The rule-based reward: right, wrong, not closed, empty, malicious; loaded by file path as OpenRLHF does."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from embedded_tasks import KINDS, draw_problem

import rhyme_openrlhf.embedded


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    path = Path(rhyme_openrlhf.embedded.__file__).with_name("reward.py")
    spec = importlib.util.spec_from_file_location("reward_func", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("b3+7=10,c10+4=14;14<eos>", 1.0),
        (";14<eos>", 1.0),
        ("b3+7=10,c10+4=15;15<eos>", 0.0),
        ("b3+7=10,c10+4=14;14", 0.0),  # not closed
        ("b3+7=10,c10+4=14", 0.0),
        ("14<eos>", 0.0),  # no separator
        ("", 0.0),
        ("<eos>", 0.0),
        (";<eos>", 0.0),
        (";13;14<eos>", 1.0),  # only the last answer counts
        (";14;13<eos>", 0.0),
        (";13,14<eos>", 0.0),  # hedging
        (";14 <eos>", 0.0),
        (";014<eos>", 0.0),
        (";14<eos>;14<eos>", 0.0),  # goes on after its end
        (";14<pad><eos>", 0.0),
    ],
)
def test_single_responses(reward: ModuleType, response: str, expected: float) -> None:
    prompt = "a3b7c4="
    result = reward.reward_func([prompt + response], [prompt], ["14"])
    assert result["rewards"].tolist() == result["scores"].tolist() == [expected]


def test_worked_solutions_without_errors_earn_one(reward: ModuleType) -> None:
    rng = random.Random(4)
    problems = [draw_problem(kind, rng) for kind in KINDS for _ in range(50)]
    result = reward.reward_func(
        [problem.prompt + problem.solution + "<eos>" for problem in problems],
        [problem.prompt for problem in problems],
        [problem.answer for problem in problems],
    )
    assert result["rewards"].min() == 1.0


def test_shapes_and_keys(reward: ModuleType) -> None:
    result = reward.reward_func(["a=;1<eos>", "b=;2<eos>"], ["a=", "b="], ["1", 3], anything="else")
    assert set(result) == {"rewards", "scores", "extra_logs"}
    assert result["rewards"].dtype == torch.float32
    assert result["rewards"].tolist() == [1.0, 0.0]
    assert result["scores"] is not result["rewards"]
    assert result["extra_logs"] == {}


def test_an_answer_in_the_prompt_is_not_the_response(reward: ModuleType) -> None:
    assert reward.reward_func(["a=;14<eos>"], ["a=;14<eos>"], ["14"])["rewards"].tolist() == [0.0]


def test_unequal_lengths_are_refused(reward: ModuleType) -> None:
    with pytest.raises(ValueError, match="shorter|longer"):
        reward.reward_func(["a=;1<eos>"], ["a="], ["1", "2"])
