"""The papers' figures from their own published inputs, simulated: the tables of docs/papers.md.

    python benchmarks/papers.py [--only TABLE] [--json FILE] [--write]

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

from roofline import DeviceSpec, ModelSpec, roofline

from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Acceptance, Cluster, Features
from rhyme_openrlhf.simulation.speculation import window_rates
from rhyme_openrlhf.simulation.workload import PRESETS, Workload, drawn

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
A40 = DeviceSpec("NVIDIA A40", 696e9, 149.7e12, 32e9, 48e9)
# EAGLE's head for LLaMA-8B: a layer, the layer that joins its inputs, and the vocabulary's matrix.
EAGLE_PARAMETERS = 218e6 + 2 * 4096 * 4096 + 128256 * 4096
# RLHFSpec prints neither acceptance nor t_sd: so a band over both.
EAGLE_ACCEPTANCE = (0.6, 0.7, 0.8)
EFFICIENCIES = (0.4, 0.6, 0.8)

# RhymeRL 7.2.2: 65 % of the draft tokens are accepted at first, 79 % later; 5.1: 75 to 95 % of the tokens recur.
ACCEPTANCE_RATES = (0.65, 0.79)
RECURRING = (0.75, 0.95)


def probability_for(rate: float) -> float:
    """Return the probability of a draft token, given those before it, with which windows reach this acceptance rate."""
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
        "+ HistoPipe": lambda: Features("pipeline", rank_groups=16, outliers=True, defer=True),
        "+ two-tier": lambda: Features("pipeline", rank_groups=16, outliers=True, defer=True, two_tier=True),
        "+ HistoSpec": lambda: Features(
            "pipeline",
            rank_groups=16,
            outliers=True,
            defer=True,
            two_tier=True,
            speculation="window",
            acceptance_epochs=4,
            **acceptances(),
        ),
    }
    columns: list[list[float]] = []
    of_epochs: list[list[list[float]]] = []
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
        of_epochs.append([epochs(result) for result in results])
    found["rhymerl"] = {"within": WITHIN, "samples_per_second": columns, "bubble_fraction": bubbles}
    found["rhymerl"]["seconds_of_8_steps"] = of_epochs
    paper = ["", "1.43x", "1.10x", "1.50x"]
    lines = ["| | paper, against the row above | simulated, against the row above | bubbles |", "|---|---|---|---|"]
    for row, name in enumerate(kinds):
        gains = [column[row] / column[row - 1] for column in columns] if row else []
        simulated = f"{gains[0]:.2f}x ({min(gains):.2f} to {max(gains):.2f})" if gains else ""
        lines.append(f"| {name} | {paper[row]} | {simulated} | {bubbles[0][row]:.0%} |")
    whole = [column[-1] / column[0] for column in columns]
    lines.append(f"| in all | 2.3x (mean), 2.6x (most) | {whole[0]:.2f}x ({min(whole):.2f} to {max(whole):.2f}) | |")
    # Figure 15: the most that any stretch of steps gains.
    for row, (name, printed) in enumerate((("HistoPipe", "1.68x"), ("two-tier, on top", "1.14x")), start=1):
        most = [
            max(before / after for before, after in zip(part[row - 1], part[row], strict=True)) for part in of_epochs
        ]
        lines.append(
            f"| figure 15: {name}, most in any 8 steps | {printed} (any 10) | {most[0]:.2f}x "
            f"({min(most):.2f} to {max(most):.2f}) | |"
        )
    return "\n".join(lines)


def epochs(result: Result, size: int = 8) -> list[float]:
    """Seconds of each `size` steps, the first ones (warm-up) left out."""
    ends = [step.trained for step in result.steps][size - 1 :: size]
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]


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
                    Run(load, cluster, features, profiles).go().rollout_seconds
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


def spread(values: list[float]) -> str:
    """Return the mean, and the least and the most."""
    return f"{statistics.fmean(values):.2f}x ({min(values):.2f} to {max(values):.2f})"


def end_to_end(gain: float, share: float) -> float:
    """Return the gain of a whole step from a gain of the generation, which is this share of it."""
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


def rlhfspec_breakdown(found: dict[str, Any]) -> str:
    """Figures 11 and 13: decoding, speculation by fixed rules, drafts by load, reallocation; from data sheets."""
    load = drawn(PRESETS["rlhfspec-lmsys"], steps=8, prompts=512, samples=1, steps_per_epoch=1, seed=SEED)
    cluster = Cluster(devices=8, running=64, trainer_tokens_per_second=NEVER_WAITS)
    columns: dict[tuple[float, float], list[float]] = {}
    for efficiency in EFFICIENCIES:
        profiles = {1: with_eagle(roofline(LLAMA_8B, L40S, 1, efficiency), efficiency)}
        for probability in EAGLE_ACCEPTANCE:
            each = Acceptance(1.0, probability)
            seconds = []
            for speculation, moved in (("off", False), ("window", False), ("budget", False), ("budget", True)):
                features = Features(
                    "sync",
                    speculation=speculation,  # type: ignore[arg-type]
                    first_acceptance=each,
                    last_acceptance=each,
                    reallocation=moved,
                    interval=0.5,
                    cooldown=20,
                )
                steps = Run(load, cluster, features, profiles).go().steps
                # The first epoch drafts nothing.
                seconds.append(statistics.fmean(step.completed - step.begun for step in steps[1:]))
            columns[efficiency, probability] = [seconds[0] / other for other in seconds]
    found["rlhfspec-breakdown"] = [{"efficiency": e, "acceptance": p, "gains": g} for (e, p), g in columns.items()]
    lines = [
        "| | paper, against decoding | simulated, against decoding (0.7 accepted, 60 %) | band |",
        "|---|---|---|---|",
    ]
    names = (("Spec", "1.18x"), ("+ Selection", "1.95x"), ("+ Reallocation", "2.32x"))
    for row, (name, printed) in enumerate(names, start=1):
        values = [gains[row] for gains in columns.values()]
        middle = columns[0.6, 0.7][row]
        lines.append(f"| {name} | {printed} | {middle:.2f}x | {min(values):.2f} to {max(values):.2f} |")
    against = [gains[3] / gains[1] for gains in columns.values()]
    middle = columns[0.6, 0.7][3] / columns[0.6, 0.7][1]
    lines.append(
        f"| all, against Spec (figure 11) | 2.02x LMSYS, 1.97x GSM8K (most) | {middle:.2f}x | "
        f"{min(against):.2f} to {max(against):.2f} |"
    )
    return "\n".join(lines)


def with_eagle(profile: Profile, efficiency: float) -> Profile:
    """Return the profile with steps that draft: EAGLE's head reads its weights once for each token of the longest
    draft.
    """
    model = StepModel(profile)
    head = EAGLE_PARAMETERS * 2 / (L40S.memory_rate * efficiency)
    drafting = tuple(
        StepPoint(
            point.running,
            point.context,
            point.running * each,
            model.seconds(point.running, point.context, point.running * each) + each * head,
            0.0,
            1,
        )
        for point in profile.steps
        for each in (1, 3, 7, 15, 31)
        if point.running <= 64
    )
    return dataclasses.replace(profile, steps=profile.steps + drafting)


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
    tables = {
        "rhymerl": rhymerl,
        "pat": pat,
        "pat-others": pat_others,
        "rlhfspec": rlhfspec,
        "rlhfspec-breakdown": rlhfspec_breakdown,
    }
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
