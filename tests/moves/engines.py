"""Real engines whose samples can move, on the embedded model in fp32, and a keeper and a mover over them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.calls import SampleCalls
from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import V1, DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.engine import CpuSettings
from rhyme_openrlhf.settings.histopipe import HistoPipeSettings
from rhyme_openrlhf.settings.moves import MoveSettings
from rhyme_openrlhf.telemetry.events import Event

if TYPE_CHECKING:
    from rhyme_openrlhf.moves.home import SampleHome

# Engines of these tests run another model runner where this says so (test_second_runner.py).
RUNNER = os.environ.get("RHYME_TEST_RUNNER", V1)
UNDRAFTED = "undrafted"
"""The second runner with asynchronous scheduling and without drafts: vLLM's own choice on a GPU."""
# Kernels of the second one are interpreted here.
TIMEOUT_S = 240 if RUNNER == V1 else 3000
LENGTH = 640
BLOCK = 32
SEATS = 16

VARIABLES = {
    # Upstream asks Ray, which is not there, for its address unless it is known.
    "RAY_ADDRESS": "not-asked",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def variables() -> Iterator[None]:
    """Environment variables of engines, for as long as they are started."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        # The engine's process is started with this one's path, and imports its scheduler by it.
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


class LocalEngine:
    """A steered engine of this process (steered_engines.py), with its own event loop; may be called from any."""

    def __init__(
        self,
        index: int,
        tensor_parallel_size: int = 1,
        kind: Any = None,
        pipelined: bool = False,
        drafting: DraftingSettings | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        # Awaited before each call, with the method's name; what it raises the caller gets.
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.gone = False
        self.node = ""
        # The first call of this method is followed, and not answered.
        self.hangs_after = ""
        self._starting = self._submit(self._start(index, tensor_parallel_size, kind, pipelined, drafting))

    async def _start(
        self, index: int, tensor_parallel_size: int, kind: Any, pipelined: bool, drafting: DraftingSettings | None
    ) -> Any:
        from rhyme_openrlhf.engine.factory import parts_of
        from tests.moves.steered_engines import HeldEngine

        kind = kind or HeldEngine
        raw = kind.__new__(kind)
        # Speculation from a sample's own text, which does not depend on who else runs, and little of it, so that a
        # sample is not over before it is moved.
        settings = RhymeSettings(
            histospec=HistoSpecSettings(enable=RUNNER != UNDRAFTED, siblings=False, shared_tokens=0, window_max=4),
            drafting=drafting or DraftingSettings(runner=V1 if RUNNER == UNDRAFTED else RUNNER),
            cpu=CpuSettings(kv_cache_mb=16),
            move=MoveSettings(enable=True),
            histopipe=HistoPipeSettings(enable=pipelined),
        )
        await raw.__init__(
            model=str(embedded.MODEL), max_model_len=LENGTH, max_num_seqs=SEATS, block_size=BLOCK, enforce_eager=True,
            tensor_parallel_size=tensor_parallel_size, num_gpus=0, enable_prefix_caching=True,
            distributed_executor_backend="uni", logprobs_mode="processed_logprobs", max_logprobs=1,
            bundle_indices=None, rhyme=settings, run_seed=1, index=index, history_workers=[], parts=parts_of,
        )  # fmt: skip
        return raw

    def _submit(self, answer: Any) -> Any:
        """Run a coroutine of the engine; a plain method's answer is there already, as with Ray."""
        if asyncio.iscoroutine(answer):
            return asyncio.run_coroutine_threadsafe(answer, self._loop)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(answer)
        return future

    @property
    def raw(self) -> Any:
        return self._starting.result(TIMEOUT_S)

    async def call(self, called: Any, *arguments: Any) -> Any:
        """As a port."""
        method = called if isinstance(called, str) else called.__name__
        if method == "node_id":
            return self.node
        if self.before is not None:
            await self.before(method)
        if self.gone:
            raise EngineLost("gone, says the test")
        from vllm.v1.engine.exceptions import EngineDeadError

        from rhyme_openrlhf.engine_errors import EngineCoreError

        try:
            answer = getattr(self.raw, method)(*arguments)
            if asyncio.iscoroutine(answer):
                answer = await asyncio.wrap_future(self._submit(answer))
            if method == self.hangs_after:
                self.hangs_after = ""
                await asyncio.sleep(TIMEOUT_S)
            return answer
        except (EngineCoreError, EngineDeadError) as error:
            raise EngineLost(str(error)) from error

    def now(self, method: str, *arguments: Any) -> Any:
        return self._submit(getattr(self.raw, method)(*arguments)).result(TIMEOUT_S)

    def scheduler(self, method: str, *arguments: Any) -> Any:
        from rhyme_openrlhf.engine.patches import core_channel

        return self._submit(core_channel.call_scheduler(self.raw.llm, method, *arguments)).result(TIMEOUT_S)

    def hold_at(self, tokens: int) -> None:
        """Hold samples at about `tokens` tokens until the next call; 0 lets all go on."""
        self.scheduler("hold_at", tokens)

    def purge(self) -> None:
        """After a test in which this engine was said to be gone: end what it still has."""
        self.gone, self.before = False, None
        self.hold_at(0)
        for place in list(self.raw.parts[SampleCalls].here):
            self.now("discard_sample", place)
        for room in self.scheduler("rooms"):
            self.now("release_room", room)
        self.raw.parts[SampleCalls].finished.clear()

    def stop(self) -> None:
        async def shut_down() -> None:
            self.raw.llm.shutdown()

        self._submit(shut_down()).result(TIMEOUT_S)


class Engines:
    """Some engines, and how tests use them: what a test does runs in an event loop of its own."""

    def __init__(self, engines: list[LocalEngine]) -> None:
        self.engines = engines
        self.carrier = "kv_transfer"
        self.records: list[MoveRecord] = []
        # Answers of samples that were not moved, by request: many tests move the same one.
        self.unmoved: dict[str, Any] = {}

    def run(self, test: Callable[[SampleKeeper, Mover], Awaitable[Any]], folder: Path, limit_s: float = 60) -> Any:
        from rhyme_openrlhf.kv.buffer import KvBufferStore

        async def main() -> Any:
            keeper = SampleKeeper(dict(enumerate(self.engines)), 0.02)
            nodes = {number: engine.node for number, engine in enumerate(self.engines)}
            store, told = KvBufferStore(folder), self.records.append
            mover = Mover(keeper, store, lambda *_: Choice(self.carrier), limit_s, told, nodes=nodes)
            keeper.start()
            try:
                return await asyncio.wait_for(test(keeper, mover), TIMEOUT_S)
            finally:
                keeper.stop()

        return asyncio.run(main())


async def grown_to(keeper: SampleKeeper, tokens: int, number: int = 0) -> KeptSample:
    """The `number`-th sample, once that many response tokens of it are known."""
    while len(keeper._samples) <= number:
        await asyncio.sleep(0.005)
    sample = list(keeper._samples.values())[number]
    while len(sample.known.tokens) < tokens:
        assert not sample.answer.done(), f"it ended, and only {len(sample.known.tokens)} tokens of it were known"
        await asyncio.sleep(0.005)
    return sample


def moved_at(
    engines: Engines, folder: Path, asked: SampleRequest, *moves: tuple[int, int]
) -> tuple[list[MoveRecord], Any]:
    """Return the moves and output of a sample that starts on engine 0 and moves at given token counts to given engines.

    Each engine holds the sample at the count where it moves; otherwise a slow test would find it finished.
    """

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        engines.engines[0].hold_at(moves[0][0])
        running = asyncio.create_task(keeper.generate(asked, 0))
        records = []
        for (tokens, to), (following, _) in zip(moves, [*moves[1:], (0, 0)], strict=True):
            sample = await grown_to(keeper, tokens)
            engines.engines[to].hold_at(following)
            records.append(await mover.move(sample, to, "reallocation"))
        for engine in engines.engines:
            engine.hold_at(0)
        return records, await running

    records, output = engines.run(test, folder)
    return records, output


def answer(output: Any) -> tuple[list[int], list[float], str, str]:
    """What a caller sees: tokens, log-probabilities, text, why it ended."""
    done = output[0].outputs[0]
    log_probs = [at[token].logprob for at, token in zip(done.logprobs, done.token_ids, strict=True)]
    return list(done.token_ids), log_probs, done.text, done.finish_reason


def request(prompt: list[int], history: str | None = None, **parameters: Any) -> SampleRequest:
    """A sample that is greedy, of a fixed length, unless told otherwise."""
    from vllm import SamplingParams

    asked = {"temperature": 0, "max_tokens": 300, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    return SampleRequest(tuple(prompt), SamplingParams(**(asked | parameters)), history)


def a_home(
    engines: Sequence[Any], settings: RhymeSettings, executor: Any, record: Callable[[Event], None], plan: Any = None
) -> SampleHome:
    """Return a home over these engines, whose one front, in this process, has `executor`."""
    from rhyme_openrlhf.moves.front import Front
    from rhyme_openrlhf.moves.fronts import Fronts
    from rhyme_openrlhf.moves.home import SampleHome

    def start(node: str) -> Front:
        front = Front(home, settings, 1, None, None, None)
        front.executor = executor
        return front

    home = SampleHome(dict(enumerate(engines)), settings, Fronts(start, str), record, plan)
    return home


def prompt(text: str, parameters: Any, max_length: int, num_samples: int = 1, label: str = "") -> dict[str, Any]:
    """Return the arguments of a call for a prompt, as OpenRLHF sends it here."""
    return {
        "prompt": text, "label": label, "sampling_params": parameters, "max_length": max_length, "hf_tokenizer": None,
        "num_samples": num_samples, "images": None,
    }  # fmt: skip
