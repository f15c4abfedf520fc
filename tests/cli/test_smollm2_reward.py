"""The reward file that `rhyme fetch-model` writes: which number counts, and OpenRLHF's contract."""

import pytest

torch = pytest.importorskip("torch")

from rhyme_openrlhf.cli.smollm2_reward import last_number, reward_func, score  # noqa: E402

PROMPT = "<|im_start|>user\nState the final answer: 4 + 5 =<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", 12),
        ("3 + 4 = -7", -7),
        ("10-3", 3),
        ("1,234<|im_end|>", 1234),
        ("2.50", 2.5),
        ("none", None),
        ("", None),
        ("x-5", -5),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(("response", "reward"), [("9<|im_end|>", 1), ("9.0", 1), ("4 + 5 is 8", 0), ("nine", 0)])
def test_score(response: str, reward: float) -> None:
    assert score(response, "9") == reward


def test_numbers_of_the_prompt_do_not_count() -> None:
    result = reward_func([PROMPT, PROMPT + "9"], [PROMPT, PROMPT], ["5", "9"])
    assert result["rewards"].tolist() == [0.0, 1.0]
    assert result["extra_logs"]["answered"].tolist() == [0.0, 1.0]


def test_contract() -> None:
    result = reward_func([PROMPT + "9"], [PROMPT], ["9"], extra="ignored")
    assert set(result) == {"rewards", "scores", "extra_logs"}
    assert result["rewards"].shape == (1,) and result["rewards"].dtype == torch.float32


def test_lists_of_different_length_are_an_error() -> None:
    with pytest.raises(ValueError):
        reward_func([PROMPT], [PROMPT], [])
