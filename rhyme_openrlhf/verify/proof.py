"""Check: what a run's engine proves of its drafts before its first sample (engine/actor_parts/proving.py).

The engine is in the run's own number format, graphs, attention and ranks. What passes is kept on the engine's node, so
that runs with such engines need not prove it again; what fails is no longer kept there.
"""

from __future__ import annotations

import dataclasses

from rhyme_openrlhf.verify.bench import Bench
from rhyme_openrlhf.verify.outcome import Outcome

WHAT = "drafts prove themselves as in a run"


def run(bench: Bench) -> Outcome:
    """Ask the speculating engine for its proof."""
    pair = bench.run_pair()
    bench.say("likeliest and sampled responses with drafts and without")
    found = pair.speculating.prove()
    worst = max(found.by_kind.values(), key=lambda one: one.largest)
    lines = [
        f"{pair.speculating.facts.dtype}, {pair.speculating.facts.words}, {found.seconds:.0f} s",
        f"log-probabilities differ by {found.by_batch_size.mean:.2g} on average and {found.by_batch_size.largest:.2g} "
        f"at most with another batch size, by up to {worst.mean:.2g} and {worst.largest:.2g} with drafts",
        f"{found.drafted:,} drafted, {found.accepted:,} accepted; sampled tokens: "
        + (", ".join(f"p = {p:.2g} with {kind} drafts" for kind, p in found.p_values.items()) or "nothing is open"),
    ]
    figures = dataclasses.asdict(found)
    return Outcome(WHAT, "failed" if found.problem else "ok", found.problem, lines, figures)
