"""The load of a run of many nodes on each of its own processes: its real parts over stand-in engines. Measured.

    python benchmarks/stand_in_cluster.py --out stand_in_cluster.json          # 2, 8 and 64 nodes, 10 minutes
    python benchmarks/stand_in_cluster.py --nodes 64 --tokens 2048 --rate 60

The trainer's samples generator, the samples' home, a history worker for each node, the recorder, the supervisor, the
summary and the trainer's side of the weight buffer are real. Stand-ins are engines, policy ranks and nodes' stores of
weights: many of each live in one process and are called through Ray as actors are.
Each node has 8 engines and 8 ranks. An engine has 2 prompts of 16 samples a step, so 64 nodes have 16,384 samples.
Tokens are drawn; a sample gains --rate tokens a second up to a length around --tokens. No model computes anything.

The first step warms up; the figures are of the second. Seconds are processor seconds of each process in this step: with
everything on one machine, time on the clock says nothing. Those of the trainer are also given by path. Of the history
workers a worker's mean is given, because on a cluster each has a node. The fronts are one process here: it is divided
by the nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray
from home_load import Handle as ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.platform import shims
from rhyme_openrlhf.platform.local_ray import start_local_ray
from rhyme_openrlhf.prompt_keys import owner
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.history import HistorySettings
from rhyme_openrlhf.settings.moves import MoveSettings
from rhyme_openrlhf.telemetry.services import RunServices

OF_A_NODE, PROMPTS, SAMPLES = 8, 2, 16
CALLS_AT_ONCE = 1_000_000
# Of all stand-ins of a kind.
PROCESSES = 4
MB = 2**20


class Used:
    """An actor that says what its process has used."""

    def used(self) -> tuple[float, float]:
        """Return the processor seconds of this process so far, and its memory in MB."""
        return used(psutil.Process())


class Process(Used):
    """Objects of one process, each called by its number."""

    objects: dict[int, Any]

    async def call(self, number: int, name: str, *arguments: Any) -> Any:
        """Return what a method of an object returns."""
        answer = getattr(self.objects[number], name)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer


def used(process: psutil.Process) -> tuple[float, float]:
    times, memory = process.cpu_times(), process.memory_full_info()
    return times.user + times.system, memory.uss / MB


@dataclasses.dataclass(frozen=True)
class Handle(ActorHandle):
    """One object of a process, as an actor's handle with an identity."""

    @property
    def _actor_id(self) -> bytes:
        return f"engine {self.number}".encode()


def node_name(number: int) -> str:
    """Return a node's name in the form of Ray's."""
    return f"{number:056x}"


