"""The load that one home of samples bears: the run's own actor over stand-in engines. Measured.

    python benchmarks/home_load.py --out home_load.json                    # three sizes, 3 minutes
    python benchmarks/home_load.py --sizes 4096x256 --log-probs

The home is the product's, in a Ray process of its own, with reallocation on. Prompts come to it as OpenRLHF sends
them, with 8 samples each; a finished prompt is followed by another. Stand-ins of engines live in two more processes and
are called through Ray as engines are. Each sample gains --rate tokens a second up to a length between --shortest and
--longest tokens. Stand-ins report news, finished samples and status as an engine does, and refuse to be moved to.

A prompt's next one comes when all of its samples have finished, so that fewer generate than there are at first.

Columns: samples that generate, in the mean; news and tokens heard a second; the home's share of one processor and its
memory; how late its event loop is. A decision lasts from the request for reports to the last order; its policy is given
in processor time. The last column is a call to the home. Pairs are medians and 95th percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil
import ray
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.messages import Grown, News, Started
from rhyme_openrlhf.latency.profile import to_text
from rhyme_openrlhf.moves.home import CALLS_AT_ONCE, PlainHomeActor
from rhyme_openrlhf.platform.local_ray import start_local_ray
from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus, SampleStatus
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.moves import MoveSettings, ReallocationSettings
from rhyme_openrlhf.simulation import engine_kinds

SIZES = ("256x16", "1024x64", "4096x256")
OF_A_PROMPT = 8
PROCESSES = 2
LAG_S = 0.02
SEATS = 64


class StandIn:
    """One engine without a model."""

    def __init__(self, number: int, rate: float, lengths: tuple[int, int], log_probs: bool, profile: str) -> None:
        self._number, self._rate, self._lengths = number, rate, lengths
        self._log_probs, self._profile = log_probs, profile
        self._chance = random.Random(number)
        # By place: when it began, its length, and how many tokens were told.
        self._here: dict[str, list[Any]] = {}
        self.told = 0
        self._next = 0.0

    def node_id(self) -> str:
        return "here"

    def step_times(self) -> str:
        return self._profile

    def start_sample(self, place: str, request: Any, progress: Any = None, *_: Any) -> Started:
        self._here[place] = [time.monotonic(), self._chance.randint(*self._lengths), 0, request]
        return Started()

    def discard_sample(self, place: str) -> None:
        self._here.pop(place, None)

    def hold_room(self, room: str, tokens: int) -> str:
        return "a stand-in takes no samples"

    def release_room(self, room: str) -> None:
        pass

    def kv_layout(self) -> str:
        return "a stand-in has no KV cache"

    def _made(self, begun: float) -> int:
        return int((time.monotonic() - begun) * self._rate)

    def _tokens(self, first: int, end: int) -> tuple[list[int], Any]:
        tokens = [5 + place % 90 for place in range(first, end)]
        return tokens, [{token: Logprob(-0.1, 1, None)} for token in tokens] if self._log_probs else None

    async def collect(self, wait_s: float) -> News:
        until = time.monotonic() + wait_s
        while True:
            ended = [place for place, (begun, length, *_) in self._here.items() if self._made(begun) >= length]
            ends = [begun + length / self._rate for begun, length, *_ in self._here.values()]
            left = min([until, *ends]) - time.monotonic()
            if ended or left <= 0:
                break
            # A sample that comes meanwhile is no shorter than the shortest.
            await asyncio.sleep(min(left, self._lengths[0] / self._rate))
        finished: dict[str, Any] = {}
        for place in ended:
            _, length, _, request = self._here.pop(place)
            tokens, log_probs = self._tokens(0, length)
            response = CompletionOutput(0, "", tokens, None, log_probs, "stop")
            finished[place] = RequestOutput(place, None, list(request.prompt), None, [response], True)
        grown = {}
        for place, sample in self._here.items():
            first, sample[2] = sample[2], self._made(sample[0])
            tokens, log_probs = self._tokens(first, sample[2])
            grown[place] = Grown(first, tuple(tokens), log_probs)
        self.told += 1
        return News(finished, grown, 1, True)

    def status(self) -> EngineStatus:
        samples = tuple(SampleStatus(place, 50 + self._made(one[0])) for place, one in self._here.items())
        tokens = sum(sample.context for sample in samples)
        mean = DecodeMean(len(samples), tokens, 0.0, 0.03) if samples else None
        steps = int(time.monotonic() / 0.03)
        return EngineStatus(self._number, samples, 10**6, SEATS - len(samples), 1, True, steps, 2048, 0.0, 1.0, mean)


class StandIns:
    """Some of them in one process."""

    def __init__(self, numbers: Sequence[int], *settings: Any) -> None:
        self._engines = {number: StandIn(number, *settings) for number in numbers}

    async def call(self, number: int, name: str, *arguments: Any) -> Any:
        answer = getattr(self._engines[number], name)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer

    def news(self) -> int:
        """Return how much news the engines have told so far."""
        return sum(engine.told for engine in self._engines.values())


@dataclasses.dataclass(frozen=True)
class Handle:
    """One stand-in, as the home calls an engine's actor."""

    process: Any
    number: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self.process, self.number, name)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a stand-in."""

    process: Any
    number: int
    name: str

    def remote(self, *arguments: Any) -> Any:
        return self.process.call.remote(self.number, self.name, *arguments)


class Recorder:
    """Takes the home's events."""

    def write(self, *_: Any) -> None:
        pass


