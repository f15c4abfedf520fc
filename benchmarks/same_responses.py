"""Are whole responses with drafts distributed like those without? Measured: a real engine, a fixed policy.

    python benchmarks/same_responses.py --rounds 10 --out same_responses.json
    python benchmarks/same_responses.py --earlier 0.8      # drafts from an earlier run of another policy

One engine of the embedded model at temperature 1 has two arms in turn: without drafts, and with drafts from earlier
samples, siblings of the step and the sample's own text. With `--earlier`, the earlier samples are those of an earlier
run, whose policy is this one at another temperature. Each round both arms answer every prompt with a whole prompt
group of eight. Drafts may change only their time. `rhyme verify` tests a single place in a text by chi-square. This
benchmark tests what training sees, over whole responses and whole prompt groups:

- mean reward, and its spread within a prompt group, from which GRPO learns;
- length, and log-probability;
- the length of the common prefix of two samples of a prompt group;
- whether the engine's log-probabilities are those of Transformers.

The unit is one prompt group: the difference of the arms' means, over prompts and rounds, in standard errors. If drafts
change nothing, about one figure in twenty lies beyond 2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draft_budget import histories
from engine_in_process import RunningEngine

from rhyme_openrlhf import embedded
from rhyme_openrlhf.embedded.reward import END, score
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

SAMPLES = 8
MOST_TOKENS = 512
# Drafts of a fixed length, of which 0 is none, or those of a drafter with this largest window, by the fixed rules.
ARMS = {"off": (0, False), "on": (32, True)}
# Responses of each arm whose log-probabilities Transformers computes anew.
CHECKED = 64


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that two responses share at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def figures(group: list[Any], label: str, tokenizer: Any) -> dict[str, float]:
    """Return the figures that training sees of one prompt group: means over its samples, or over pairs of them."""
    texts = [tokenizer.decode(out.token_ids) for out in group]
    rewards = [
        score(text if out.finish_reason == "stop" else text.replace(END, ""), label)
        for text, out in zip(texts, group, strict=True)
    ]
    tokens = [list(out.token_ids) for out in group]
    pairs = list(itertools.combinations(tokens, 2))
    return {
        "reward": statistics.fmean(rewards),
        "reward spread in a prompt group": statistics.pstdev(rewards),
        "prompt groups without spread": float(len(set(rewards)) == 1),
        "length": statistics.fmean(map(len, tokens)),
        "cut off": statistics.fmean(out.finish_reason != "stop" for out in group),
        "log-probability a token": statistics.fmean(
            math.fsum(_log_probabilities(out)) / len(out.token_ids) for out in group
        ),
        "tokens that two samples begin with alike": statistics.fmean(common_prefix(*pair) for pair in pairs),
        "equal pairs": statistics.fmean(one == other for one, other in pairs),
    }


def _log_probabilities(out: Any) -> list[float]:
    return [place[token].logprob for place, token in zip(out.logprobs, out.token_ids, strict=True)]


def worst_log_probability(model: Any, prompts: list[list[int]], outputs: list[Any]) -> tuple[float, float]:
    """Return the largest and the mean difference between the engine's log-probabilities and Transformers'."""
    import torch

    differences = []
    for prompt, out in zip(prompts, outputs, strict=True):
        ids = [*prompt, *out.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
        theirs = torch.log_softmax(logits, -1)[range(len(out.token_ids)), list(out.token_ids)]
        differences += (torch.tensor(_log_probabilities(out)) - theirs).abs().tolist()
    # torch keeps what is not a number; max() may drop it.
    return float(torch.tensor(differences).max()), statistics.fmean(differences)


def table(units: dict[str, list[dict[str, float]]]) -> str:
    """Return a row a figure: its mean in both arms, the difference, and the difference in standard errors."""
    lines = [f"{'':42s}{'off':>10s}{'on':>10s}{'difference':>12s}{'std errors':>12s}"]
    for name in units["off"][0]:
        off, on = ([unit[name] for unit in units[arm]] for arm in ("off", "on"))
        differences = [b - a for a, b in zip(off, on, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        mean = statistics.fmean(differences)
        lines.append(
            f"{name:42s}{statistics.fmean(off):10.4f}{statistics.fmean(on):10.4f}{mean:12.4f}"
            f"{mean / error if error else 0.0:12.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import SamplingParams

    from rhyme_openrlhf.engine.requests import PROMPT_KEY

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--earlier", type=float, default=0.0, metavar="TEMPERATURE", help="draft from an earlier run")
    parser.add_argument("--out", type=Path, default=Path("same_responses.json"))
    chosen = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(embedded.MODEL)
    rows = [json.loads(line) for line in (embedded.DATA / "mixed_train.jsonl").read_text().splitlines()]
    rows = rows[: chosen.prompts]
    prompts = [tokenizer(row["input"], add_special_tokens=False)["input_ids"] for row in rows]
    engine = RunningEngine(RhymeSettings(histospec=HistoSpecSettings()), "engine_in_process.PolicyScheduler")
    units: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    checked: dict[str, list[tuple[list[int], Any]]] = {arm: [] for arm in ARMS}
    before, drafted, from_earlier = {}, dict.fromkeys(ARMS, 0), 0
    try:
        engine.scheduler("prepare", [1], [32], "")
        with tempfile.TemporaryDirectory() as folder:
            histories(engine, prompts, Path(folder), chosen.earlier)
        for turn in range(chosen.rounds):
            for arm in sorted(ARMS, reverse=bool(turn % 2)):
                engine.scheduler("use", *ARMS[arm])
                before = engine.scheduler("read_counters")
                parameters = [
                    SamplingParams(
                        temperature=1,
                        max_tokens=MOST_TOKENS,
                        logprobs=0,
                        skip_special_tokens=False,
                        extra_args={PROMPT_KEY: f"p{number}"},
                    )
                    for number in range(len(prompts))
                    for _ in range(SAMPLES)
                ]
                found = engine.generate([prompt for prompt in prompts for _ in range(SAMPLES)], parameters)
                after = engine.scheduler("read_counters")
                drafted[arm] += after["accepted"] - before["accepted"]
                from_earlier += after["accepted_earlier"] - before["accepted_earlier"]
                for number, row in enumerate(rows):
                    group = found[number * SAMPLES : (number + 1) * SAMPLES]
                    units[arm].append(figures(group, str(row["label"]), tokenizer))
                    if len(checked[arm]) < CHECKED:
                        checked[arm].append((prompts[number], group[turn % SAMPLES]))
            print(
                f"round {turn + 1} of {chosen.rounds}; accepted draft tokens {drafted}, {from_earlier} of them from an "
                "earlier run",
                flush=True,
            )
            if turn:
                print(table(units), flush=True)
    finally:
        engine.stop()
    model = AutoModelForCausalLM.from_pretrained(embedded.MODEL)
    for arm, pairs in checked.items():
        most, mean = worst_log_probability(model.float(), [p for p, _ in pairs], [out for _, out in pairs])
        print(f"{arm}: log-probabilities differ from Transformers' by at most {most:.2e}, in the mean {mean:.2e}")
    chosen.out.write_text(json.dumps({"kind": "measured", "cpus": os.cpu_count(), "units": units}) + "\n")


if __name__ == "__main__":
    main()