class Engine:
    """An engine without a model."""

    def __init__(self, number: int, workers: Sequence[Handle], rate: float, tokens: int) -> None:
        self._number, self._workers, self._rate, self._tokens = number, workers, rate, tokens
        self._chance = random.Random(number)
        self._drawn = [self._chance.randrange(150_000) for _ in range(1 << 16)]
        # By place: when it began, its length, how many tokens were told, its request and where its tokens begin.
        self._here: dict[str, list[Any]] = {}
        self._indexed: set[str] = set()
        self._asking: set[asyncio.Task[Any]] = set()
        self._finished = self._made_tokens = 0

    def node_id(self) -> str:
        # The real one: fronts start there.
        return ray.get_runtime_context().get_node_id()

    def node_ids(self) -> list[str]:
        return [node_name(self._number // OF_A_NODE)]

    def alive(self) -> None:
        return

    def get_num_unfinished_requests(self) -> int:
        return len(self._here)

    def trace_prompts(self, keys: list[str]) -> None:
        return

    def load_weights(self, segment: Any) -> float:
        self._indexed.clear()
        return 1.0

    def begin_rollout(self) -> None:
        self._finished = self._made_tokens = 0

    def start_sample(self, place: str, request: Any, progress: Any = None, *_: Any) -> Any:
        from rhyme_openrlhf.engine.messages import Started

        length = max(16, int(self._chance.lognormvariate(0.0, 0.5) * self._tokens))
        self._here[place] = [time.monotonic(), length, 0, request, self._chance.randrange(1 << 15)]
        if request.history and request.history not in self._indexed:
            self._indexed.add(request.history)
            task = asyncio.get_running_loop().create_task(self._ask(request.history))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        return Started()

    async def _ask(self, key: str) -> None:
        await self._workers[owner(key, len(self._workers))].index.remote(key)

    def start_samples(self, samples: dict[str, Any]) -> list[Any]:
        return [self.start_sample(place, *one) for place, one in samples.items()]

    def discard_sample(self, place: str) -> None:
        self._here.pop(place, None)

    def _drawn_tokens(self, first: int, end: int, offset: int) -> list[int]:
        return [self._drawn[(offset + place) & 0xFFFF] for place in range(first, end)]

    def _made(self, begun: float) -> int:
        return int((time.monotonic() - begun) * self._rate)

    async def collect(self, wait_s: float, heard: int = 0) -> Any:
        from vllm.outputs import CompletionOutput, RequestOutput

        from rhyme_openrlhf.engine.messages import Grown, News

        until = time.monotonic() + wait_s
        while True:
            ended = [place for place, (begun, length, *_) in self._here.items() if self._made(begun) >= length]
            if ended or time.monotonic() >= until:
                break
            # As an engine, which hands on what finished in the next of its own looks.
            await asyncio.sleep(0.1)
        finished: dict[str, Any] = {}
        for place in ended:
            _, length, _, request, offset = self._here.pop(place)
            response = CompletionOutput(0, "", self._drawn_tokens(0, length, offset), None, None, "stop")
            finished[place] = RequestOutput(place, None, list(request.prompt), None, [response], True)
            self._finished += 1
            self._made_tokens += length
        grown = {}
        for place, sample in self._here.items():
            first, sample[2] = sample[2], self._made(sample[0])
            grown[place] = Grown(first, tuple(self._drawn_tokens(first, sample[2], sample[4])), None)
        return News(finished, grown, 1, True)

    def _counters(self) -> Any:
        from rhyme_openrlhf.telemetry.metrics import EngineCounters

        running = sum(self._made(one[0]) for one in self._here.values())
        tokens = self._made_tokens + running
        return EngineCounters(tokens, tokens, tokens // 16, tokens, 100, tokens // 4, tokens, tokens // 2,
                              tokens / 1000, 0.1, self._finished)  # fmt: skip

    def progress(self) -> dict[str, Any]:
        from rhyme_openrlhf.telemetry.engine_events import KV_CACHE, RUNNING, SLOWEST

        return {**self._counters().to_dict(), RUNNING: len(self._here), KV_CACHE: 0.5, SLOWEST: None}

    def rollout_report(self, started: float, ended: float) -> dict[str, Any]:
        from rhyme_openrlhf.engine.actor_parts.timeline import TimelineInterval

        middle = (started + ended) / 2
        intervals = [
            TimelineInterval("generate", started, middle, "", 1),
            TimelineInterval("idle", middle, ended, "tail", 1),
        ]
        return {
            "counters": self._counters().to_dict(), "intervals": intervals, "weight_version": 1, "problems": [],
            "decisions": {}, "gain": {},
        }  # fmt: skip


class Engines(Process):
    def __init__(self, numbers: Sequence[int], *settings: Any) -> None:
        self.objects = {number: Engine(number, *settings) for number in numbers}


class HistoryWorkers(Process):
    """Real ones."""

    def __init__(self, places: Sequence[Any]) -> None:
        from rhyme_openrlhf.history.worker import PlainHistoryWorker

        self.objects = {place.number: PlainHistoryWorker(place) for place in places}


class Rank:
    """A rank of the policy without a model; the first one's plan of `tensors` tensors is everybody's."""

    def __init__(self, number: int, tensors: int) -> None:
        self._number, self._tensors = number, tensors

    def weight_node(self) -> str:
        return node_name(self._number // OF_A_NODE)

    def weight_buckets(self) -> Any:
        from rhyme_openrlhf.weights.buckets import Parameter, plan_buckets

        name = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
        described = [
            Parameter(name.format(n // 128, n % 128), (2048, 768), "bfloat16", 3 * MB) for n in range(self._tensors)
        ]
        return plan_buckets(described, 512 * MB, OF_A_NODE)

    def write_buckets(self, mine: list[int]) -> None:
        return

    def publish_weights(self, segment: Any) -> None:
        return


class Ranks(Process):
    def __init__(self, numbers: Sequence[int], tensors: int) -> None:
        self.objects = {number: Rank(number, tensors) for number in numbers}


class Store:
    """A node's store without memory."""

    def begin(self, version: int) -> Any:
        from rhyme_openrlhf.weights.buckets import Segment

        return Segment(version, f"/dev/shm/rhyme-weights-1234567-{version}")

    def close(self) -> None:
        return


class Stores(Process):
    def __init__(self, nodes: int) -> None:
        self.objects = {number: Store() for number in range(nodes)}


class Driver(Used):
    """The driver of a run: it supervises the run and sums it up."""

    def __init__(self, run: Path, recorder: Any, engines: Sequence[Handle]) -> None:
        from rhyme_openrlhf.run import launch, supervisor
        from rhyme_openrlhf.settings.run import LimitSettings
        from rhyme_openrlhf.telemetry.run_directory import RunDirectory

        rows = [
            supervisor.ActorRow(engine._actor_id.hex(), f"engine {engine.number}", 1, "node", True, 0, "")
            for engine in engines
        ]
        supervisor.read_actors = lambda known: rows  # type: ignore[assignment]

        def record(event: Any) -> None:
            recorder.write.remote(event, "driver", time.time())

        directory = RunDirectory(run)
        self._supervisor = supervisor.Supervisor(directory.events, run, LimitSettings(), record, print, True, recorder)
        for engine in engines:
            self._supervisor.name(engine, f"engine {engine.number}", engine=True)
        self._supervisor.start()
        self._figures = launch._Figures(directory)

    def end(self) -> float:
        """Return the seconds until the summary is there."""
        began = time.perf_counter()
        self._supervisor.stop()
        self._figures.stop()
        return time.perf_counter() - began


@dataclasses.dataclass
class Cluster:
    """The processes of one size, by name, and what the trainer needs of them."""

    processes: dict[str, list[Any]]
    engines: list[Handle]
    workers: tuple[Handle, ...]
    ranks: list[Handle]
    recorder: Any
    driver: Any


def start(nodes: int, run: Path, options: argparse.Namespace) -> Cluster:
    """Start all processes but the trainer, which is this one, and the home, which the trainer starts."""
    from rhyme_openrlhf.history.worker import GB, WorkerPlace
    from rhyme_openrlhf.telemetry.recorder import PlainRecorder
    from rhyme_openrlhf.weights import stores

    class Recorder(PlainRecorder, Used):
        """The real one."""

    def many(kind: type, *arguments: Any) -> Any:
        return ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(kind).remote(*arguments)

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    recorder = (
        ray.remote(num_cpus=0)(Recorder)
        .options(name=f"recorder of {nodes}", scheduling_strategy=here)
        .remote(str(run / "events.jsonl"))
    )
    settings = HistorySettings(cpus_per_worker=0, memory_gb=options.history_gb)
    places = [
        WorkerPlace(
            number, nodes, run / f"{number}.journal", b"t" * 16, (), int(options.history_gb * GB), run / "spilled",
            settings, f"recorder of {nodes}",
        )
        for number in range(nodes)
    ]  # fmt: skip
    of_workers = [many(HistoryWorkers, part) for first in range(PROCESSES) if (part := places[first::PROCESSES])]
    workers = tuple(Handle(of_workers[number % PROCESSES], number) for number in range(nodes))
    numbers = range(nodes * OF_A_NODE)
    of_engines = [
        many(Engines, numbers[first::PROCESSES], workers, options.rate, options.tokens) for first in range(PROCESSES)
    ]
    of_ranks, of_stores = many(Ranks, numbers, options.tensors), many(Stores, nodes)
    engines = [Handle(of_engines[number % PROCESSES], number) for number in numbers]

    def store_on(scheduling_strategy: Any) -> Any:
        number = int(scheduling_strategy.node_id, 16)
        return SimpleNamespace(remote=lambda plan: Handle(of_stores, number))

    stores.NodeWeights = SimpleNamespace(options=store_on)  # type: ignore[assignment]
    driver = ray.remote(num_cpus=0)(Driver).remote(run, recorder, engines)
    return Cluster(
        {
            "recorder": [recorder], "driver": [driver], "history workers": of_workers, "engines": of_engines,
            "ranks and stores": [of_ranks, of_stores],
        },
        engines, workers, [Handle(of_ranks, number) for number in numbers], recorder, driver,
    )  # fmt: skip


class Trainer:
    """The trainer's own part of a step. `seconds`: processor seconds of this process by path, of the last step."""

    def __init__(self, cluster: Cluster, nodes: int, options: argparse.Namespace) -> None:
        from rhyme_openrlhf.training.samples_generator import RhymeSamplesGenerator
        from rhyme_openrlhf.weights.sync import WeightSync

        self.cluster = cluster
        prompts = nodes * OF_A_NODE * PROMPTS
        args = SimpleNamespace(
            rollout=SimpleNamespace(batch_size=prompts, n_samples_per_prompt=SAMPLES, vllm_generate_batch_size=None),
            vllm=SimpleNamespace(enable_sleep=False),
            algo=SimpleNamespace(
                dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level="off")
            ),
            train=SimpleNamespace(seed=1, agent_func_path=None),
            reward=SimpleNamespace(remote_url=None),
        )  # fmt: skip
        settings = dataclasses.replace(RhymeSettings(), move=MoveSettings(enable=True))
        self.services = RunServices(settings, cluster.recorder, cluster.workers, None, "", False, None, None)  # type: ignore
        # Of two steps.
        rows = [
            (None, [f"word {number} of a prompt " * 20], [""], [None]) for _ in range(2) for number in range(prompts)
        ]
        self.generator = RhymeSamplesGenerator(
            strategy=SimpleNamespace(args=args), prompts_dataloader=rows, eval_dataloader=None,
            tokenizer=tokenizer(options.vocabulary), vllm_engines=cluster.engines, services=self.services,
        )  # fmt: skip
        self.generator.start_home()
        self.weights = WeightSync(SimpleNamespace(_actor_handlers=cluster.ranks), cluster.engines, self.services)
        self.seconds: dict[str, float] = {}
        self._sent: list[Any] = []

    @contextmanager
    def path(self, name: str) -> Iterator[None]:
        """Note what this process uses within the block."""
        before = time.process_time()
        yield
        self.seconds[name] = time.process_time() - before

    def step(self, number: int) -> int:
        """Do a step; return its tokens."""
        import torch

        from rhyme_openrlhf.training.experience import by_worker

        with self.path("generate: dispatch, responses, report"):
            samples = self.generator.generate_samples(max_len=65_536, max_new_tokens=32_768)[0]
        assert len(samples) == len(self.cluster.engines) * PROMPTS * SAMPLES
        for place, sample in enumerate(samples):
            sample.info["reward"] = torch.tensor([float(place % 2)])
        with self.path("responses to the history workers"):
            shares = by_worker(samples, len(self.cluster.workers), 16)
            self._sent = [self.cluster.workers[one].record.remote(number, of_one) for one, of_one in shares.items()]
        with self.path("weights: control messages"):
            self.weights.sync(number)
        # Their work goes on in the background of a run; here it is this step's.
        ray.get(self._sent)
        return sum(int(sample.response_length) for sample in samples)


def tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of this many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[UNK]", *(f"w{n:06d}" for n in range(vocabulary - 1))])}
    made = Tokenizer(models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[UNK]", eos_token="[UNK]")


def home_processes(home: Any) -> tuple[psutil.Process, psutil.Process]:
    """Return the home's process and that of its front."""
    own = ray.get(home.__ray_call__.remote(lambda _: os.getpid()))
    named = (one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"])
    (front,) = (one for one in named if one.info["cmdline"][0].startswith("ray::PlainFrontActor"))
    return psutil.Process(own), front


def measure(nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one size."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = start(nodes, Path(folder), options)
        trainer = Trainer(cluster, nodes, options)
        own = psutil.Process()

        def now() -> dict[str, list[tuple[float, float]]]:
            theirs = {name: ray.get([one.used.remote() for one in of]) for name, of in cluster.processes.items()}
            return {"trainer": [used(own)], "home": [used(home)], "fronts": [used(front)], **theirs}

        trainer.step(1)
        home, front = home_processes(trainer.generator._home)
        before, began = now(), time.monotonic()
        tokens = trainer.step(2)
        wall, after = time.monotonic() - began, now()
        ended = ray.get(cluster.driver.end.remote())
        rows = {}
        for name, of in after.items():
            seconds = sum(one[0] for one in of) - sum(one[0] for one in before[name])
            memory = sum(one[1] for one in of)
            if name == "history workers":
                seconds, memory = seconds / nodes, memory / nodes
            if name == "fronts":
                seconds /= nodes
            rows[name] = {"seconds": seconds, "memory_mb": memory}
        recorded = (Path(folder) / "events.jsonl").stat().st_size
        for one in (trainer.generator._home, *(one for of in cluster.processes.values() for one in of)):
            ray.kill(one)
    return {
        "nodes": nodes, "engines": nodes * OF_A_NODE, "samples": nodes * OF_A_NODE * PROMPTS * SAMPLES,
        "tokens": tokens, "wall_s": wall, "processes": rows, "trainer": dict(trainer.seconds),
        "summary_s": ended, "record_bytes": recorded,
    }  # fmt: skip


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table, one column a size."""
    head = [f"{row['nodes']} nodes, {row['engines']} engines, {row['samples']:,} samples" for row in found]
    lines = [f"| processor seconds a step, memory | {' | '.join(head)} |", "|---" * (len(found) + 1) + "|"]
    named = {"history workers": "a history worker", "fronts": "a front"}
    for name in ("driver", "trainer", "home", "fronts", "history workers", "recorder"):
        of_each = [row["processes"][name] for row in found]
        lines.append(line(named.get(name, name), [f"{o['seconds']:.1f} s, {o['memory_mb']:,.0f} MB" for o in of_each]))
    for path in found[0]["trainer"]:
        lines.append(line(f"trainer, {path}", [f"{row['trainer'][path]:.2f} s" for row in found]))
    lines.append(line("summary at the end", [f"{row['summary_s']:.2f} s" for row in found]))
    lines.append(line("tokens", [f"{row['tokens']:,}" for row in found]))
    lines.append(line("on the clock here", [f"{row['wall_s']:.0f} s" for row in found]))
    return "\n".join(lines)


def line(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--tokens", type=int, default=512, help="median length of a response")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of a sample")
    parser.add_argument("--tensors", type=int, default=18_867, help="of the model: those of a mixture of experts")
    parser.add_argument("--vocabulary", type=int, default=151_000, help="words of the tokenizer")
    parser.add_argument("--history-gb", type=float, default=1.0, help="memory of each history worker")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shims.install()
    start_local_ray(0, 2, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}, log_to_driver=False)
    found = []
    for nodes in options.nodes:
        found.append(measure(nodes, options))
        print(json.dumps(found[-1]), flush=True)
    ray.shutdown()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
