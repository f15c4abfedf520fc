"""Rule-based reward of the embedded tasks, a file for OpenRLHF's `--reward.remote_url`.

A response earns 1.0 when it is closed by the end token and the text after its last ";" equals the label, else 0.0.
There is no partial credit: a group of eight samples of the embedded model holds right and wrong ones often enough.

Loaded by file path, so it imports torch alone and nothing of its own package. "<eos>" cannot be written character by
character, because the embedded tokenizer has no angle brackets: where it appears, the model ended its response.
"""

from collections.abc import Sequence

import torch

END = "<eos>"


def score(response: str, label: str) -> float:
    """Return the reward of one response, decoded with its special tokens: 1.0 or 0.0."""
    text, closed, after_end = response.partition(END)
    if not closed or after_end:
        return 0.0
    _, separator, answer = text.rpartition(";")
    return 1.0 if separator and answer == label else 0.0


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object
) -> dict[str, object]:
    """Rewards of n samples.

    queries: prompt and response, decoded with special tokens; prompts: the prompts alone; labels: right final
    answers. Returns `rewards` and `scores`, float32 tensors of shape [n], and empty `extra_logs`.

    Raises ValueError if the three differ in length.
    """
    rewards = torch.tensor(
        [
            score(query.removeprefix(prompt), str(label))
            for query, prompt, label in zip(queries, prompts, labels, strict=True)
        ],
        dtype=torch.float32,
    )
    return {"rewards": rewards, "scores": rewards.clone(), "extra_logs": {}}
