"""RhymeRL's figures 9 and 13 to 15, and its table by the size of the batch, simulated."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from papers_inputs import EFFICIENCY, H100, NEVER_WAITS, QWEN3_8B, QWEN3_14B, QWEN25_32B, SEED, WITHIN, say
from roofline import roofline

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.scheduling.outliers import ALPHA, beta
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Acceptance, Cluster, Features
from rhyme_openrlhf.simulation.speculation import window_rates
from rhyme_openrlhf.simulation.workload import PRESETS, Workload, drawn

# RhymeRL 7.2.2: 65 % of the draft tokens are accepted at first, 79 % later; 5.1: 75 to 95 % of the tokens recur.
ACCEPTANCE_RATES = (0.65, 0.79)
RECURRING = (0.75, 0.95)
# 6.1: 20 epochs are 300 to 1,000 steps. Figure 3a: the mean length grows tenfold in 320 steps.
STEPS_PER_EPOCH = 16
GROWTH = 10 ** (STEPS_PER_EPOCH / 320)
STEPS = 4 * STEPS_PER_EPOCH
# Table 2's rows, and what it prints for three mathematics and two code data sets, least and most.
TABLE_2 = (
    ("in the predicted group or a shorter one", {8: "79.0 to 85.7 %", 16: "71.6 to 79.7 %"}),
    ("of the others, not among the last 10 %", {8: "12.2 to 16.9 %", 16: "16.8 to 22.8 %"}),
    ("the rest, within beta of the group's history", {8: "0.55 to 0.86 %", 16: "1.02 to 1.47 %"}),
    ("the rest, beyond it: migrated", {8: "1.49 to 3.55 %", 16: "2.47 to 5.08 %"}),
)


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


def moved(result: Result, epoch: int) -> float:
    """Return the share of samples that outliers' rules move. The first `epoch` steps have no rank groups, so none."""
    return sum(result.moves.values()) / sum(step.samples for step in result.steps[epoch:])


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
        shape = dataclasses.replace(PRESETS["rhymerl-math"], within=within, growth=GROWTH)
        load = drawn(shape, steps=STEPS, prompts=256, samples=16, steps_per_epoch=STEPS_PER_EPOCH, seed=SEED)
        cluster = Cluster(nodes=12, devices=8, tensor_parallel=2, trainer_tokens_per_second=NEVER_WAITS)
        # Figure 2: the rollout is 84 to 91 % of a step's time; the trainer is as fast as that says.
        alone = Run(load, cluster, Features(), profiles).go()
        tokens = sum(step.tokens for step in alone.steps) / len(alone.steps)
        cluster = dataclasses.replace(
            cluster, trainer_tokens_per_second=tokens / (alone.rollout_seconds * (1 - 0.875) / 0.875)
        )
        results = [Run(load, cluster, kind(), profiles).go() for kind in kinds.values()]
        columns.append([throughput(result, STEPS_PER_EPOCH) for result in results])
        migrated.append(moved(results[2], STEPS_PER_EPOCH))
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
        share = moved(results[3], warm_up)
        row = {"rollouts": rollouts, "idle": idle, "gains": [one / base for one in others], "migrated": share}
        found["rhymerl-batches"].append(row)
        load_gain, one, two, all_ = row["gains"]
        gains = (f"{gain:.2f}x" for gain in (load_gain, one, two, all_ / two, all_))
        lines.append(f"| {rollouts:,} | {idle:.0%} | {' | '.join(gains)} | {share:.1%} |")
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
    """Figure 9 and table 2, arithmetic on drawn lengths: are responses in the group of their prompt's median?

    The paper does not say of which group a response is among the last 10 %. It may be the predicted one, whose engines
    it keeps busy, or the one to which its length belongs. So both are given.
    """
    lines = [
        "| rank groups | responses | paper | drawn lengths, last of the predicted group | last of its real group |",
        "|---|---|---|---|---|",
    ]
    found["rhymerl-ranks"] = {}
    shape = dataclasses.replace(PRESETS["rhymerl-math"], growth=GROWTH)
    load = drawn(shape, 6 * STEPS_PER_EPOCH, 64, 16, STEPS_PER_EPOCH, SEED)
    for groups in (8, 16):
        shares = [table_2(load, groups, of_predicted) for of_predicted in (True, False)]
        found["rhymerl-ranks"][groups] = {"predicted": shares[0], "real": shares[1]}
        for (name, printed), one, other in zip(TABLE_2, *shares, strict=True):
            lines.append(f"| {groups} | {name} | {printed[groups]} | {one:.2%} | {other:.2%} |")
    return "\n".join(lines)


def table_2(load: Workload, groups: int, of_predicted: bool) -> list[float]:
    """Return the shares of table 2's rows from the second epoch on."""
    by_epoch: dict[int, dict[int, tuple[int, ...]]] = {}
    for step in load.steps:
        by_epoch.setdefault(step.epoch, {}).update({one.prompt: one.lengths for one in step.prompts})
    counts = [0, 0, 0, 0]
    for epoch in sorted(by_epoch)[1:]:
        before = {prompt: statistics.median(lengths) for prompt, lengths in by_epoch[epoch - 1].items()}
        now = by_epoch[epoch]
        ranked = sorted(now, key=before.__getitem__)
        predicted = {prompt: place * groups // len(ranked) for place, prompt in enumerate(ranked)}
        longest = [max(before[prompt] for prompt in ranked if predicted[prompt] == group) for group in range(groups)]
        factor = beta((before[prompt], statistics.median(lengths)) for prompt, lengths in now.items())
        ordered = sorted((length, prompt) for prompt, lengths in now.items() for length in lengths)
        real = [place * groups // len(ordered) for place in range(len(ordered))]
        # How many of a response's group are at most as long, by the order of all.
        group_of = [predicted[prompt] for _, prompt in ordered] if of_predicted else real
        sizes, shorter = Counter(group_of), Counter[int]()
        for (length, prompt), group, where in zip(ordered, group_of, real, strict=True):
            shorter[group] += 1
            last = shorter[group] > (1 - ALPHA) * sizes[group]
            row = 0 if where <= predicted[prompt] else 1 if not last else 2
            counts[row + (row == 2 and length > factor * longest[predicted[prompt]])] += 1
    return [count / sum(counts) for count in counts]


def epochs(result: Result, size: int = 8) -> list[float]:
    """Seconds of each `size` steps, the first ones (warm-up) left out."""
    ends = [step.trained for step in result.steps][size - 1 :: size]
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]
