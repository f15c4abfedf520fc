"""Reward for the prompts that `rhyme fetch-model smollm2` writes; a file for OpenRLHF's `--reward.remote_url`.

A response earns 1.0 when the last number in it is the label, else 0.0. The same rule holds for a response that was cut
off: the length limit of these tasks is generous, so the last number of such a response is rarely right.

`rhyme fetch-model` copies this file beside the prompts. It is loaded by path, so it imports torch alone.
"""

import re
from collections.abc import Sequence

import torch

# Where the chat template lets the model's answer begin.
ANSWER_START = "<|im_start|>assistant\n"

# "1,234" is one number; a minus sign after a digit is a subtraction ("7-3" ends in 3).
NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number in `text`, None where there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def score(response: str, label: str) -> float:
    """Return the reward of one response: 1.0 or 0.0. Raises ValueError if the label is no number."""
    return 1.0 if last_number(response) == float(label) else 0.0


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object
) -> dict[str, object]:
    """Rewards of n samples.

    queries: prompt and response, decoded with special tokens; prompts: the prompts alone; labels: right answers.
    Returns `rewards` and `scores`, float32 tensors of shape [n], and as `extra_logs` how many answered at all.

    Raises ValueError if the three differ in length.
    """
    answers = [query.rpartition(ANSWER_START)[2] for query in queries]
    rewards = torch.tensor(
        [score(answer, str(label)) for answer, _prompt, label in zip(answers, prompts, labels, strict=True)],
        dtype=torch.float32,
    )
    answered = torch.tensor([last_number(answer) is not None for answer in answers], dtype=torch.float32)
    return {"rewards": rewards, "scores": rewards.clone(), "extra_logs": {"answered": answered}}
