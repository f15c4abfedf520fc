"""Gain of going on with more tensor parallelism in the tail. Real engines, on this machine's clock or another's.

    python benchmarks/tp_switch.py --out tp-switch.json                   # long-tailed lengths, and uniform ones
    python benchmarks/tp_switch.py --layers 12 --hidden 768 --repeats 4   # another size of model
    python benchmarks/tp_switch.py --paced pat-a40 --slower 4 --samples 128 --longest 300 --loads pat uniform

Measured: two engines of one core each, and one of tensor parallelism two over both cores, all started once. The
weights are random, because only times are measured.

Paced (emulated): engines of the embedded model whose steps take the times of the profiles of two sizes, stretched by
`--slower`, so that this machine keeps up. There are as many engines of each size as 8 devices have. The lateness of
steps is counted.

Every sample is exactly as long as its place in the load says, in every arm. The policy knows the length of the same
prompt's response `before`, which is off by up to a quarter either way. Arms are interleaved: without switches, with the
policy, and `oracle`. The oracle knows every length and switches once, at the best number of samples left by the step
times.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from movable_engines import LocalEngine
from switch_bench import Stage
from switch_decisions import Replay, Response

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.calls import MeasuringCalls
from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import StepShape
from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.scheduling.tp_switch import EACH_SECONDS
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.engine import CpuSettings
from rhyme_openrlhf.settings.latency import EmulateSettings
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings
from rhyme_openrlhf.simulation.engine_kinds import load
from rhyme_openrlhf.simulation.workload import PRESETS

PROMPT = 32
DEVICES = 8
ARMS = ("without", "with", "oracle")
LOADS = ("tail", "pat", "uniform")


@dataclass(frozen=True)
class Machine:
    """Engines of both layouts, aligned ones first, and what their steps take."""

    plan: LayoutPlan
    engines: list[LocalEngine]
    profiles: tuple[Profile, Profile]


def make_model(folder: Path, layers: int, hidden: int) -> int:
    """Make a model of the embedded one's kind with random weights; return its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(embedded.MODEL)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = layers, hidden, 3 * hidden
    config.head_dim, config.num_attention_heads, config.num_key_value_heads = 64, hidden // 64, max(hidden // 192, 2)
    config.layer_types, config.max_window_layers = ["full_attention"] * layers, layers
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded.MODEL).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def settings(kv_mb: int, pace: str = "") -> RhymeSettings:
    """Return settings without drafts, so that each sample is as long in steps as in tokens."""
    return dataclasses.replace(
        RhymeSettings(),
        histospec=HistoSpecSettings(own_output=False, siblings=False),
        drafting=DraftingSettings(probe_share=0),
        emulate=EmulateSettings(profile=pace),
        cpu=CpuSettings(kv_cache_mb=kv_mb),
    )


def measured(folder: Path, options: argparse.Namespace) -> Machine:
    """Return two engines of one core and one of both."""
    (folder / "model").mkdir()
    weights = make_model(folder / "model", options.layers, options.hidden)
    print(f"{weights / 1e6:.0f} M random weights", flush=True)
    length = max(1024, options.longest + PROMPT + 1)
    engines = [
        LocalEngine(number, settings(512), length, 16, 3, str(folder / "model"), size)
        for number, size in enumerate((1, 1, 2))
    ]
    return Machine(LayoutPlan(2, 1, (Tail(1, 2),)), engines, (profiled(engines[0]), profiled(engines[2])))


