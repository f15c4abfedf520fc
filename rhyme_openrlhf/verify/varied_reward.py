"""A reward that differs from sample to sample, for any content; a file for OpenRLHF's `--reward.remote_url`.

`rhyme verify` trains with it because equal rewards give no gradient, and a policy that does not move cannot show that
its weights arrive. It is loaded by path, so it imports torch alone.
"""

import itertools
from collections.abc import Sequence

import torch

# Multiples of the golden ratio, modulo 1, are spread evenly and never repeat.
GOLDEN_RATIO = (5**0.5 - 1) / 2
_numbers = itertools.count(1)


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object
) -> dict[str, object]:
    """Rewards from 0 to 1 for n samples; shapes as OpenRLHF asks for them (float32[n])."""
    rewards = torch.tensor([next(_numbers) * GOLDEN_RATIO % 1 for _ in queries], dtype=torch.float32)
    return {"rewards": rewards, "scores": rewards.clone(), "extra_logs": {}}
