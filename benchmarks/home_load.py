"""The load that one home of samples bears: the run's own actors over stand-in engines. Measured.

    python benchmarks/home_load.py --out home_load.json                    # three sizes, 3 minutes
    python benchmarks/home_load.py --sizes 4096x256 --against ../main      # the same with another tree before
    python benchmarks/home_load.py --sizes 4096x256 --log-probs
    python benchmarks/home_load.py --pickling 512 1024                     # what a step's prompts take to pickle

The home and its front are the product's, in Ray processes of their own, with reallocation on. The tokenizer has
--vocabulary entries, made here at random. The reward function takes --reward-ms milliseconds, in which it sleeps.
Prompts come to the home as OpenRLHF sends them, with 8 samples each; a finished prompt is followed by another.
Stand-ins of engines live in two more processes and are called through Ray as engines are. Each sample gains --rate
tokens a second up to a length between --shortest and --longest tokens. Stand-ins report news, finished samples and
status as an engine does, and refuse to be moved to.

A prompt's next one comes when all of its samples have finished, so that fewer generate than there are at first.

Columns: the mean number of samples that generate; news and tokens heard a second; the shares of one processor that the
home and its fronts take. Then the home's memory, and how late its event loop is. A decision lasts from the request for
reports to the last order; its policy is given in processor time. The last column is a call to the home. Pairs are
medians and 95th percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import inspect
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

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
# How often a prompt is pickled and unpickled for the seconds of a whole step.
PICKLED = 16
# A tree in which each prompt takes the tokenizer along, and the home runs rewards.
WITHOUT_FRONTS = "tokenizer" not in inspect.signature(PlainHomeActor.__init__).parameters
REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep({seconds})
    return {{"rewards": 0.5}}
"""