def paced(folder: Path, options: argparse.Namespace) -> Machine:
    """Return as many engines as 8 devices have, each on the clock of its size."""
    given = load(options.paced)
    sizes = sorted(given)
    plan = LayoutPlan(DEVICES // sizes[0], sizes[0], (Tail(DEVICES // sizes[1], sizes[1]),))
    found = []
    for size in sizes:
        found.append(slowed(given[size], options.slower))
        profiles.write(found[-1], folder / f"{size}.json")
    layouts = plan.layouts()
    engines = [
        LocalEngine(
            number, settings(128, str(folder / f"{sizes[layout]}.json")), 1024, options.samples + 1, len(layouts)
        )
        for number, layout in layouts.items()
    ]
    return Machine(plan, engines, (found[0], found[1]))


def slowed(profile: Profile, factor: float) -> Profile:
    """Return the profile with every time multiplied by `slower`."""
    return dataclasses.replace(
        profile,
        steps=tuple(dataclasses.replace(point, seconds=factor * point.seconds) for point in profile.steps),
        prefills=tuple(dataclasses.replace(point, seconds=factor * point.seconds) for point in profile.prefills),
    )


def profiled(engine: LocalEngine) -> Profile:
    """Plain decode steps of an engine that has the machine to itself."""

    async def main() -> Profile:
        steps = []
        for count in (1, 2, 4, 8):
            for context in (64, 256):
                found = await engine.call(MeasuringCalls.decode_steps, StepShape(count, context, 0), 8)
                tokens = round(statistics.fmean(step[1] for step in found))
                took = statistics.median(step[3] for step in found)
                steps.append(StepPoint(count, tokens, 0, took, 0.0, len(found)))
        return Profile(await engine.call(MeasuringCalls.subject), "measured", tuple(steps))

    return asyncio.run(main())


def lengths(kind: str, samples: int, longest: int, chance: random.Random) -> list[int]:
    """Tokens of each sample. `tail`: most are short and two run on; `pat`: PAT's, whose 16K are `longest` here;
    `uniform`: all are as long.
    """
    if kind == "uniform":
        return [longest // 2] * samples
    if kind == "pat":
        shape = PRESETS["pat-deepscaler"]
        scale = longest / shape.longest
        drawn = [chance.lognormvariate(0.0, shape.sigma) * shape.median for _ in range(samples)]
        return [max(round(scale * min(length, shape.longest)), 2) for length in drawn]
    short = [round(longest * chance.uniform(0.08, 0.2)) for _ in range(samples - 2)]
    return [*short, round(0.6 * longest), longest]


def best_left(machine: Machine, of: list[int]) -> int:
    """Samples left at which one switch makes the stage shortest, by step times and every length; 0: never."""
    engines = machine.plan.engines
    dealt = [[Response(i, PROMPT, n, ()) for i, n in enumerate(of) if i % engines == e] for e in range(engines)]
    replay = Replay(dealt, machine.profiles, machine.plan.tails[0].engines, EACH_SECONDS)
    took = {0: replay.seconds}
    for moment in (0.0, *replay.ends()):
        left = len(replay.unfinished(moment)[0])
        if left:
            took[left] = replay.switched(moment)
    return min(took, key=lambda left: took[left])


async def late_seconds(machine: Machine) -> list[float]:
    """Return by how much each engine's steps took longer than its pace so far."""
    return [float(await engine.scheduler("late_seconds")) for engine in machine.engines]


def repeat_load(machine: Machine, folder: Path, kind: str, repeat: int, options: argparse.Namespace) -> list[Any]:
    """Run all arms of one load, with the same samples."""
    from vllm import SamplingParams

    chance = random.Random(1000 * repeat + LOADS.index(kind))
    of = lengths(kind, options.samples, options.longest, chance)
    before = {f"p{i}": (round(n * chance.uniform(0.75, 1.25)),) * 2 for i, n in enumerate(of)}
    prompts = [tuple(chance.randrange(5, 100) for _ in range(PROMPT)) for _ in of]
    best, rows, answers = best_left(machine, of), [], []
    for arm in ARMS if repeat % 2 else ARMS[::-1]:
        if arm == "oracle" and not best:
            continue
        requests = []
        for place, (prompt, tokens) in enumerate(zip(prompts, of, strict=True)):
            parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            parameters.detokenize = False
            requests.append(SampleRequest(prompt, parameters, f"p{place}"))
        samples = best if arm == "oracle" else 0
        asked = TpSwitchSettings(enable=arm != "without", samples=samples, status_s=0.1)
        late = asyncio.run(late_seconds(machine))
        stage = Stage(machine.engines, machine.plan, folder, asked, machine.profiles)
        row = asyncio.run(stage.run(requests, before))
        came_late = [now - then for now, then in zip(asyncio.run(late_seconds(machine)), late, strict=True)]
        answers.append(row.pop("tokens"))
        rows.append({"load": kind, "arm": arm, "repeat": repeat, "best": best, "late_s": max(came_late), **row})
        print(json.dumps({name: value for name, value in rows[-1].items() if name != "moves"}), flush=True)
    rows[-1]["equal"] = all(answer == answers[0] for answer in answers)
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all arms of all loads, interleaved."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rhyme-benchmark-") as name:
        folder = Path(name)
        (folder / "kv").mkdir()
        machine = paced(folder, options) if options.paced else measured(folder, options)
        try:
            for profile in machine.profiles:
                size = profile.subject.tensor_parallel_size
                print(f"TP {size}: " + ", ".join(f"{p.running} x: {1e3 * p.seconds:.1f} ms" for p in profile.steps))
            for repeat in range(options.repeats):
                for kind in options.loads:
                    rows += repeat_load(machine, folder / "kv", kind, repeat, options)
        finally:
            for engine in machine.engines:
                engine.stop()
    return {"rows": rows, **table(rows)}


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Stages by load and arm, and ratios repeat by repeat.

    `switch_share`: of the stage, seconds that its last sample was without a token for the switch: what it cost.
    """
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(row["load"] for row in rows):
        took = {
            arm: {row["repeat"]: row["seconds"] for row in rows if (row["load"], row["arm"]) == (kind, arm)}
            for arm in ARMS
        }
        ratios = {arm: [took["without"][repeat] / seconds for repeat, seconds in took[arm].items()] for arm in ARMS[1:]}
        switched = [row for row in rows if (row["load"], row["arm"]) == (kind, "with")]
        lost = [max((downtime or 0 for downtime, _ in row["moves"]), default=0) / row["seconds"] for row in switched]
        found[kind] = {
            "seconds": {arm: statistics.median(of.values()) for arm, of in took.items() if of},
            "ratio": {arm: statistics.median(of) for arm, of in ratios.items() if of}, "ratios": ratios,
            "switches": [[(s["samples"], s["seconds"]) for s in row["switches"]] for row in switched],
            "switch_share": lost, "equal": [row["equal"] for row in rows if row["load"] == kind and "equal" in row],
        }  # fmt: skip
        print(f"{kind}: " + json.dumps(found[kind]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tp-switch.json"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--longest", type=int, default=160, help="tokens of the longest sample")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["tail", "uniform"])
    parser.add_argument("--paced", nargs="+", default=[], help="profiles of two sizes, or a shipped name")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="with --paced: every step takes longer by this factor"
    )
    options = parser.parse_args()
    kind = "emulated" if options.paced else "measured"
    conditions = {"kind": kind, "cpus": os.cpu_count(), "load_average": os.getloadavg()}
    options.out.write_text(json.dumps({**conditions, **measure(options)}) + "\n")


if __name__ == "__main__":
    main()
