"""Does the budget choose as well as the best fixed draft length would, at every load? Measured: a real engine.

    python benchmarks/draft_budget.py --repeats 6 --profile PROFILE --out draft_budget.json

An existing file is extended, so that the repeats can be measured in parts; `--rows 16 drain` measures some of the loads
only.

One engine, one workload: the embedded task's prompts, with drafts from earlier samples of the same prompts at
temperature 1. Two kinds of arms take turns:

- The budget, once with at most as many draft tokens a sample as the default of `--histospec.window_max` says, and once
  with as many as the longest fixed length.
- Fixed draft lengths n that bypass window and confidence (as long as history matches, up to n) and measure nothing for
  themselves.

The figures are tokens per second, for each number of running samples and for a whole batch that drains. The number of
running samples stays constant, because a new sample starts for each that finishes. Every arm gets the same prompts in
the same order, and the same number of them at each load. Otherwise a quick arm would meet other prompts than a slow
one, and the speed of drafting a response varies by several times from prompt to prompt.

With `--temperature 0` all arms generate the same tokens, so that only time and drafting differ. At 1, as in training,
responses differ by chance. The best n of a row is chosen on every other repeat and compared on the others. All costs of
drafting are included.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from engine_in_process import RunningEngine
from turns import Ratio, Turn, mean_speed, ratio, usual_speed

from rhyme_openrlhf import embedded
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.latency.profile import read_text
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

RUNNING = (1, 2, 4, 8, 16, 32, 64)
FIXED = (0, 2, 4, 8, 16, 32, 48)
# The budget's most draft tokens of a sample: the default, and the longest fixed length.
WINDOWS = (HistoSpecSettings().window_max, max(FIXED))
BUDGET = "budget"
LONGER = f"budget {WINDOWS[1]}"
DRAIN = "drain"
ROWS = (*map(str, RUNNING), DRAIN)
PROMPTS = 16
# Earlier samples of a prompt that are its history, as in a run with eight samples a prompt.
HISTORY = 8
MOST_TOKENS = 300
# Samples that a turn adds for each running one, beside those still running at its end. So turns take about as long at
# all loads, unless they need more prompts than there are.
SAMPLES_EACH = 2
# Loads of the turns that are not counted: code is compiled, caches are filled, and the budget learns what is accepted.
FIRST = ("64", "8")
EMPTY_SECONDS = 30.0


def histories(engine: RunningEngine, prompts: list[list[int]], folder: Path) -> None:
    """Sample the history of every prompt, and install it in every arm's drafter."""
    from vllm import SamplingParams

    parameters = [SamplingParams(temperature=1.0, max_tokens=MOST_TOKENS) for _ in prompts for _ in range(HISTORY)]
    found = engine.generate([prompt for prompt in prompts for _ in range(HISTORY)], parameters)
    for number, prompt in enumerate(prompts):
        mine = found[number * HISTORY : (number + 1) * HISTORY]
        rewards = [float(out.finish_reason == "stop") for out in mine]
        pieces = [Piece(prompt[-16:], list(out.token_ids), reward) for out, reward in zip(mine, rewards, strict=True)]
        path = folder / f"{number}.index"
        build_index(pieces).tofile(path)
        if refused := engine.scheduler("install_everywhere", f"p{number}", str(path)):
            raise SystemExit(refused)


def parameters_of(number: int, temperature: float) -> Any:
    """Return the sampling parameters of one more sample of prompt `number`."""
    from vllm import SamplingParams

    from rhyme_openrlhf.engine.requests import PROMPT_KEY

    extra = {PROMPT_KEY: f"p{number % PROMPTS}"}
    return SamplingParams(
        temperature=temperature, max_tokens=MOST_TOKENS, detokenize=False, logprobs=0, extra_args=extra
    )


def parts_of(running: int) -> list[range]:
    """Return the samples that each turn of a repeat begins, by number: together those of every prompt, or as many as
    run.
    """
    each = min(SAMPLES_EACH * running, max(PROMPTS, running))
    return [range(first, first + each + running) for first in range(0, max(PROMPTS, running), each)]