class TimedHome(PlainHomeActor):
    """The run's home, which notes how late its loop is and how long decisions take."""

    async def open(self) -> None:
        """Begin to listen, and to measure."""
        await super().open()
        self._late: list[float] = []
        self._heard: list[float] = []
        self._looked: list[float] = []
        self._tokens = 0
        self._process = psutil.Process()
        self._measuring = asyncio.create_task(self._lag())
        assert self._watch is not None and self._watch._reallocator is not None
        reports, reallocator, keeper = self._watch.reports, self._watch._reallocator, self._keeper
        hear, look, listen = reports.hear, reallocator.look, keeper._hear

        async def timed_hear() -> None:
            began = time.perf_counter()
            await hear()
            self._heard.append(time.perf_counter() - began)

        def timed_look() -> None:
            began = time.thread_time()
            look()
            self._looked.append(time.thread_time() - began)

        def counted_hear(news: News, known: Any) -> None:
            self._tokens += sum(len(grown.tokens) for grown in news.grown.values())
            listen(news, known)

        reports.hear, reallocator.look, keeper._hear = timed_hear, timed_look, counted_hear  # type: ignore[method-assign]

    async def _lag(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(LAG_S)
            self._late.append(time.perf_counter() - began - LAG_S)

    async def figures(self) -> dict[str, Any]:
        """Return what was noted since the last call."""
        used = self._process.cpu_times()
        found = {
            "cpu": used.user + used.system, "rss": self._process.memory_info().rss, "tokens": self._tokens,
            "late": self._late, "heard": self._heard, "looked": self._looked,
        }  # fmt: skip
        self._tokens, self._late, self._heard, self._looked = 0, [], [], []
        return found


def high(values: Sequence[float], share: float = 0.95) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


async def keep_busy(home: Any, engines: int, samples: int, tokenizer: Any) -> None:
    """Keep `samples` at the home, in prompts of OF_A_PROMPT, for ever."""
    parameters = SamplingParams(temperature=1.0, max_tokens=4096, logprobs=1)

    async def prompts(place: int) -> None:
        number = place
        while True:
            await home.generate_responses.remote(
                number % engines, prompt=f"a prompt of some words, number {number}", label="", max_length=8192,
                sampling_params=parameters, hf_tokenizer=tokenizer, num_samples=OF_A_PROMPT,
            )  # fmt: skip
            number += samples // OF_A_PROMPT

    await asyncio.gather(*(prompts(place) for place in range(samples // OF_A_PROMPT)))


async def measure(home: Any, hosts: list[Any], engines: int, samples: int, options: argparse.Namespace) -> Any:
    """Return one size's figures."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded.MODEL)
    await home.open.remote()
    await home.begin_step.remote(1, samples)
    load = asyncio.create_task(keep_busy(home, engines, samples, tokenizer))
    await asyncio.sleep(options.warm_up)
    await home.figures.remote()
    before = await asyncio.gather(*(host.news.remote() for host in hosts))
    used = (await home.figures.remote())["cpu"]
    began, calls = time.monotonic(), []
    while time.monotonic() - began < options.seconds:
        asked = time.monotonic()
        await home.unfinished.remote(0)
        calls.append(time.monotonic() - asked)
        await asyncio.sleep(0.1)
    found = await home.figures.remote()
    wall = time.monotonic() - began
    news = sum(await asyncio.gather(*(host.news.remote() for host in hosts))) - sum(before)
    load.cancel()
    return {
        "samples": samples, "engines": engines, "log_probs": options.log_probs, "wall_s": wall,
        "generating": found["tokens"] / wall / options.rate, "news_per_s": news / wall,
        "tokens_per_s": found["tokens"] / wall,
        "share": (found["cpu"] - used) / wall, "rss_mb": found["rss"] / 2**20,
        "late_ms": [1e3 * high(found["late"], 0.5), 1e3 * high(found["late"])],
        "decision_ms": [1e3 * high(found["heard"], 0.5), 1e3 * high(found["heard"])],
        "policy_ms": [1e3 * high(found["looked"], 0.5), 1e3 * high(found["looked"])],
        "call_ms": [1e3 * statistics.median(calls), 1e3 * high(calls)],
    }  # fmt: skip


def run(samples: int, engines: int, options: argparse.Namespace) -> Any:
    """Start a home and its stand-ins, and measure them."""
    profile = to_text(engine_kinds.load(["pat-a40"])[2])
    settings = options.rate, (options.shortest, options.longest), options.log_probs, profile
    parts = [range(engines)[first::PROCESSES] for first in range(PROCESSES)]
    hosts = [ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(StandIns).remote(part, *settings) for part in parts]
    recorder = ray.remote(num_cpus=0)(Recorder).remote()
    handles = [Handle(hosts[number % PROCESSES], number) for number in range(engines)]
    rhyme = dataclasses.replace(
        RhymeSettings(), move=MoveSettings(enable=True), reallocation=ReallocationSettings(enable=True)
    )
    home = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(TimedHome).remote(
        handles, rhyme, 1, None, None, recorder
    )
    try:
        return asyncio.run(measure(home, hosts, engines, samples, options))
    finally:
        for actor in (home, recorder, *hosts):
            ray.kill(actor)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table; pairs are medians and 95th percentiles."""
    lines = [
        "| samples | generating | engines | log-probs | news/s | tokens/s | one processor | memory | loop late "
        "| decision | its policy | a call |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        late, decision, policy, call = (
            f"{row[name][0]:.1f}, {row[name][1]:.1f} ms" for name in ("late_ms", "decision_ms", "policy_ms", "call_ms")
        )
        log_probs = "yes" if row["log_probs"] else "no"
        log_probs = "yes" if row["log_probs"] else "no"
        lines.append(
            f"| {row['samples']:,} | {row['generating']:,.0f} | {row['engines']} | {log_probs} "
            f"| {row['news_per_s']:.0f} | {row['tokens_per_s']:,.0f} | {row['share']:.0%} "
            f"| {row['rss_mb']:,.0f} MB | {late} | {decision} | {policy} | {call} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="SAMPLESxENGINES")
    parser.add_argument("--rate", type=float, default=40.0, help="tokens a second of a sample")
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1800)
    parser.add_argument("--log-probs", action="store_true", help="news and responses with log-probabilities")
    parser.add_argument("--warm-up", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out")
    options = parser.parse_args()
    start_local_ray(0, 2, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}, log_to_driver=False)
    rows = []
    for size in options.sizes:
        samples, engines = map(int, size.split("x"))
        rows.append(run(samples, engines, options))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    if options.out:
        with open(options.out, "w") as out:
            json.dump({"kind": "measured", "cpus": os.cpu_count(), "rows": rows}, out, indent=1)


if __name__ == "__main__":
    main()
