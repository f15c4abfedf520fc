"""The choice of vLLM's model runner for drafts (`--drafting.runner auto`), by what this machine has proved. Pure.

The second model runner (V2) is taken where `rhyme verify` has passed with it. The record's entry must be of these
versions and this device. Its proofs must be of this architecture, tensor-parallel size and weight transport. The number
format does not count: equality is checked in float32 wherever that fits, and a run is in bfloat16. If this machine has
measured two runners or more, the fastest of them is taken. Otherwise V2 goes before V2 with asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence

from rhyme_openrlhf.settings.drafting import V1, V2, V2_ASYNC
from rhyme_openrlhf.verify.record import Engines, Entry

# What a runner must have proved, beside that weights arrive in it.
LOSSLESS = ("lossless-greedy", "lossless-sampled")
TRY = "rhyme verify --drafting.runner v2"


def runners(ranks: int) -> Sequence[str]:
    """Return the second runner's variants that engines of `ranks` GPUs can have."""
    return (V2, V2_ASYNC) if ranks == 1 else (V2,)


def choose(entry: Entry, architecture: str, ranks: int, transport: str) -> tuple[str, str]:
    """Return the runner, and the reason as a clause."""
    needed = (*LOSSLESS, f"weights-{transport}")
    proved: dict[str, str] = {}
    for runner in runners(ranks):
        names = [Engines(runner, architecture, ranks).proof(name) for name in needed]
        if all(name in entry.proofs for name in names):
            proved[runner] = max(entry.proofs[name] for name in names)
    if not proved:
        return V1, f"`rhyme verify` has not passed with v2 for {architecture} here (run `{TRY}` with these options)"
    speeds = {runner: entry.speeds.get(str(Engines(runner, architecture, ranks))) for runner in (V1, *proved)}
    measured = {runner: speed for runner, speed in speeds.items() if speed is not None}
    if len(measured) > 1:
        ordered = sorted(measured, key=lambda runner: -measured[runner])
        figures = ", ".join(f"{runner} {measured[runner]:.2f} times" for runner in ordered)
        return ordered[0], f"of those verified here it was the fastest ({figures} an engine without drafts)"
    runner = next(iter(proved))
    return runner, f"`rhyme verify` has passed with it for {architecture} on {proved[runner][:10]}"
