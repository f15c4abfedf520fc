"""The papers' figures from their own published inputs, simulated: the tables of docs/papers.md.

    python benchmarks/papers.py [--only rhymerl|pat|rlhfspec] [--json FILE] [--write]

Everything here is simulated. What a paper does not print is an assumption, named in the table's page; where it is the
speed of the hardware, a band of data-sheet efficiencies is given. No constant is fitted to a result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.simulation import shipped
from rhyme_openrlhf.simulation.presets import PRESETS
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.roofline import DeviceSpec, ModelSpec, roofline
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.speculation_rates import Acceptance, window_rates
from rhyme_openrlhf.simulation.workload import Workload, drawn

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from table_in_page import put

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"
SEED = 1
PAT_SEEDS = (1, 2, 3)
# The part of the data sheet that decoding reaches. It scales all times alike, so no ratio depends on it.
EFFICIENCY = 0.6
# How much of the lengths' variance lies within a prompt is not printed: the default, and more of it.
WITHIN = (0.03, 0.1, 0.3)
NEVER_WAITS = 1e12

QWEN3_14B = ModelSpec("Qwen3ForCausalLM 40x5120", 14.8e9, 40, 8, 128, 5120)
LLAMA_8B = ModelSpec("LlamaForCausalLM 32x4096", 8.03e9, 32, 8, 128, 4096)
# NVIDIA data sheets; dense bfloat16. RhymeRL names no GPU ("high-performance").
H100 = DeviceSpec("NVIDIA H100 SXM", 3.35e12, 989e12, 450e9, 80e9)
L40S = DeviceSpec("NVIDIA L40S", 864e9, 362e12, 32e9, 48e9)

# RhymeRL 7.2.2: 65 % of the draft tokens are accepted at first, 79 % later; 5.1: 75 to 95 % of the tokens recur.
ACCEPTANCE_RATES = (0.65, 0.79)
RECURRING = (0.75, 0.95)


def probability_for(rate: float) -> float:
    """The probability of a draft token, given those before it, with which windows reach this acceptance rate."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        rates = window_rates(HistoSpecSettings(), Acceptance(1.0, middle))
        low, high = (middle, high) if (rates.tokens_per_step - 1) / rates.drafts_per_step < rate else (low, middle)
    return high


def acceptances() -> dict[str, Acceptance]:
    first, last = (
        Acceptance(share, probability_for(rate)) for share, rate in zip(RECURRING, ACCEPTANCE_RATES, strict=True)
    )
    return {"first_acceptance": first, "last_acceptance": last}


def throughput(result: Result, warm_up: int) -> float:
    """Samples a second after the first `warm_up` steps."""
    steps = result.steps
    begin = steps[warm_up - 1].trained if warm_up else 0.0
    return sum(step.samples for step in steps[warm_up:]) / (steps[-1].trained - begin)


def rhymerl(found: dict[str, Any]) -> str:
    """Figures 13 and 14: Math-14B, at most 16K tokens."""
    kinds: dict[str, Callable[[], Features]] = {
        "asynchronous baseline": Features,
        "+ HistoPipe": lambda: Features("pipeline", outliers=True, defer=True),
        "+ two-tier": lambda: Features("pipeline", outliers=True, defer=True, two_tier=True),
        "+ HistoSpec": lambda: Features(
            "pipeline",
            outliers=True,
            defer=True,
            two_tier=True,
            speculation="window",
            acceptance_epochs=4,
            **acceptances(),
        ),
    }
    columns: list[list[float]] = []
    bubbles: list[list[float]] = []
    profiles = {2: roofline(QWEN3_14B, H100, 2, EFFICIENCY)}
    for within in WITHIN:
        shape = dataclasses.replace(PRESETS["rhymerl-math"], within=within)
        load = drawn(shape, steps=32, prompts=256, samples=16, steps_per_epoch=8, seed=SEED)
        cluster = Cluster(nodes=12, devices=8, tensor_parallel=2, trainer_tokens_per_second=NEVER_WAITS)
        # Figure 2: the rollout is 84 to 91 % of a step's time; the trainer is as fast as that says.
        alone = Run(load, cluster, Features(), profiles).go()
        tokens = sum(step.tokens for step in alone.steps) / len(alone.steps)
        cluster = dataclasses.replace(
            cluster, trainer_tokens_per_second=tokens / (alone.rollout_seconds * (1 - 0.875) / 0.875)
        )
        results = [Run(load, cluster, kind(), profiles).go() for kind in kinds.values()]
        columns.append([throughput(result, 8) for result in results])
        bubbles.append([result.accounts.bubble_fraction() for result in results])
        say(f"rhymerl, {within} within: {columns[-1]}")
    found["rhymerl"] = {"within": WITHIN, "samples_per_second": columns, "bubble_fraction": bubbles}
    paper = ["", "1.43x", "1.10x", "1.50x"]
    lines = ["| | paper, against the row above | simulated, against the row above | bubbles |", "|---|---|---|---|"]
    for row, name in enumerate(kinds):
        gains = [column[row] / column[row - 1] for column in columns] if row else []
        simulated = f"{gains[0]:.2f}x ({min(gains):.2f} to {max(gains):.2f})" if gains else ""
        lines.append(f"| {name} | {paper[row]} | {simulated} | {bubbles[0][row]:.0%} |")
    whole = [column[-1] / column[0] for column in columns]
    lines.append(f"| in all | 2.3x (mean), 2.6x (most) | {whole[0]:.2f}x ({min(whole):.2f} to {max(whole):.2f}) | |")
    return "\n".join(lines)


