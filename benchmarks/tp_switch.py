"""What does going on with more tensor parallelism gain in the tail? Real engines of a random model on this machine.

    python benchmarks/tp_switch.py --out tp-switch.json                   # long-tailed lengths, and uniform ones
    python benchmarks/tp_switch.py --layers 12 --hidden 768 --repeats 4   # another size of model

Two engines of one core each, and one of tensor parallelism two over both cores, all started once. The weights are
random: only times are measured. Every sample is exactly as long as its place in the load says, in every arm; what the
policy knows is how long the same prompt was answered `before`, which is off by up to a quarter either way. Arms are
interleaved: without switches, with the policy, and `oracle`: one switch at the number of samples left that is best by
the measured step times when every length is known.
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
import time
from pathlib import Path
from typing import Any

from movable_engines import LocalEngine

from rhyme_openrlhf import embedded
from rhyme_openrlhf.config import CpuSettings, DraftingSettings, HistoSpecSettings, RhymeSettings
from rhyme_openrlhf.latency.grid import StepShape
from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.rollout.moves.engine_reports import EngineReports
from rhyme_openrlhf.rollout.moves.home import ASK_AFTER_SECONDS
from rhyme_openrlhf.rollout.moves.keeper import SampleKeeper
from rhyme_openrlhf.rollout.moves.kv_buffer import KvBufferStore
from rhyme_openrlhf.rollout.moves.layout_switcher import LayoutSwitcher
from rhyme_openrlhf.rollout.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.rollout.moves.travel import SampleRequest
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, Phase
from rhyme_openrlhf.scheduling.tp_switch_settings import TpSwitchSettings

PLAN = LayoutPlan(2, 1, 1, 2)
PROMPT = 32
LIMIT_S = 60.0
ARMS = ("without", "with", "oracle")


def make_model(folder: Path, layers: int, hidden: int) -> int:
    """A model of the embedded one's kind with random weights; returns how many it has."""
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


def settings() -> RhymeSettings:
    """No drafts, so that each sample is as long in steps as in tokens."""
    return dataclasses.replace(
        RhymeSettings(),
        histospec=HistoSpecSettings(own_output=False, siblings=False),
        drafting=DraftingSettings(probe_share=0),
        cpu=CpuSettings(kv_cache_mb=512),
    )


def profiled(engine: LocalEngine, running: list[int]) -> Profile:
    """Plain decode steps of an engine that has the machine to itself."""

    async def main() -> Profile:
        steps = []
        for count in running:
            for context in (64, 256):
                found = await engine.call("decode_steps", StepShape(count, context, 0), 8)
                tokens = round(statistics.fmean(step[1] for step in found))
                took = statistics.median(step[3] for step in found)
                steps.append(StepPoint(count, tokens, 0, took, 0.0, len(found)))
        return Profile(await engine.call("subject"), "measured", tuple(steps))

    return asyncio.run(main())