def a_tokenizer(entries: int) -> Any:
    """Return a tokenizer of this many entries: byte pairs merged at random, as a trained one would be read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chance = random.Random(1)
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(known)}
    merges = []
    while len(known) < entries:
        pair = chance.choice(known), chance.choice(known)
        token = "".join(pair)
        if len(token) <= 12 and token not in vocabulary:
            vocabulary[token] = len(known)
            known.append(token)
            merges.append(pair)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def a_prompt(number: int, tokenizer: Any) -> dict[str, Any]:
    """Return a call for a prompt, as OpenRLHF's generator sends it."""
    return {
        "prompt": f"a prompt of some words, number {number}", "label": "", "max_length": 8192,
        "sampling_params": SamplingParams(temperature=1.0, max_tokens=4096, logprobs=1), "hf_tokenizer": tokenizer,
        "num_samples": OF_A_PROMPT, "images": None,
    }  # fmt: skip


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
        return ray.get_runtime_context().get_node_id()

    def step_times(self) -> str:
        return self._profile

    def start_sample(self, place: str, request: Any, progress: Any = None, *_: Any) -> Started:
        self._here[place] = [time.monotonic(), self._chance.randint(*self._lengths), 0, request]
        return Started()

    def start_samples(self, samples: dict[str, Any]) -> list[Started]:
        return [self.start_sample(place, *one) for place, one in samples.items()]

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

    async def collect(self, wait_s: float, heard: int = 0) -> News:
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

    async def prompts(place: int) -> None:
        number = place
        while True:
            await home.generate_responses.remote(number % engines, **a_prompt(number, tokenizer))
            number += samples // OF_A_PROMPT

    await asyncio.gather(*(prompts(place) for place in range(samples // OF_A_PROMPT)))


def used_by_fronts() -> float:
    """Return the processor seconds that fronts have used, which are among what this process has started."""
    started = psutil.Process().children(recursive=True)
    times = [one.cpu_times() for one in started if "ray::PlainFrontActor" in " ".join(one.cmdline())]
    return sum(time.user + time.system for time in times)


async def measure(home: Any, hosts: list[Any], engines: int, samples: int, options: argparse.Namespace) -> Any:
    """Return one size's figures."""
    tokenizer = a_tokenizer(options.vocabulary) if WITHOUT_FRONTS else None
    await home.open.remote()
    await home.begin_step.remote(1, samples)
    load = asyncio.create_task(keep_busy(home, engines, samples, tokenizer))
    await asyncio.sleep(options.warm_up)
    await home.figures.remote()
    before = await asyncio.gather(*(host.news.remote() for host in hosts))
    used, of_fronts = (await home.figures.remote())["cpu"], used_by_fronts()
    began, calls = time.monotonic(), []
    while time.monotonic() - began < options.seconds:
        asked = time.monotonic()
        await home.unfinished.remote(0)
        calls.append(time.monotonic() - asked)
        await asyncio.sleep(0.1)
    of_fronts = used_by_fronts() - of_fronts
    found = await home.figures.remote()
    wall = time.monotonic() - began
    news = sum(await asyncio.gather(*(host.news.remote() for host in hosts))) - sum(before)
    load.cancel()
    return {
        "tree": options.tree, "samples": samples, "engines": engines, "log_probs": options.log_probs, "wall_s": wall,
        "vocabulary": options.vocabulary, "reward_ms": options.reward_ms,
        "generating": found["tokens"] / wall / options.rate, "news_per_s": news / wall,
        "tokens_per_s": found["tokens"] / wall,
        "share": (found["cpu"] - used) / wall, "fronts": of_fronts / wall, "rss_mb": found["rss"] / 2**20,
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
    reward = Path(tempfile.mkdtemp()) / "reward.py"
    reward.write_text(REWARD.format(seconds=options.reward_ms / 1e3))
    tokenizer = [] if WITHOUT_FRONTS else [[ray.put(a_tokenizer(options.vocabulary))]]
    home = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(TimedHome).remote(
        handles, rhyme, 1, None, str(reward), *tokenizer, recorder
    )
    try:
        return asyncio.run(measure(home, hosts, engines, samples, options))
    finally:
        reward.unlink()
        reward.parent.rmdir()
        for actor in (home, recorder, *hosts):
            ray.kill(actor)


def pickling(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds that a step's prompts take their sender and their receiver, with the tokenizer and without."""
    rows = []
    for tokenizer in (a_tokenizer(options.vocabulary), None):
        sent = [a_prompt(number, tokenizer) for number in range(PICKLED)]
        began = time.process_time()
        packed = [ray.cloudpickle.dumps(one) for one in sent]
        dumped = time.process_time()
        for one in packed:
            pickle.loads(one)
        each = (dumped - began) / PICKLED, (time.process_time() - dumped) / PICKLED
        for prompts in options.pickling:
            carried = "with each prompt" if tokenizer is not None else "once an actor"
            rows.append({"prompts": prompts, "tokenizer": carried, "sender_s": prompts * each[0],
                         "receiver_s": prompts * each[1], "mb": prompts * len(packed[0]) / 1e6})  # fmt: skip
    print("| prompts | tokenizer | sender | receiver | bytes |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['prompts']:,} | {row['tokenizer']} | {row['sender_s']:.2f} s | {row['receiver_s']:.2f} s "
            f"| {row['mb']:,.1f} MB |"
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table; pairs are medians and 95th percentiles."""
    lines = [
        "| tree | samples | generating | engines | log-probs | news/s | tokens/s | home, of a processor | fronts "
        "| memory | loop late | decision | its policy | a call |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        late, decision, policy, call = (
            f"{row[name][0]:.1f}, {row[name][1]:.1f} ms" for name in ("late_ms", "decision_ms", "policy_ms", "call_ms")
        )
        log_probs = "yes" if row["log_probs"] else "no"
        lines.append(
            f"| {row['tree']} | {row['samples']:,} | {row['generating']:,.0f} | {row['engines']} | {log_probs} "
            f"| {row['news_per_s']:.0f} | {row['tokens_per_s']:,.0f} | {row['share']:.0%} | {row['fronts']:.0%} "
            f"| {row['rss_mb']:,.0f} MB | {late} | {decision} | {policy} | {call} |"
        )
    return "\n".join(lines)


def of_another(tree: str) -> list[dict[str, Any]]:
    """Return the same figures of another source tree."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        given = [word for word in sys.argv[1:] if word not in ("--against", tree)]
        command = [sys.executable, __file__, *given, "--tree", "before", "--out", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.path.abspath(tree)})
        found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="SAMPLESxENGINES")
    parser.add_argument("--rate", type=float, default=40.0, help="tokens a second of a sample")
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1800)
    parser.add_argument("--vocabulary", type=int, default=150_000, help="entries of the tokenizer")
    parser.add_argument("--reward-ms", type=float, default=50.0)
    parser.add_argument("--log-probs", action="store_true", help="news and responses with log-probabilities")
    parser.add_argument("--warm-up", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pickling", nargs="+", type=int, metavar="PROMPTS", help="measure nothing but this")
    parser.add_argument("--against", metavar="TREE", help="a checkout that is measured first")
    parser.add_argument("--tree", default="now", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.pickling:
        rows = pickling(options)
    else:
        rows = of_another(options.against) if options.against else []
        start_local_ray(0, 2, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}, log_to_driver=False)
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