def steady(
    engine: RunningEngine, prompts: list[list[int]], running: int, samples: Iterable[int], temperature: float
) -> Turn:
    """`running` samples are kept running, until none of `samples` is left to begin."""
    numbers = iter(samples)
    begun = time.monotonic()

    async def stream() -> float:
        for number in numbers:
            await engine.one(prompts[number % PROMPTS], parameters_of(number, temperature))
        return time.monotonic()

    async def until_one_is_done() -> tuple[int, float]:
        streams = [asyncio.ensure_future(stream()) for _ in range(running)]
        await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        counters, now = await engine.ask("read_counters"), time.monotonic()
        # vLLM aborts what nobody waits for.
        for one in streams:
            one.cancel()
        return int(counters["response_tokens"]), now

    before = engine.scheduler("read_counters")["response_tokens"]
    after, ended = engine.call(until_one_is_done())
    wait_until_empty(engine)
    return Turn(after - before, ended - begun)


def wait_until_empty(engine: RunningEngine) -> None:
    """Wait until no sample runs. Raises TimeoutError."""
    until = time.monotonic() + EMPTY_SECONDS
    while engine.scheduler("output_lengths"):
        if time.monotonic() > until:
            raise TimeoutError(f"waited {EMPTY_SECONDS:g} s for the engine's samples to be aborted")
        time.sleep(0.01)


def drain(engine: RunningEngine, prompts: list[list[int]], temperature: float) -> Turn:
    """Run a batch of the most samples, from its start until the last one is finished."""
    began = time.monotonic()
    lanes = range(max(RUNNING))
    found = engine.call(_all([engine.one(prompts[n % PROMPTS], parameters_of(n, temperature)) for n in lanes]))
    return Turn(sum(len(out.token_ids) for out in found), time.monotonic() - began)


async def _all(coroutines: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))


# The turns of each repeat, by row and arm.
Measured = dict[str, dict[str, list[list[Turn]]]]


def measure(
    engine: RunningEngine,
    prompts: list[list[int]],
    repeats: int,
    arms: dict[str, Any],
    found: Measured,
    save: Callable[[], None],
    temperature: float,
    rows: Sequence[str] = ROWS,
    first: Sequence[str] = FIRST,
) -> None:
    """Add repeats to `found`; the arms in turn, in another order at each part.

    `arms`: of each name what the scheduler's `use` takes; `save` is called after each row; `first`: loads of the turns
    that are not counted.
    """
    chance = random.Random(sum(len(made) for by_arm in found.values() for made in by_arm.values()))
    for repeat in range(repeats + 1):
        for row in rows if repeat else first:
            turns: dict[str, list[Turn]] = {arm: [] for arm in sorted(arms)}
            for samples in (range(0),) if row == DRAIN else parts_of(int(row)):
                for arm in chance.sample(sorted(arms), len(arms)):
                    engine.scheduler("use", *arms[arm])
                    if row == DRAIN:
                        turns[arm].append(drain(engine, prompts, temperature))
                    else:
                        turns[arm].append(steady(engine, prompts, int(row), samples, temperature))
            if repeat:
                # Of all arms or of none: they are compared repeat by repeat.
                for arm, mine in turns.items():
                    found.setdefault(row, {}).setdefault(arm, []).append(mine)
                save()
            said = ", ".join(f"{arm} {mean_speed([mine]):,.0f}" for arm, mine in turns.items())
            print(f"repeat {repeat} of {repeats}, {row} running: {said}", flush=True)


def kept(path: Path, name: str = "rows") -> Measured:
    """Return what an earlier part of the repeats measured."""
    rows = json.loads(path.read_text())[name] if path.exists() else {}
    return {
        row: {arm: [[Turn(*turn) for turn in parts] for parts in repeats] for arm, repeats in by_arm.items()}
        for row, by_arm in rows.items()
    }


def write(path: Path, found: Measured, **more: Any) -> None:
    """Write the file that `kept` reads."""
    path.write_text(json.dumps({"kind": "measured", "cpus": os.cpu_count(), **more, "rows": found}) + "\n")