def pat(found: dict[str, Any]) -> str:
    """Figure 10a: LLaMA3.1-8B on 8 A40, by the longest response allowed."""
    profiles = shipped.load(["pat-a40"])
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
                return Run(load, cluster, features, profiles).go().rollout_seconds

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


def spread(values: list[float]) -> str:
    """The mean, and the least and the most."""
    return f"{statistics.fmean(values):.2f}x ({min(values):.2f} to {max(values):.2f})"


def end_to_end(gain: float, share: float) -> float:
    """What a gain of the generation is for a step of which it is this share."""
    return 1 / (1 - share + share / gain)


def rlhfspec(found: dict[str, Any]) -> str:
    """Section 3.3 and figure 13's last step: Llama-3.1-8B, 8 engines on L40S, LMSYS, at most 2048 tokens."""
    profiles = {1: rlhfspec_profile()}
    load = drawn(PRESETS["rlhfspec-lmsys"], steps=8, prompts=512, samples=1, steps_per_epoch=1, seed=SEED)
    lines = [
        "| threshold | simulated rollout, s | moved, of all samples | paper | simulated |",
        "|---|---|---|---|---|",
    ]
    found["rlhfspec"] = []
    cluster = Cluster(devices=8, running=64, trainer_tokens_per_second=NEVER_WAITS)
    plain = Run(load, cluster, Features("sync"), profiles).go().rollout_seconds
    for threshold in (0, 6, 19):
        features = Features("sync", reallocation=True, threshold=threshold, interval=0.5, cooldown=20)
        result = Run(load, cluster, features, profiles).go()
        moved = sum(result.moves.values()) / sum(step.samples for step in result.steps)
        gain = plain / result.rollout_seconds
        found["rlhfspec"].append({"threshold": threshold, "seconds": result.rollout_seconds, "without": plain})
        name = str(threshold) if threshold else "from the profile's knee"
        lines.append(
            f"| {name} | {result.rollout_seconds:.1f} ({plain:.1f} without) | {moved:.0%} | 1.19x | {gain:.2f}x |"
        )
    return "\n".join(lines)


def rlhfspec_profile() -> Profile:
    """Section 3.3: tokens a second of an engine with 1, 6, 19 and 24 samples, their speculation included."""
    printed = {1: 103, 6: 765, 19: 1415, 24: 1453}
    base = roofline(LLAMA_8B, L40S, 1, 1.0)
    steps = tuple(StepPoint(count, count, 0, count / rate, 0.0, 1) for count, rate in printed.items())
    return dataclasses.replace(base, steps=steps, notes=("RLHFSpec 3.3: time of a token, at whatever context",))


def say(words: str) -> None:
    print(words, flush=True)


def main() -> None:
    """Simulate, print, and put the tables where they belong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"rhymerl": rhymerl, "pat": pat, "rlhfspec": rlhfspec}
    parser.add_argument("--only", choices=sorted(tables), help="one paper")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/papers.md")
    options = parser.parse_args()
    found: dict[str, Any] = {"kind": "simulated", "seed": SEED}
    for name, table in tables.items():
        if options.only in (None, name):
            text = table(found)
            say(text)
            if options.write:
                put(PAGE, name, text)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