def lengths(kind: str, samples: int, longest: int, chance: random.Random) -> list[int]:
    """Tokens of each sample. `tail`: most are short and two run on; `uniform`: all are as long."""
    if kind == "uniform":
        return [longest // 2] * samples
    short = [round(longest * chance.uniform(0.08, 0.2)) for _ in range(samples - 2)]
    return [*short, round(0.6 * longest), longest]


def best_left(profiles: tuple[Profile, Profile], of: list[int], each_s: float) -> int:
    """Samples left at which one switch makes the stage shortest, by step times and every length; 0: never."""
    from rhyme_openrlhf.latency.predictor import Predictor
    from rhyme_openrlhf.latency.step_model import StepModel

    one, two = (Predictor(StepModel(profile)) for profile in profiles)

    def stage(left: int) -> float:
        seconds, switched = 0.0, False
        for token in range(max(of)):
            alive = [number for number, length in enumerate(of) if length > token]
            if not switched and len(alive) <= left:
                switched, seconds = True, seconds + each_s * len(alive)
            if switched:
                seconds += two.step_seconds(len(alive), len(alive) * (PROMPT + token), 0)
            else:
                most = max(sum(number % 2 == engine for number in alive) for engine in range(2))
                seconds += one.step_seconds(most, most * (PROMPT + token), 0)
        return seconds

    return min(range(len(of) + 1), key=stage)


class Switcher(LayoutSwitcher):
    """The product's, which is not told by what ends a sample here how long the rest may become."""

    allowed = 0

    def longest_allowed(self, samples: Any) -> int:
        """As in a run: more than any sample needs."""
        return self.allowed


class Stage:
    """One rollout stage: keeper, mover and switcher over the engines."""

    def __init__(self, engines: list[LocalEngine], folder: Path, asked: TpSwitchSettings, profiles: Any) -> None:
        self.keeper = SampleKeeper(dict(enumerate(engines)), 0.2, spare=[2])
        self.records: list[MoveRecord] = []
        self.switches: list[Any] = []
        store = KvBufferStore(folder)
        self.mover = Mover(
            self.keeper, store, lambda *_: Choice(KV_TRANSFER), LIMIT_S, self.records.append, ASK_AFTER_SECONDS
        )
        self.reports = EngineReports(self.keeper, asked.status_s, print, PLAN.layouts())
        for layout, profile in enumerate(profiles):
            self.reports.install(profile, layout)
        self.switcher = Switcher(
            asked, PLAN, self.keeper, self.reports, self.move, self.switches.append, lambda: 1, lambda: self.came
        )
        self.switcher.place(dict.fromkeys(range(3), "here"))
        self.came = False
        self._interval_s = asked.status_s if asked.enable else 0.0

    async def move(self, sample: int, destination: int, cause: str) -> str:
        """As the samples' home."""
        done = await self.mover.move(self.keeper.sample(str(sample)), destination, cause)
        return {Phase.RUNNING: "moved", Phase.RECOMPUTED: "recomputed"}.get(done.move.phase, "failed")

    async def watch(self) -> None:
        """As the samples' home."""
        while self._interval_s:
            await asyncio.sleep(self._interval_s)
            await self.reports.hear()
            self.switcher.look()

    async def run(self, requests: list[SampleRequest], before: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        """Generate all; seconds and switches."""
        self.keeper.start()
        self.switcher.know_lengths(before)
        self.switcher.allowed = 2 * max(length for known in before.values() for length in known)
        loop = asyncio.create_task(self.watch())
        began = time.monotonic()
        running = [asyncio.create_task(self.keeper.generate(one, place % 2)) for place, one in enumerate(requests)]
        await asyncio.sleep(0.3)
        self.came = True
        outputs = await asyncio.gather(*running)
        seconds = time.monotonic() - began
        loop.cancel()
        self.switcher.stop()
        self.reports.stop()
        self.keeper.stop()
        return {
            "seconds": seconds, "switches": [dataclasses.asdict(event) for event in self.switches],
            "downtimes": [record.downtime for record in self.records],
            "tokens": [list(output.outputs[0].token_ids) for output, _ in outputs],
        }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms of all loads, interleaved."""
    from vllm import SamplingParams

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rhyme-benchmark-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "kv").mkdir()
        weights = make_model(folder / "model", options.layers, options.hidden)
        print(f"{weights / 1e6:.0f} M random weights", flush=True)
        engines = [
            LocalEngine(number, settings(), 1024, 16, str(folder / "model"), size)
            for number, size in enumerate((1, 1, 2))
        ]
        try:
            profiles = profiled(engines[0], [1, 2, 4, 8]), profiled(engines[2], [1, 2, 4, 8])
            for size, profile in zip((1, 2), profiles, strict=True):
                print(f"TP {size}: " + ", ".join(f"{p.running} x: {1e3 * p.seconds:.1f} ms" for p in profile.steps))
            chance = random.Random(1)
            for repeat in range(options.repeats):
                for kind in options.loads:
                    of = lengths(kind, options.samples, options.longest, chance)
                    before = {f"p{i}": (round(n * chance.uniform(0.75, 1.25)),) * 2 for i, n in enumerate(of)}
                    prompts = [tuple(chance.randrange(5, 100) for _ in range(PROMPT)) for _ in of]
                    best = best_left(profiles, of, 0.02)
                    answers = []
                    for arm in ARMS if repeat % 2 else ARMS[::-1]:
                        samples = best if arm == "oracle" else 0
                        if arm == "oracle" and not best:
                            continue
                        asked = TpSwitchSettings(enable=arm != "without", samples=samples, status_s=0.1)
                        requests = []
                        for place, (prompt, tokens) in enumerate(zip(prompts, of, strict=True)):
                            parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                            parameters.detokenize = False
                            requests.append(SampleRequest(prompt, parameters, f"p{place}"))
                        row = asyncio.run(Stage(engines, folder / "kv", asked, profiles).run(requests, before))
                        answers.append(row.pop("tokens"))
                        rows.append({"load": kind, "arm": arm, "repeat": repeat, "best": best, **row})
                        print(json.dumps(rows[-1]), flush=True)
                    rows[-1]["equal"] = all(answer == answers[0] for answer in answers)
        finally:
            for engine in engines:
                engine.stop()
    return {"weights": weights, "rows": rows, **table(rows)}


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Stages by load and arm, and ratios repeat by repeat."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(row["load"] for row in rows):
        took = {
            arm: {row["repeat"]: row["seconds"] for row in rows if (row["load"], row["arm"]) == (kind, arm)}
            for arm in ARMS
        }
        ratios = {arm: [took["without"][repeat] / seconds for repeat, seconds in took[arm].items()] for arm in ARMS[1:]}
        switched = [row for row in rows if (row["load"], row["arm"]) == (kind, "with")]
        lost = [sum(t or 0 for t in row["downtimes"]) / row["seconds"] for row in switched]
        found[kind] = {
            "seconds": {arm: statistics.median(of.values()) for arm, of in took.items() if of},
            "ratio": {arm: statistics.median(of) for arm, of in ratios.items() if of}, "ratios": ratios,
            "switches": [len(row["switches"]) for row in switched], "samples_downtime_share": lost,
            "equal": [row["equal"] for row in rows if row["load"] == kind and "equal" in row],
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
    parser.add_argument("--loads", nargs="+", choices=("tail", "uniform"), default=["tail", "uniform"])
    options = parser.parse_args()
    conditions = {"kind": "measured", "cpus": os.cpu_count(), "load_average": os.getloadavg()}
    options.out.write_text(json.dumps({**conditions, **measure(options)}) + "\n")


if __name__ == "__main__":
    main()
