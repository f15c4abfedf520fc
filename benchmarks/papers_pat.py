"""PAT's figures 10 and 11, simulated."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from papers_inputs import A40, EFFICIENCY, H100, LLAMA_8B, NEVER_WAITS, PAT_SEEDS, QWEN3_14B, end_to_end, say, spread
from roofline import roofline

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import PRESETS, Workload, drawn


def pat(found: dict[str, Any]) -> str:
    """Figure 10a: LLaMA3.1-8B on 8 A40, by the longest response allowed."""
    profiles = engine_kinds.load(["pat-a40"])
    base = Cluster(devices=8, tensor_parallel=2, trainer_tokens_per_second=NEVER_WAITS)
    wide = dataclasses.replace(base, tensor_parallel=8)
    # Section 5.4: 5.52 s a switch, 2.36 s of it for the KV caches, which the carrier's cost has already.
    reshard = dataclasses.replace(base, switch_seconds=5.52 - 2.36)
    lines = [
        "| longest response | TP 2 x 4, s | TP 8, s | PAT's rule and switch cost, s | ours, s | generation, against "
        "TP 2 x 4 | ours | end to end, PAT's rule | paper | generation, against TP 8 | ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    paper = {6144: "1.05x (least)", 16384: "1.27x (most)"}
    # Figure 3a: the generation's share of a step, at its shortest and longest responses.
    share = {6144: 0.6422, 16384: 0.817}
    found["pat"] = []
    for longest in (6144, 8192, 12288, 16384):
        shape = dataclasses.replace(PRESETS["pat-deepscaler"], longest=longest)
        rows = []
        for seed in PAT_SEEDS:
            load = drawn(shape, steps=20, prompts=16, samples=8, steps_per_epoch=4, seed=seed)

            def seconds(cluster: Cluster, features: Features, load: Workload = load) -> float:
                return of_longest_steps(load, Run(load, cluster, features, profiles).go())

            rows.append(
                (
                    seconds(base, Features("sync")),
                    seconds(wide, Features("sync")),
                    seconds(reshard, Features("sync", switching="maximum")),
                    seconds(base, Features("sync", switching="history")),
                )
            )
        found["pat"].append({"longest": longest, "seeds": PAT_SEEDS, "seconds": rows})
        low, high, theirs, ours = (f"{statistics.fmean(row[at] for row in rows):.0f}" for at in range(4))
        whole = [end_to_end(row[0] / row[2], share[longest]) for row in rows] if longest in share else []
        gains = [spread([row[static] / row[rule] for row in rows]) for static in (0, 1) for rule in (2, 3)]
        lines.append(
            f"| {longest} | {low} | {high} | {theirs} | {ours} | {gains[0]} | {gains[1]} | "
            f"{spread(whole) if whole else ''} | {paper.get(longest, '')} | {gains[2]} | {gains[3]} |"
        )
        say(lines[-1])
    return "\n".join(lines)


def of_longest_steps(load: Workload, result: Result) -> float:
    """Return the mean rollout seconds of steps in which a response is as long as allowed: PAT 5.1 measures these.

    Of all steps where none has such a response, as with figure 11a's 24K.
    """
    longest = [any(load.longest in prompt.lengths for prompt in step.prompts) for step in load.steps]
    seconds = [step.completed - step.begun for step in result.steps]
    return statistics.fmean([one for one, counts in zip(seconds, longest, strict=True) if counts] or seconds)


def pat_others(found: dict[str, Any]) -> str:
    """Figures 10b, 10c and 11: two nodes, another model, another device."""
    kinds: list[tuple[str, Callable[[int], Profile] | None, int, int, float, str]] = [
        # Shares of the generation: figure 3a's; of figure 11c's times; what makes 1.29x of 32.0 % less generation.
        ("10b: LLaMA3.1-8B, 16 A40", None, 2, 16384, 0.817, "1.19x (most)"),
        ("10c: Qwen3-14B, 16 A40", lambda size: roofline(QWEN3_14B, A40, size, EFFICIENCY), 2, 16384, 0.817, "1.18x"),
        ("11a: LLaMA3.1-8B, 8 H100", lambda size: roofline(LLAMA_8B, H100, size, EFFICIENCY), 1, 24576, 0.779, "1.37x"),
        ("11b: Qwen3-14B, 8 H100", lambda size: roofline(QWEN3_14B, H100, size, EFFICIENCY), 1, 16384, 0.702, "1.29x"),
    ]
    lines = [
        "| figure | static TP 2, s | static TP 8, s | PAT's rule, s | ours, s | PAT's rule, end to end against TP 2 | "
        "ours | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found["pat-others"] = []
    for name, derived, nodes, longest, share, printed in kinds:
        profiles = {size: derived(size) for size in (2, 8)} if derived else engine_kinds.load(["pat-a40"])
        shape = dataclasses.replace(PRESETS["pat-deepscaler"], longest=longest)
        rows = []
        for seed in PAT_SEEDS:
            load = drawn(shape, steps=20, prompts=16 * nodes, samples=8, steps_per_epoch=4, seed=seed)
            base = Cluster(nodes=nodes, devices=8, tensor_parallel=2, trainer_tokens_per_second=NEVER_WAITS)
            wide = dataclasses.replace(base, tensor_parallel=8)
            # What is not KV caches of the printed switch; on NVLink it is less, and not printed.
            reshard = dataclasses.replace(base, switch_seconds=5.52 - 2.36)
            rows.append(
                [
                    of_longest_steps(load, Run(load, cluster, features, profiles).go())
                    for cluster, features in (
                        (base, Features("sync")),
                        (wide, Features("sync")),
                        (reshard, Features("sync", switching="maximum")),
                        (base, Features("sync", switching="history")),
                    )
                ]
            )
        found["pat-others"].append({"figure": name, "seeds": PAT_SEEDS, "seconds": rows})
        means = " | ".join(f"{statistics.fmean(row[at] for row in rows):.0f}" for at in range(4))
        gains = [spread([end_to_end(row[0] / row[rule], share) for row in rows]) for rule in (2, 3)]
        lines.append(f"| {name} | {means} | {gains[0]} | {gains[1]} | {printed} |")
        say(lines[-1])
    return "\n".join(lines)
