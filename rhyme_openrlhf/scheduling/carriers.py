"""How samples are carried to another engine: their KV cache is sent, or computed again; the cheaper (PAT 4.3).

Invariant: the cheaper of what is measured; what is not measured is never guessed, and if neither is, that is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rhyme_openrlhf.latency.transfer_model import NotMeasured, TransferModel

CarrierName = Literal["transfer", "recompute"]


class Carrier(NamedTuple):
    """The way chosen, and the seconds it takes."""

    name: CarrierName
    seconds: float


def cheaper(contexts: Sequence[int], source: TransferModel, target: TransferModel) -> Carrier:
    """For samples with these tokens of context, moved together.

    `source` knows what one of its ranks has to send, `target` how fast it computes. Raises NotMeasured if neither a
    transfer nor a prefill was profiled.
    """
    options: list[Carrier] = []
    with contextlib.suppress(NotMeasured):
        options.append(Carrier("transfer", source.kv_transfer_seconds(contexts)))
    try:
        options.append(Carrier("recompute", target.prefill_seconds(contexts)))
    except NotMeasured:
        if not options:
            raise
    return min(options, key=lambda option: option.seconds)
