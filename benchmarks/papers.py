"""The papers' figures from their own published inputs, simulated: the tables of docs/papers.md.

    python benchmarks/papers.py --write                  # all tables and the page's stamp, about 3 minutes of one core
    python benchmarks/papers.py [--only TABLE] [--json FILE]

The stamp is a hash of the code that makes the tables: this script and all modules of the package that it imports,
without comments and texts for readers. `tests/benchmarks/test_papers.py` fails if the page has another one.

Everything here is simulated. What a paper does not print is an assumption, named in the table's page; where it is the
speed of the hardware, a band of data-sheet efficiencies is given. No constant is fitted to a result.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roofline import DeviceSpec, ModelSpec, roofline

from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.scheduling.reallocation import EngineLoad, by_threshold
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Acceptance, Cluster, Features
from rhyme_openrlhf.simulation.speculation import window_rates
from rhyme_openrlhf.simulation.workload import PRESETS, Workload, drawn

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from table_in_page import put

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
SEED = 1
PAT_SEEDS = (1, 2, 3)
# The part of the data sheet that decoding reaches. It scales all times alike, so no ratio depends on it.
EFFICIENCY = 0.6
# How much of the lengths' variance lies within a prompt is not printed: the default, and more of it.
WITHIN = (0.03, 0.1, 0.3)
NEVER_WAITS = 1e12

QWEN3_14B = ModelSpec("Qwen3ForCausalLM 40x5120", 14.8e9, 40, 8, 128, 5120)
QWEN3_8B = ModelSpec("Qwen3ForCausalLM 36x4096", 8.19e9, 36, 8, 128, 4096)
QWEN25_32B = ModelSpec("Qwen2ForCausalLM 64x5120", 32.8e9, 64, 8, 128, 5120)
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
    migrated: list[float] = []
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
        migrated.append(sum(results[2].moves.values()) / sum(step.samples for step in results[2].steps))
        bubbles.append([result.accounts.bubble_fraction() for result in results])
        say(f"rhymerl, {within} within: {columns[-1]}")
        of_epochs.append([epochs(result) for result in results])
    found["rhymerl"] = {
        "within": WITHIN,
        "samples_per_second": columns,
        "bubble_fraction": bubbles,
        "migrated": migrated,
    }
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


def rhymerl_batches(found: dict[str, Any]) -> str:
    """Sections 1 and 7.4, figure 18: by the number of rollouts an engine gets in a step, with four engine pairs."""
    profiles = {2: roofline(QWEN3_14B, H100, 2, EFFICIENCY)}
    steps, warm_up, engines, samples = 12, 4, 8, 16
    pipe = Features("pipeline", rank_groups=4, outliers=True, defer=True)
    two_tier = dataclasses.replace(pipe, two_tier=True)
    whole = dataclasses.replace(two_tier, speculation="window", acceptance_epochs=3, **acceptances())
    lines = [
        "| rollouts an engine | baseline idle | by load alone | one tier | two-tier | + HistoSpec | all | migrated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found["rhymerl-batches"] = []
    for rollouts in (85, 512, 1024, 2176):
        load = drawn(PRESETS["rhymerl-math"], steps, rollouts * engines // samples, samples, warm_up, SEED)
        cluster = Cluster(2, 8, 2, running=1024, trainer_tokens_per_second=NEVER_WAITS)
        cluster = with_trainer(load, cluster, profiles)
        by_load = Features("pipeline", rank_groups=1)
        results = [Run(load, cluster, kind, profiles).go() for kind in (Features(), by_load, pipe, two_tier, whole)]
        base, *others = (throughput(result, warm_up) for result in results)
        idle = results[0].accounts.bubble_fraction()
        moved = sum(results[3].moves.values()) / sum(step.samples for step in results[3].steps)
        row = {"rollouts": rollouts, "idle": idle, "gains": [one / base for one in others], "migrated": moved}
        found["rhymerl-batches"].append(row)
        load_gain, one, two, all_ = row["gains"]
        gains = (f"{gain:.2f}x" for gain in (load_gain, one, two, all_ / two, all_))
        lines.append(f"| {rollouts:,} | {idle:.0%} | {' | '.join(gains)} | {moved:.1%} |")
        say(lines[-1])
    return "\n".join(lines)


def with_trainer(load: Workload, cluster: Cluster, profiles: dict[int, Profile]) -> Cluster:
    """Return the cluster with a trainer of figure 2's share: the rollout is 84 to 91 % of a step's time."""
    alone = Run(load, cluster, Features(), profiles).go()
    tokens = sum(step.tokens for step in alone.steps) / len(alone.steps)
    seconds = alone.rollout_seconds * (1 - 0.875) / 0.875
    return dataclasses.replace(cluster, trainer_tokens_per_second=tokens / seconds)


def rhymerl_models(found: dict[str, Any]) -> str:
    """Figure 13: three models and two longest responses, at about the idle share that section 1 prints."""
    lines = ["| model | longest response | baseline idle | all of RhymeRL, against the baseline |", "|---|---|---|---|"]
    found["rhymerl-models"] = []
    for name, model, size in (("8B", QWEN3_8B, 2), ("14B", QWEN3_14B, 2), ("32B", QWEN25_32B, 4)):
        profiles = {size: roofline(model, H100, size, EFFICIENCY)}
        for longest in (8192, 16384):
            shape = dataclasses.replace(PRESETS["rhymerl-math"], longest=longest)
            load = drawn(shape, 12, 512, 16, 4, SEED)
            cluster = Cluster(size, 8, size, running=1024, trainer_tokens_per_second=NEVER_WAITS)
            cluster = with_trainer(load, cluster, profiles)
            kind = Features("pipeline", rank_groups=4, outliers=True, defer=True, two_tier=True)
            kind = dataclasses.replace(kind, speculation="window", acceptance_epochs=3, **acceptances())
            base, every = (Run(load, cluster, features, profiles).go() for features in (Features(), kind))
            gain, idle = throughput(every, 4) / throughput(base, 4), base.accounts.bubble_fraction()
            found["rhymerl-models"].append({"model": model.name, "longest": longest, "gain": gain, "idle": idle})
            lines.append(f"| {name} | {longest:,} | {idle:.0%} | {gain:.2f}x |")
            say(lines[-1])
    return "\n".join(lines)


def rhymerl_ranks(found: dict[str, Any]) -> str:
    """Figure 9 and table 2, arithmetic on drawn lengths: are responses in the group of their prompt's median?"""
    lines = ["| rank groups | paper: in the predicted group or a shorter one | drawn lengths |", "|---|---|---|"]
    found["rhymerl-ranks"] = {}
    for groups, printed in ((8, "79.0 to 85.7 %"), (16, "71.6 to 79.7 %")):
        load = drawn(PRESETS["rhymerl-math"], 64, 64, 16, 8, SEED)
        by_epoch: dict[int, dict[int, tuple[int, ...]]] = {}
        for step in load.steps:
            by_epoch.setdefault(step.epoch, {}).update({one.prompt: one.lengths for one in step.prompts})
        kept = total = 0
        for epoch in sorted(by_epoch)[1:]:
            before, now = by_epoch[epoch - 1], by_epoch[epoch]
            ranked = sorted(now, key=lambda prompt: statistics.median(before[prompt]))
            predicted = {prompt: place * groups // len(ranked) for place, prompt in enumerate(ranked)}
            ordered = sorted((length, prompt) for prompt, lengths in now.items() for length in lengths)
            for place, (_, prompt) in enumerate(ordered):
                kept += place * groups // len(ordered) <= predicted[prompt]
            total += len(ordered)
        found["rhymerl-ranks"][groups] = kept / total
        lines.append(f"| {groups} | {printed} | {kept / total:.1%} |")
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
        name = str(threshold) if threshold else "none: by throughput"
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


def arithmetic(found: dict[str, Any]) -> str:
    """RLHFSpec's figure 12 and section 3.3's reallocation: calculated from printed figures."""
    middle = next(one for one in found["rlhfspec-breakdown"] if (one["efficiency"], one["acceptance"]) == (0.6, 0.7))
    # Section 3.1: the generation is 68.4 % of a step.
    whole, theirs = (end_to_end(gain, 0.684) for gain in (middle["gains"][3] / middle["gains"][1], 2.02))
    loads = [EngineLoad(place, [(100, 1.0, sample) for sample in range(n)], 10**6) for place, n in enumerate((24, 1))]
    count = sum(len(order.samples) for order in by_threshold(loads, 19))
    found["arithmetic"] = {"rlhfspec-12": whole, "moved": count}
    return "\n".join(
        [
            "| figure | paper | ours, calculated |",
            "|---|---|---|",
            f"| RLHFSpec, figure 12: whole step, against Speculative | 1.37x LMSYS, 1.35x GSM8K (most) | {whole:.2f}x "
            f"({theirs:.2f}x from the paper's own 2.02x) |",
            f"| RLHFSpec, figure 5: samples moved of 24 and 1, threshold 19 | 5 | {count} |",
        ]
    )


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


def every_figure(found: dict[str, Any]) -> str:
    """Return a row for each figure and table of the three papers."""
    pat_most = found["pat"][-1]["seconds"]
    pat_theirs = spread([end_to_end(row[0] / row[2], 0.817) for row in pat_most])
    others = {row["figure"][:3]: row["seconds"] for row in found["pat-others"]}
    gains = {
        name: spread([end_to_end(row[0] / row[2], share) for row in others[name]])
        for name, share in (("10b", 0.817), ("10c", 0.817), ("11a", 0.779), ("11b", 0.702))
    }
    middle = next(one for one in found["rlhfspec-breakdown"] if (one["efficiency"], one["acceptance"]) == (0.6, 0.7))
    spec, selection, moved = middle["gains"][1:]
    batch = next(row for row in found["rhymerl-batches"] if row["rollouts"] == 1024)
    models = [row["gain"] for row in found["rhymerl-models"]]
    ranks = found["rhymerl-ranks"]
    calculated = found["arithmetic"]
    column = found["rhymerl"]["samples_per_second"][0]
    fifteen = found["rhymerl"]["seconds_of_8_steps"][0]
    most = [max(a / b for a, b in zip(fifteen[row - 1], fifteen[row], strict=True)) for row in (1, 2)]
    drawing = ("a drawing, a list or an algorithm", "nothing to compare", "")
    migrated = ", ".join(f"{share:.1%}" for share in found["rhymerl"]["migrated"])
    migrated += " (3, 10, 30 % of the variance within a prompt)"
    rows: list[tuple[str, str, str, str]] = [
        ("RhymeRL 1, 4, 5, 7, 10, 11, 12; tables 1, 3", *drawing),
        ("RhymeRL 2", "rollout 84 to 91 % of a step", "taken as an input: 87.5 %", "assumed"),
        ("RhymeRL 3", "mean length 1K to 10K in 320 steps; idle 76 %", "lengths taken as an input", "assumed"),
        ("RhymeRL section 1", "over 46 % idle", f"{batch['idle']:.0%} at 1,024 rollouts an engine", "simulated"),
        ("RhymeRL 6", "93 % found (math), 75 % (code)", f"84 to 91 %, {OWN_RUN}", "measured"),
        ("RhymeRL 8", "hit lengths", f"drawn of {OWN_RUN}", "measured"),
        ("RhymeRL 9, table 2", "71.6 to 85.7 %", f"{ranks[8]:.1%} and {ranks[16]:.1%} (8 and 16 groups)", "arithmetic"),
        ("RhymeRL 13", "1.9x at 8K, 2.3x at 16K (mean)", f"{min(models):.2f} to {max(models):.2f}x", "simulated"),
        (
            "RhymeRL 14",
            "1.43x, 1.10x, 1.50x",
            ", ".join(f"{column[row] / column[row - 1]:.2f}x" for row in (1, 2, 3))
            + f"; at 1,024 an engine {batch['gains'][1]:.2f}x, {batch['gains'][2] / batch['gains'][1]:.2f}x, "
            f"{batch['gains'][3] / batch['gains'][2]:.2f}x",
            "simulated",
        ),
        ("RhymeRL 15", "1.68x, 1.14x (most)", f"{most[0]:.2f}x, {most[1]:.2f}x", "simulated"),
        ("RhymeRL 16", "1.86x (most)", f"4.32x (most), {OWN_RUN}", "measured"),
        ("RhymeRL 17", "65 to 79 % accepted", f"54 to 84 % from epoch 2, {OWN_RUN}", "measured"),
        ("RhymeRL 18", "2.2 to 5.5 % migrated (math)", migrated, "simulated"),
        (
            "RhymeRL 19",
            "rewards overlap",
            "difference 0.028, standard error 0.025 ([learning](benchmarks.md))",
            "measured",
        ),
        ("RhymeRL section 7.4", "1.80 to 1.86x by HistoSpec", "the table by batch, below", "simulated"),
        ("RLHFSpec 1, 6, 7, 8, 10", *drawing),
        ("RLHFSpec 2, 3", "lengths; generation 68.4 %", "taken as inputs", "assumed"),
        (
            "RLHFSpec 4, table 1",
            "95.5 to 99.9 % of the best fixed n",
            "103 to 126 % ([budget](benchmarks.md))",
            "measured",
        ),
        ("RLHFSpec 5, 9", "24 + 1 samples become 19 + 6", f"{calculated['moved']} samples moved", "arithmetic"),
        ("RLHFSpec section 3.3", "1.40x by these five", "1.47x (1.46 to 1.48) ([moves](benchmarks.md))", "emulated"),
        ("RLHFSpec 11", "2.02x, 1.97x (most, against Speculative)", f"{moved / spec:.2f}x", "simulated"),
        ("RLHFSpec 12", "1.37x, 1.35x (most)", f"{calculated['rlhfspec-12']:.2f}x", "arithmetic"),
        ("RLHFSpec 13", "1.18x, 1.95x, 2.32x", f"{spec:.2f}x, {selection:.2f}x, {moved:.2f}x", "simulated"),
        ("RLHFSpec 14", "1.19x by five moved samples", "not reproduced: the samples of both are not printed", ""),
        ("PAT 1, 2, 5, 7, 8, 9", *drawing),
        ("PAT 3, 4", "shares, lengths, step times", "taken as inputs (`pat-a40`)", "assumed"),
        ("PAT 6", "step time over total tokens", "not reproduced: needs an H100", ""),
        ("PAT 10a", "1.05x to 1.27x", f"{pat_theirs} at 16K", "simulated"),
        ("PAT 10b", "1.19x (most)", gains["10b"], "simulated"),
        ("PAT 10c", "1.05x to 1.18x", gains["10c"], "simulated"),
        ("PAT 11", "1.37x, 1.29x", f"{gains['11a']}, {gains['11b']}", "simulated"),
        (
            "PAT 12",
            "a switch takes 5.52 s, 2.36 s of it for KV caches",
            "taken as inputs; ours reshards nothing",
            "assumed",
        ),
        (
            "PAT 13",
            "2.5 GB more at a switch",
            "no resharding: both layouts resident ([memory](benchmarks.md))",
            "measured",
        ),
        ("PAT 14", "3.07 and 4.04 % error", "3.3 % over a run ([step times](benchmarks.md))", "measured"),
    ]
    lines = ["| figure or table | paper | ours | how |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


OWN_RUN = "[a run of ours](benchmarks.md#rhymerls-figures-of-a-run-of-ours)"


def sources() -> list[Path]:
    """Return the files that decide the tables: these scripts, and all modules of the package that they import.

    Settings are left out: most of their options are of live runs. Those of simulated runs are in `stamp`.
    """
    found = [Path(__file__), Path(__file__).with_name("roofline.py")]
    for path in found:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            for name in names:
                other = ROOT / Path(*name.split(".")).with_suffix(".py")
                decides = name.startswith("rhyme_openrlhf.") and not name.startswith("rhyme_openrlhf.settings.")
                if decides and other.exists() and other not in found:
                    found.append(other)
    return [*found[:2], *sorted(found[2:])]


def stamp() -> str:
    """Return a hash of the sources, the defaults of simulated runs, the compiled core's sources and the profiles.

    What only readers see does not count.
    """
    drafting = dataclasses.asdict(HistoSpecSettings())
    windows = {name: value for name, value in drafting.items() if name.startswith("window")}
    total = hashlib.sha256(repr((Features(), Cluster(), windows)).encode())
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            # Docstrings, help and messages have spaces; names and keys have none.
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                node.value = ""
        total.update(ast.unparse(tree).encode())
    profiles = sorted((ROOT / "rhyme_openrlhf" / "simulation" / "profiles").glob("*.json"))
    for path in [ROOT / "csrc" / "budget.h", ROOT / "csrc" / "stage.cpp", *profiles]:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def say(words: str) -> None:
    print(words, flush=True)


def main() -> None:
    """Simulate, print, and put the tables where they belong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {
        "rhymerl": rhymerl,
        "rhymerl-batches": rhymerl_batches,
        "rhymerl-models": rhymerl_models,
        "rhymerl-ranks": rhymerl_ranks,
        "pat": pat,
        "pat-others": pat_others,
        "rlhfspec": rlhfspec,
        "rlhfspec-breakdown": rlhfspec_breakdown,
        # These two are made of the tables above.
        "arithmetic": arithmetic,
        "every-figure": every_figure,
    }
    parser.add_argument("--only", choices=sorted(set(tables) - {"arithmetic", "every-figure"}), help="one table")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/papers.md")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("--write makes all tables, so that the page is of one state of the code")
    found: dict[str, Any] = {"kind": "simulated", "seed": SEED}
    for name, table in tables.items():
        if options.only in (None, name):
            text = table(found)
            say(text)
            if options.write:
                put(PAGE, name, text)
    if options.write:
        put(PAGE, "stamp", f"<!-- {stamp()} -->")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
