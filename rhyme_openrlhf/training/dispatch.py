"""Prompts go to engines by predicted work: what OpenRLHF's dispatch sends, sent where the policy says.

Upstream's dispatch chooses by counts and calls the engine it chose, prompt after prompt. `routed` stands for its
engines: the n-th prompt goes to the engine chosen for it, whichever stand-in was called. Checked against OpenRLHF
0.11.2 `trainer/ppo_utils/samples_generator.py`.

Invariants: without any history upstream's own choice is left alone; what decides is only which engine, never what is
generated or in which order prompts are sent; asking for lengths has a limit, and no answer is no history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


def routed(engines: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    """Stand-ins for `engines`: the n-th prompt that is sent to any of them goes to engine `chosen[n]`."""
    order = iter(chosen)

    def send(**arguments: Any) -> Any:
        return engines[next(order)].generate_responses.remote(**arguments)

    return [_stand_in(engine, send) for engine in engines]


def _stand_in(engine: Any, send: Callable[..., Any]) -> Any:
    return SimpleNamespace(
        generate_responses=SimpleNamespace(remote=send),
        get_num_unfinished_requests=engine.get_num_unfinished_requests,
    )