def prompts_of(most: int = PROMPTS) -> list[list[int]]:
    """Return the longest prompts, whose responses are longest: samples that end at once would leave no steps to
    compare.
    """
    from transformers import AutoTokenizer

    rows = [json.loads(line) for line in (embedded.DATA / "mixed_train.jsonl").read_text().splitlines()]
    texts = sorted((row["input"] for row in rows), key=len)[-most:]
    tokenizer = AutoTokenizer.from_pretrained(embedded.MODEL)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@dataclasses.dataclass(frozen=True)
class Row:
    """One load: the best fixed length, and the budget's tokens per second as a share of its: of all turns, and by the
    median turn of each part."""

    row: str
    best: str
    mean: Ratio
    usual: Ratio


def judge(row: str, arms: dict[str, list[list[Turn]]], ours_is: str = BUDGET) -> Row:
    """Compare the best fixed length of the even repeats with a budget on the odd ones, and the other way round."""
    found = []
    bests: list[str] = []
    for speed in (mean_speed, usual_speed):
        pairs = []
        for half in (0, 1):
            best = max(map(str, FIXED), key=lambda arm: speed(arms[arm][half::2]))
            bests.append(best)
            others = slice(1 - half, None, 2)
            pairs.append((arms[ours_is][others], arms[best][others]))
        found.append(ratio(pairs, speed))
    return Row(row, "/".join(dict.fromkeys(bests)), *found)


def table(found: Measured) -> str:
    """Tokens per second by row and arm (usual turns), and the budgets against the best fixed length."""
    lengths, budgets = [str(n) for n in FIXED], (BUDGET, LONGER)
    heads = "".join(f"{head:>10s}" for head in (*("n=" + arm for arm in lengths), *budgets))
    lines = [f"running {heads}"]
    judged: dict[str, list[Row]] = {budget: [] for budget in budgets}
    for row in filter(found.__contains__, ROWS):
        by_arm = found[row]
        cells = "".join(f"{usual_speed(by_arm[arm]):10,.0f}" for arm in (*lengths, *budgets))
        lines.append(f"{row:8s}{cells}  {len(by_arm[BUDGET])} repeats")
        for budget in budgets:
            one = judge(row, by_arm, budget)
            judged[budget].append(one)
            of_all, usual = (f"{each.value:.3f} ({each.low:.3f} to {each.high:.3f})" for each in (one.mean, one.usual))
            lines.append(f"    {budget} / n={one.best}: of all turns {of_all}, by median turns {usual}")
    for budget, rows in judged.items():
        loads = [row for row in rows if row.row != DRAIN]
        if loads:
            of_all, usual = (statistics.fmean(getattr(row, way).value for row in loads) for way in ("mean", "usual"))
            lines.append(f"{budget}: mean over the loads {of_all:.3f}, by median turns {usual:.3f}")
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6, help="even, so that both halves are alike")
    parser.add_argument("--profile", type=Path, required=True, help="made by rhyme profile, of the embedded model here")
    parser.add_argument("--temperature", type=float, default=0.0, help="of what is generated; of the history it is 1")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="loads to measure; all if not given")
    parser.add_argument("--out", type=Path, default=Path("draft_budget.json"))
    chosen = parser.parse_args()
    prompts = prompts_of()
    settings = RhymeSettings(histospec=HistoSpecSettings(siblings=False, shared_tokens=0, window_max=max(WINDOWS)))
    engine = RunningEngine(settings, scheduler="engine_in_process.PolicyScheduler")
    try:
        engine.scheduler("prepare", [n for n in FIXED if n], list(WINDOWS), read_text(chosen.profile))
        with tempfile.TemporaryDirectory() as folder:
            histories(engine, prompts, Path(folder))
        found = kept(chosen.out)
        arms = {str(n): (n, False) for n in FIXED}
        arms |= {arm: (window, True) for arm, window in zip((BUDGET, LONGER), WINDOWS, strict=True)}
        save = functools.partial(write, chosen.out, found)
        # Of few loads all that is to be learnt is learnt there.
        first = FIRST if len(chosen.rows) > 2 else chosen.rows
        measure(engine, prompts, chosen.repeats, arms, found, save, chosen.temperature, chosen.rows, first)
    finally:
        engine.stop()
    if all(len(by_arm[BUDGET]) > 1 for by_arm in found.values()):
        print(table(found))


if __name__ == "__main__":
    main()
