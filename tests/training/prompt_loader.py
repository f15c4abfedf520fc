"""Upstream's own data loader of made-up prompts, as a new process has it."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

import torch
from openrlhf.utils.deepspeed import DeepspeedStrategy


def a_loader(prompts: int, seed: int, texts: int | None = None) -> Any:
    """Gives "prompt 0" and so on in an order of its own; `seed`: as an unseeded process has one, each another.

    `texts`: how many different prompts the rows have; each row has a label of its own.
    """
    torch.manual_seed(seed)
    rows = [("source", f"prompt {number % (texts or prompts)}", f"label {number}", None) for number in range(prompts)]

    def collate(items: list[tuple[Any, ...]]) -> tuple[list[Any], ...]:
        return tuple(list(column) for column in zip(*items, strict=True))

    return DeepspeedStrategy.setup_dataloader(NS(), rows, 1, False, True, collate)
