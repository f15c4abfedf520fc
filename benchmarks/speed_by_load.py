"""Are drafts faster than an engine without them, at every number of running samples? Measured: real engines.

    python benchmarks/speed_by_load.py --running 1 8 32 128 512 --out speed_by_load.json [-- options of rhyme train]

The engines are those of `rhyme verify`. One drafts, or one for each of --runners. One more is
the run's with --no-histospec.enable, with all that vLLM then chooses (model runner, asynchronous scheduling). At each
load all generate the same number of samples, in turn. The history is what the same weights answered before, so the
ratio is an upper bound for training. Without options: the demo's model and prompts; on a GPU engines use CUDA graphs.
Engines plan their drafts by step times that are measured at their start, as a run without a profile does
(--latency.profile none: the fixed rules). The file is written after each load.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rhyme_openrlhf.cli import demo, train_arguments
from rhyme_openrlhf.engine.messages import Answer, Request
from rhyme_openrlhf.engine.port import MeasuredEngine
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import QUICKLY, Plan
from rhyme_openrlhf.latency.measure import measure as measure_steps
from rhyme_openrlhf.platform import run_gpus
from rhyme_openrlhf.settings.drafting import HISTORY, V1, V2_ASYNC
from rhyme_openrlhf.settings.engine import EngineSettings
from rhyme_openrlhf.settings.latency import NONE
from rhyme_openrlhf.telemetry.metrics import MS_PER_SECOND
from rhyme_openrlhf.telemetry.run_directory import versions
from rhyme_openrlhf.verify.bench import Prompt, installed
from rhyme_openrlhf.verify.engines import CALL_SECONDS, Engine, EnginePool
from rhyme_openrlhf.verify.speed import Round, compare, draft_index, timed

LOADS = (1, 8, 32, 128, 512)
PROMPTS = 12
# Samples of each prompt in its history.
HISTORY_SAMPLES = 8
# Draft tokens for every sample of the largest load would need 33 rows each; this many are verified together.
BATCHED_TOKENS = 8192


def requests(prompts: Sequence[Prompt], running: int, tokens: int, *, drafts: bool) -> list[Request]:
    """Return `running` requests, over all prompts in turn, at temperature 1."""
    of = [number % len(prompts) for number in range(running)]
    return [Request(prompts[n].tokens, tokens, 1.0, history=f"load-{n}" if drafts else "") for n in of]


def histories(prompts: Sequence[Prompt], answers: Sequence[Answer], context: int) -> dict[str, Any]:
    """Return the draft index of each prompt by its name; `answers` are in the order of `requests`."""
    return {f"load-{n}": draft_index(prompt, answers[n :: len(prompts)], context) for n, prompt in enumerate(prompts)}


def planned(engine: Engine) -> dict[str, Any]:
    """Let an engine plan its drafts by its own step times; return them as a profile's JSON."""
    measured = MeasuredEngine(engine.actor, CALL_SECONDS)
    text = profiles.to_text(measure_steps(Plan.of(measured, versions(), QUICKLY), measured))
    if refused := measured.install_profile(text):
        raise SystemExit(refused)
    profile: dict[str, Any] = json.loads(text)
    return profile


def measure(
    plain: Engine, drafting: Mapping[str, Engine], prompts: Sequence[Prompt], running: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Return the figures of one load by the runner that drafts: all engines in turn, after one round that is not
    counted.
    """
    without: list[Round] = []
    found: dict[str, list[Round]] = {runner: [] for runner in drafting}
    for _ in range(rounds + 1):
        without.append(timed(plain, requests(prompts, running, tokens, drafts=False))[0])
        for runner, engine in drafting.items():
            found[runner].append(timed(engine, requests(prompts, running, tokens, drafts=True))[0])
    return [
        {"running": running, "runner": runner, "rounds": rounds, "draft_ms": draft_ms(own[1:])}
        | dataclasses.asdict(compare(without[1:], own[1:]))
        for runner, own in found.items()
    ]


def draft_ms(rounds: Sequence[Round]) -> float:
    """Return the milliseconds that drafting took in a decode step, on the host."""
    steps = sum(one.counters.decode_steps for one in rounds)
    return MS_PER_SECOND * sum(one.counters.draft_seconds for one in rounds) / max(steps, 1)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=LOADS, help="samples that run at once")
    parser.add_argument("--runners", nargs="+", choices=(V1, V2_ASYNC), help="that draft (on a GPU v2-async, else v1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="at most, of each sample")
    parser.add_argument("--seconds", type=float, default=3600, help="no load begins after this time")
    parser.add_argument("--out", type=Path, default=Path("speed_by_load.json"))
    parser.add_argument("options", nargs="*", help="options of rhyme train, after --")
    chosen = parser.parse_args()
    until = time.monotonic() + chosen.seconds
    gpus = run_gpus()
    checked = train_arguments.check(
        chosen.options or demo.arguments("unused", gpus, cuda_graphs=gpus > 0), lambda said: print(said, flush=True)
    )
    from rhyme_openrlhf.cli import preflight_data

    prompts = [Prompt(text, tuple(tokens)) for text, tokens in preflight_data.some_prompts(checked.args, PROMPTS)]
    tokens = min(chosen.tokens, checked.args.data.max_len - max(len(prompt.tokens) for prompt in prompts))
    room = EngineSettings(max_num_seqs=max(chosen.running), max_num_batched_tokens=BATCHED_TOKENS)
    drafting = checked.settings.drafting
    runners = chosen.runners or ((V2_ASYNC,) if gpus and drafting.source == HISTORY else (V1,))
    pool = EnginePool(checked.args, dataclasses.replace(checked.settings, engine=room), checked.on_gpus)
    try:
        arms = [None, *(dataclasses.replace(drafting, runner=runner) for runner in runners)]
        plain, *engines = pool.side_by_side(pool.run_dtype, arms)
        speculating = dict(zip(runners, engines, strict=True))
        print(f"without drafts: {plain.facts.words}", flush=True)
        answers = timed(plain, requests(prompts, HISTORY_SAMPLES * len(prompts), tokens, drafts=False))[1]
        indexes = histories(prompts, answers, checked.settings.histospec.prefix_max)
        profiles_of = {}
        for runner, engine in speculating.items() if checked.settings.latency.profile != NONE else ():
            print(f"step times with {runner}", flush=True)
            profiles_of[runner] = planned(engine)
        facts = {"plain": plain.facts} | {runner: engine.facts for runner, engine in speculating.items()}
        found: dict[str, Any] = {"kind": "measured", "gpus": gpus, "loads": [], "profiles": profiles_of}
        found["engines"] = {name: dataclasses.asdict(fact) for name, fact in facts.items()}
        with contextlib.ExitStack() as histories_of:
            for engine in engines:
                histories_of.enter_context(installed(engine, indexes))
            for running in chosen.running:
                if time.monotonic() > until:
                    print(f"no time is left for {running} running samples", flush=True)
                    break
                loads = measure(plain, speculating, prompts, running, tokens, chosen.rounds)
                found["loads"].extend(loads)
                chosen.out.write_text(json.dumps(found, indent=1) + "\n")
                for load in loads:
                    speeds = load["speculating_tokens_per_second"], load["plain_tokens_per_second"]
                    said = f"{speeds[0]:,.0f} tokens/s with drafts, {speeds[1]:,.0f} without: {load['ratio']:.2f} times"
                    print(f"{running:4d} running, {load['runner']}: {said}", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
