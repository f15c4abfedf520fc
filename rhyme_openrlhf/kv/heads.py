"""Which KV heads a tensor-parallel rank has: pure. As vLLM 0.29.0 shards them (config/model.py::get_num_kv_heads)."""

from __future__ import annotations

from typing import NamedTuple


class HeadShare(NamedTuple):
    """Heads `first` to `end` of all of a layer's KV heads; `writes`: no rank before this one has the same."""

    first: int
    end: int
    writes: bool


def head_share(rank: int, ranks: int, heads: int) -> HeadShare:
    """The share of rank `rank` of `ranks`, of `heads` KV heads in all.

    With more ranks than heads each head is on several ranks, which hold the same. Raises ValueError where neither
    number divides the other: no engine runs so.
    """
    if heads % ranks == 0:
        each = heads // ranks
        return HeadShare(rank * each, (rank + 1) * each, True)
    if ranks % heads == 0:
        replicas = ranks // heads
        return HeadShare(rank // replicas, rank // replicas + 1, rank % replicas == 0)
    raise ValueError(f"{heads} KV heads cannot be shared by {ranks} ranks")
