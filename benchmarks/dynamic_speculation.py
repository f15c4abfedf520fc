"""Ours against vLLM's own dynamic speculation by batch size, with n-gram drafts in both. Measured: a real engine.

    python benchmarks/dynamic_speculation.py --repeats 4 --profile PROFILE --out dynamic_speculation.json

vLLM 0.29's way (`num_speculative_tokens_per_batch_size`) is a table: how many draft tokens for how many running
samples. The user has to make the table. Here it is the best one for this machine and load: every length of LENGTHS is
first measured at every load, in turn. Then two arms take turns on the same engine with the same n-gram proposals:

- vLLM's own scheduling by that table, in whose steps we only count tokens;
- the budget by step times.

Rows, turns, work and draining batch as in `draft_budget.py`. An existing file is extended, with the table that it has.
So the table can be made alone (`--repeats 0`) and the repeats be measured in parts. The profile is of n-gram drafts:
`rhyme profile` with the embedded model's path and options, `--drafting.source ngram` and `--drafting.tokens 16`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from draft_budget import BUDGET, DRAIN, ROWS, RUNNING, Measured, kept, measure, prompts_of, write
from engine_in_process import RunningEngine
from turns import Ratio, Turn, mean_speed, quickest_speed, ratio, usual_speed

from rhyme_openrlhf.latency.profile import read_text
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings

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
    """Return the same length for all loads."""
    return [[1, max(RUNNING), length]]


def best_table(lengths: Measured) -> Table:
    """Return the best length of each measured load (by quickest turns), in vLLM's form.

    Each length holds up to the next load, and the first from one sample on.
    """
    found: Table = []
    for running in (running for running in RUNNING if str(running) in lengths):
        best = max(LENGTHS, key=lambda length: quickest_speed(lengths[str(running)][str(length)]))
        found.append([running if found else 1, max(RUNNING), best])
    for before, after in itertools.pairwise(found):
        before[1] = after[0] - 1
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """Ours / theirs at one load: of all turns, and by the median turn of each part."""

    row: str
    repeats: int
    mean: Ratio
    usual: Ratio


def judge(row: str, arms: dict[str, list[list[Turn]]]) -> Row:
    """Compare the budget with the table."""
    pairs = [(arms[BUDGET], arms[DYNAMIC])]
    return Row(row, len(arms[BUDGET]), ratio(pairs, mean_speed), ratio(pairs, usual_speed))


def table_of(found: Measured) -> str:
    """Tokens per second by row and arm (usual turns), and ours / theirs."""
    rows = [judge(row, found[row]) for row in ROWS if row in found]
    lines = [f"{'running':10s}{BUDGET:>10s}{DYNAMIC:>14s}   ours / theirs by median turns; of all turns"]
    for row in rows:
        ours, theirs = (usual_speed(found[row.row][arm]) for arm in (BUDGET, DYNAMIC))
        usual, of_all = (f"{each.value:.3f} ({each.low:.3f} to {each.high:.3f})" for each in (row.usual, row.mean))
        lines.append(f"{row.row:10s}{ours:10,.0f}{theirs:14,.0f}   {usual}; {of_all}  {row.repeats} repeats")
    for said, figure in (("by median turns", "usual"), ("of all turns", "mean")):
        ratios = {row.row: getattr(row, figure) for row in rows}
        slower = [name for name, one in ratios.items() if one.high < EQUAL]
        unsettled = [name for name, one in ratios.items() if not (one.low >= SETTLED or one.high < EQUAL)]
        loads = [one.value for name, one in ratios.items() if name != DRAIN]
        mean = f"{statistics.fmean(loads):.3f}" if loads else "not measured"
        lines.append(
            f"{said}: slower than the table at {', '.join(slower) or 'no load'}; not settled by these repeats: "
            f"{', '.join(unsettled) or 'no load'}; mean over the loads {mean}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--table-repeats", type=int, default=2, help="of each length at each load, for vLLM's table")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="loads to measure; all if not given")
    parser.add_argument(
        "--profile", type=Path, required=True, help=f"of --drafting.source ngram --drafting.tokens {LONGEST}"
    )
    parser.add_argument("--out", type=Path, default=Path("dynamic_speculation.json"))
    chosen = parser.parse_args()
    prompts, found = prompts_of(), kept(chosen.out)
    speeds = kept(chosen.out, "lengths")
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

        if missing := [row for row in chosen.rows if row != DRAIN and row not in speeds and chosen.table_repeats]:
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
