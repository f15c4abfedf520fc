"""Ours against vLLM's own dynamic speculation by batch size, with n-gram drafts in both. Measured: a real engine.

    python benchmarks/dynamic_speculation.py --repeats 4 --profile PROFILE --out dynamic_speculation.json

vLLM 0.29's way (`num_speculative_tokens_per_batch_size`) is a table: how many draft tokens for how many running
samples. The user has to make it; here it is the best one for this machine and load: every length of LENGTHS is first
measured at every load, in turn. Then, in turn on the same engine with the same n-gram proposals: vLLM's own scheduling
by that table, in whose steps nothing of ours is done but counting tokens, and the budget by step times. Rows, turns,
work and draining batch as in `draft_budget.py`; a file that is there already is added to, with the table that it has,
so the table can be made alone (`--repeats 0`) and the repeats be measured in parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

from draft_budget import BUDGET, DRAIN, ROWS, RUNNING, Speeds, kept, measure, prompts_of, write
from engine_in_process import RunningEngine

from rhyme_openrlhf.config import RhymeSettings
from rhyme_openrlhf.latency.profile import read_text
from rhyme_openrlhf.speculation.settings import DraftingSettings

LENGTHS = (0, 2, 4, 8, 16)
LONGEST = max(LENGTHS)
# All arms generate the same tokens.
TEMPERATURE = 0.0
DYNAMIC = "vLLM, table"
# A load is slower if its 95 % interval ends below this, and open if it reaches from here to below SETTLED.
EQUAL = 1.0
SETTLED = 0.95

Table = list[list[int]]


def every(length: int) -> Table:
    """The same for all loads."""
    return [[1, max(RUNNING), length]]


def best_table(speeds: Speeds) -> Table:
    """The best length of each load that was measured, as vLLM wants it: each holds up to the next load."""
    found = []
    loads = [running for running in RUNNING if str(running) in speeds]
    for number, running in enumerate(loads):
        best = max(LENGTHS, key=lambda length: statistics.fmean(speeds[str(running)][str(length)]))
        last = loads[number + 1] - 1 if number + 1 < len(loads) else running
        found.append([running, last, best])
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """Ours / theirs at one load: the mean of repeats that were measured together, with its 95 % interval; geometric,
    so that a turn at half the machine's speed weighs as much on either side, and with the median of the repeats."""

    row: str
    repeats: int
    ratio: float
    low: float
    high: float
    median: float


def judge(row: str, arms: dict[str, list[float]]) -> Row:
    """The budget against the table."""
    ratios = [math.log(ours / theirs) for ours, theirs in zip(arms[BUDGET], arms[DYNAMIC], strict=True)]
    error = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    mean, median = statistics.fmean(ratios), statistics.median(ratios)
    return Row(row, len(ratios), *map(math.exp, (mean, mean - error, mean + error, median)))


def table_of(found: Speeds) -> str:
    """Tokens per second by row and arm (medians), and ours / theirs."""
    rows = [judge(row, found[row]) for row in ROWS if row in found]
    lines = [f"{'running':10s}{BUDGET:>10s}{DYNAMIC:>14s}   ours / theirs"]
    for row in rows:
        ours, theirs = (statistics.median(found[row.row][arm]) for arm in (BUDGET, DYNAMIC))
        ratio = f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}), median {row.median:.3f}"
        lines.append(f"{row.row:10s}{ours:10,.0f}{theirs:14,.0f}   {ratio}  {row.repeats} repeats")
    slower = [row.row for row in rows if row.high < EQUAL]
    lines.append(f"slower than the table at: {', '.join(slower) or 'no load'}")
    unsettled = [row.row for row in rows if not (row.low >= SETTLED or row.high < EQUAL)]
    lines.append(f"not settled by these repeats: {', '.join(unsettled) or 'no load'}")
    if loads := [row.ratio for row in rows if row.row != DRAIN]:
        lines.append(f"mean over the loads: {statistics.fmean(loads):.3f}")
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--table-repeats", type=int, default=2, help="of each length at each load, for vLLM's table")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="loads to measure; all if not given")
    parser.add_argument(
        "--profile", type=Path, required=True, help=f"rhyme profile --drafting.source ngram --drafting.tokens {LONGEST}"
    )
    parser.add_argument("--out", type=Path, default=Path("dynamic_speculation.json"))
    chosen = parser.parse_args()
    prompts, found = prompts_of(), kept(chosen.out)
    speeds: Speeds = json.loads(chosen.out.read_text())["lengths"] if chosen.out.exists() else {}
    drafting = DraftingSettings(source="ngram", tokens=LONGEST)
    engine = RunningEngine(RhymeSettings(drafting=drafting), scheduler="engine_in_process.DynamicScheduler")
    try:
        if refused := engine.scheduler("install_profile", read_text(chosen.profile)):
            raise SystemExit(refused)
        fixed = {str(length): (every(length),) for length in LENGTHS}

        def save() -> None:
            counters = engine.scheduler("read_counters")
            # vLLM's own way counts neither.
            share = counters["draft_seconds"] / max(counters["busy_seconds"], 1e-9)
            write(chosen.out, found, lengths=speeds, selection_share=share)

        if missing := [row for row in ROWS if row != DRAIN and row not in speeds and chosen.table_repeats]:
            # Fixed lengths have nothing to learn.
            first = [str(max(RUNNING))]
            measure(engine, prompts, chosen.table_repeats, fixed, speeds, save, TEMPERATURE, missing, first)
        table = best_table(speeds)
        print(f"vLLM's table: {table}", flush=True)
        arms: dict[str, Any] = {BUDGET: (None,), DYNAMIC: (table,)}
        if chosen.repeats:
            measure(engine, prompts, chosen.repeats, arms, found, save, TEMPERATURE, chosen.rows)
    finally:
        engine.stop()
    if found:
        print(table_of(found))
        share = json.loads(chosen.out.read_text())["selection_share"]
        print(f"selection, of the budget's step time in the last part of the repeats: {share:.2%}")


if __name__ == "__main__":
    main()
