"""RLHFSpec's section 3.3 and its figures 5 and 11 to 13, simulated or calculated."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from papers_inputs import L40S, LLAMA_8B, NEVER_WAITS, SEED, end_to_end
from roofline import roofline

from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.scheduling.reallocation import EngineLoad, by_threshold
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Acceptance, Cluster, Features
from rhyme_openrlhf.simulation.workload import PRESETS, drawn

# EAGLE's head for LLaMA-8B: a layer, the layer that joins its inputs, and the vocabulary's matrix.
EAGLE_PARAMETERS = 218e6 + 2 * 4096 * 4096 + 128256 * 4096
# RLHFSpec prints neither acceptance nor t_sd: so a band over both.
EAGLE_ACCEPTANCE = (0.6, 0.7, 0.8)
EFFICIENCIES = (0.4, 0.6, 0.8)
# Draft tokens of every sample and step by "Spec" and "Speculative": section 3.2 prints 6 and 24, 7.5 tries 2 to 48.
FIXED_DRAFTS = (6, 16, 24)
MIDDLE = (0.6, 0.7, 16)


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
    # By efficiency, acceptance and the fixed number of draft tokens.
    columns: dict[tuple[float, float, int], list[float]] = {}
    base = Features("sync", interval=0.5, cooldown=20)
    for efficiency in EFFICIENCIES:
        profiles = {1: with_eagle(roofline(LLAMA_8B, L40S, 1, efficiency), efficiency)}

        def seconds(features: Features, profiles: dict[int, Profile] = profiles) -> float:
            steps = Run(load, cluster, features, profiles).go().steps
            # The first epoch drafts nothing.
            return statistics.fmean(step.completed - step.begun for step in steps[1:])

        plain = seconds(base)
        for probability in EAGLE_ACCEPTANCE:
            each = Acceptance(1.0, probability)
            drafting = dataclasses.replace(base, first_acceptance=each, last_acceptance=each, speculation="budget")
            by_load = [plain / seconds(dataclasses.replace(drafting, reallocation=moved)) for moved in (False, True)]
            for drafts in FIXED_DRAFTS:
                fixed = dataclasses.replace(drafting, speculation="window", window_start=drafts, window_max=drafts)
                columns[efficiency, probability, drafts] = [1.0, plain / seconds(fixed), *by_load]
    found["rlhfspec-breakdown"] = [
        {"efficiency": e, "acceptance": p, "drafts": n, "gains": g} for (e, p, n), g in columns.items()
    ]
    lines = [
        "| | paper, against decoding | simulated, against decoding (0.7 accepted, 60 %, 16 drafts) | band |",
        "|---|---|---|---|",
    ]
    names = (("Spec", "1.18x"), ("+ Selection", "1.95x"), ("+ Reallocation", "2.32x"))
    for row, (name, printed) in enumerate(names, start=1):
        values = [gains[row] for gains in columns.values()]
        middle = columns[MIDDLE][row]
        lines.append(f"| {name} | {printed} | {middle:.2f}x | {min(values):.2f} to {max(values):.2f} |")
    against = [gains[3] / gains[1] for gains in columns.values()]
    middle = columns[MIDDLE][3] / columns[MIDDLE][1]
    lines.append(
        f"| all, against Spec (figure 11) | 2.02x LMSYS, 1.97x GSM8K (most) | {middle:.2f}x | "
        f"{min(against):.2f} to {max(against):.2f} |"
    )
    return "\n".join(lines)


def arithmetic(found: dict[str, Any]) -> str:
    """RLHFSpec's figure 12 and section 3.3's reallocation: calculated from printed figures."""
    middle = middle_of(found)
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


def middle_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the breakdown's row in the middle of its band."""
    rows: list[dict[str, Any]] = found["rlhfspec-breakdown"]
    return next(one for one in rows if (one["efficiency"], one["acceptance"], one["drafts"]) == MIDDLE)


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
