"""An engine on a GPU proves, before its first sample, that its drafts change nothing; else it generates without drafts.

- **Likeliest responses** to the same prompts: with one row a sample, alone and with more samples, then with right, old
  and wrong drafts, while prompts of other lengths join.
- **Sampled responses**, whose text is then computed in one pass, without drafts and with them.
- **Sampled tokens** after one text, with and without drafts: are they of one distribution?

Log-probabilities may differ with drafts by little more than another number of rows makes them differ without
(proof/judgement.py). All of it is in the run's own number format, graphs, attention and ranks, because it is the run's
own engine. A proof is kept on its node, and later engines of the same kind skip it (proof/kept.py).

Invariants:
- No sample runs before or meanwhile, and nothing of it is drafted from afterwards.
- It takes LIMIT_S at most; a proof that is not done then is none.
- A proof that fails costs drafts and never the run.

On a machine without a GPU there is one runner, which the tests prove.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
from vllm.utils import random_uuid

from rhyme_openrlhf.engine import requests
from rhyme_openrlhf.engine.actor_parts.part import Engine, Part
from rhyme_openrlhf.engine.calls import SchedulerDrafting, WorkerCalls
from rhyme_openrlhf.engine.messages import Answer, Proof, Said
from rhyme_openrlhf.engine_errors import EngineCoreError, first_line
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.platform import gpu_present, nvidia
from rhyme_openrlhf.proof import kept
from rhyme_openrlhf.proof.chi_square import P_VALUE_FLOOR, alike
from rhyme_openrlhf.proof.context import Context, most_telling
from rhyme_openrlhf.proof.histories import KINDS, draft_of, history
from rhyme_openrlhf.proof.judgement import Difference, bound, difference, fault, never_drafted, unsteady
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.run_directory import versions

LIMIT_S = 30.0
# From a prompt that fits a block to one that attention splits; cut to the engine's longest text.
PROMPT_LENGTHS = (3, 17, 40, 64, 130, 300, 700, 2000)
# Tokens of the responses: drafts of the longest window are accepted some times over.
TOKENS = 48
# Samples of each prompt, where the number of samples is to be another.
COPIES = 4
# Samples of one text, for each kind of draft; two tries, as in verify/sampled.py.
SAMPLES, TRIES = 1000, 2
# The first token comes from the prompt, the second from the draft, and drafts end before the last.
SAMPLED_TOKENS = 3
# What decides whether a proof still holds, beside the driver.
PACKAGES = ("rhyme-openrlhf", "openrlhf", "vllm", "torch", "triton")
# Kinds of histories whose first draft tokens are right.
RIGHT = ("right", "late")
# The history of a draft by hand.
SAMPLED = "proof-sampled"

Prompt = tuple[int, ...]


def is_wanted(rhyme: RhymeSettings) -> bool:
    """Return whether a run's engines prove their drafts; on another machine's clock that would be of no use."""
    return rhyme.drafts_from_history and gpu_present() and not rhyme.emulate.profile


class Proving(Part):
    """The proof of one engine, made before its first sample or (`at_start` False) when it is asked for."""

    def __init__(self, engine: Engine, at_start: bool = True) -> None:
        super().__init__(engine)
        self._at_start = at_start
        self._said: Said | None = None

    def proof(self) -> Said | None:
        """Return what the engine's start found; None where nothing had to be proved."""
        return self._said

    async def has_started(self) -> None:
        """Prove the drafts, unless an engine of this kind has done so on this machine."""
        if self._at_start and is_wanted(self.engine.rhyme):
            self._said = await self._settled()

    async def subject(self) -> kept.Subject:
        """Return what a proof of this engine is of."""
        config, workers = self.engine.llm.vllm_config, self.engine.workers
        model = config.model_config
        scheduling = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
        return kept.Subject(
            gpu=(await workers(WorkerCalls.rhyme_hardware))[0],
            driver=nvidia.read().version,
            versions={name: version for name, version in versions().items() if name in PACKAGES},
            architecture=str(model.architectures[0]),
            dtype=", ".join(
                str(one).removeprefix("torch.")
                for one in (model.dtype, model.quantization, config.cache_config.cache_dtype)
                if one not in (None, "auto")
            ),
            ranks=config.parallel_config.tensor_parallel_size,
            runner=f"{'V2' if config.use_v2_model_runner else 'V1'}, {scheduling}",
            graphs=str(getattr(config.compilation_config.cudagraph_mode, "name", "NONE")),
            attention=(await workers(WorkerCalls.rhyme_attention))[0],
        )

    async def _settled(self) -> Said:
        """Return the engine's sentence, and leave drafts out if they are not proved."""
        subject = await self.subject()
        what = f"model runner {subject.runner}"
        if when := kept.date(subject):
            return Said(True, f"drafts run on {what}, which proved here on {when[:10]} that they change nothing")
        other = kept.nearest(subject)
        again = f" (the proof kept here is of another engine: {other})" if other else ""
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await self._proof()
        except TimeoutError:
            problem = f"their proof took longer than {LIMIT_S:g} s"
        except EngineCoreError:
            raise
        except (RuntimeError, ValueError, LookupError, OSError) as error:
            problem = f"their proof failed: {first_line(error)}"
        else:
            problem = found.problem
        if problem:
            await self.engine.scheduler(SchedulerDrafting.switch_drafts, False)
            return Said(False, f"this engine generates without drafts on {what}, because {problem}{again}")
        text = f"drafts run on {what}: proved now that they change nothing{again}"
        try:
            await asyncio.to_thread(kept.write, subject, _now())
        except OSError as error:
            text += f"; the proof cannot be kept for later runs: {error}"
        return Said(True, text)

    async def prove(self) -> Proof:
        """Prove the drafts now; what passes is kept for later runs on this node, and what fails no longer."""
        subject, found = await self.subject(), await self._proof()
        with contextlib.suppress(OSError):
            # Where nothing can be kept, each run proves again.
            if found.problem:
                kept.remove(subject)
            else:
                kept.write(subject, _now())
        return found

    async def _proof(self) -> Proof:
        """Compare the engine with drafts with itself without them; it drafts from nothing known afterwards."""
        began = time.monotonic()
        switch = SchedulerDrafting.switch_drafts
        prompts = self._prompts()
        await self.engine.scheduler(switch, False)
        plain = await self._answers(prompts)
        alone = [await self._answer(prompt) for prompt in prompts]
        many = await self._answers([prompt for prompt in prompts for _ in range(COPIES)])
        by_size = difference(
            [
                *zip(plain, alone, strict=True),
                *((plain[n // COPIES], answer) for n, answer in enumerate(many)),
                *await self._twice(prompts),
            ]
        )
        context = most_telling(zip(prompts, plain, strict=True))
        expected = await self._seconds(context, "") if context else Counter()
        await self.engine.scheduler(switch, True)
        allowed = bound(by_size, torch.finfo(self.engine.llm.vllm_config.model_config.dtype).eps)
        problems = [unsteady(by_size)]
        by_kind: dict[str, Difference] = {}
        drafted = accepted = 0
        for kind in KINDS:
            before = await self.engine.totals()
            async with self._histories(kind, prompts, plain) as names:
                found = await self._answers(prompts, names)
                did = await self.engine.totals() - before
                by_kind[kind] = difference([*zip(plain, found, strict=True), *await self._twice(prompts, names)])
            drafted, accepted = drafted + did.drafted, accepted + did.accepted
            problems.append(fault(f"with drafts of the {kind} history", by_kind[kind], allowed))
            problems.append(never_drafted(kind, did.drafted, did.accepted, RIGHT))
        p_values: dict[str, float] = {}
        if context:
            for kind, token in (("right", context.second), ("wrong", self._other(context.second))):
                p_values[kind] = await self._tested(context, token, expected)
                if not p_values[kind] >= P_VALUE_FLOOR:
                    problems.append(f"with {kind} drafts other tokens are sampled (p = {p_values[kind]:.2g}, twice)")
        await self.engine.scheduler(switch, True)
        problem = next(filter(None, problems), "")
        return Proof(problem, by_size, by_kind, p_values, drafted, accepted, time.monotonic() - began)

    # --- texts

    def _prompts(self) -> list[Prompt]:
        """Return texts of every length, the same each time, of the vocabulary's tokens that stand for no media."""
        room = self.engine.llm.vllm_config.model_config.max_model_len - TOKENS - 1
        chance = random.Random(0)
        words = self._words()
        return [tuple(chance.choices(words, k=max(1, min(length, room)))) for length in PROMPT_LENGTHS]

    def _words(self) -> Sequence[int]:
        media = set(self.engine.media_padding() or ())
        size = self.engine.llm.vllm_config.model_config.get_vocab_size()
        return [token for token in range(size) if token not in media] if media else range(size)

    def _other(self, token: int) -> int:
        words = self._words()
        return words[(words.index(token) + len(words) // 2) % len(words)] if token in words else words[0]

    async def _answers(self, prompts: Sequence[Prompt], names: Sequence[str] = ()) -> list[Answer]:
        """Return the likeliest response to each prompt; half of them join when the first of the others is over."""
        named = list(zip(prompts, names or [""] * len(prompts), strict=True))
        half = len(named) // 2
        asked = [asyncio.ensure_future(self._answer(*one, TOKENS - n % 4 * 8)) for n, one in enumerate(named[:half])]
        try:
            if asked:
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            asked += [asyncio.ensure_future(self._answer(*one)) for one in named[half:]]
            return list(await asyncio.gather(*asked))
        finally:
            for one in asked:
                one.cancel()

    async def _answer(self, prompt: Prompt, name: str = "", tokens: int = TOKENS, temperature: float = 0.0) -> Answer:
        """Return a response that drafts from the history `name`."""
        parameters = requests.final_only(requests.checked(tokens, temperature))
        parameters.ignore_eos, parameters.detokenize = True, False
        parameters.extra_args = {requests.PROMPT_KEY: name} if name else None
        asked = requests.prompt_of(prompt, self.engine.weight_version)
        (found,) = (await requests.generate(self.engine.llm, asked, parameters, random_uuid())).outputs
        return Answer.of(found)

    async def _twice(self, prompts: Sequence[Prompt], names: Sequence[str] = ()) -> list[tuple[Answer, Answer]]:
        """Return sampled responses, and each with its text computed in one pass."""
        found = await asyncio.gather(
            *(self._answer(p, name, TOKENS, 1.0) for p, name in zip(prompts, names or [""] * len(prompts), strict=True))
        )
        pairs = []
        for prompt, answer in zip(prompts, found, strict=True):
            scores = await self.engine.score([*prompt, *answer.tokens])
            pairs.append((answer, Answer(answer.tokens, tuple(scores[-len(answer.tokens) :]))))
        return pairs

    # --- drafts

    @asynccontextmanager
    async def _histories(
        self, kind: str, prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> AsyncIterator[list[str]]:
        """Hold the names of histories of a kind, one for each prompt."""
        names = [f"proof-{kind}-{number}" for number in range(len(prompts))]
        texts = zip(names, prompts, answers, strict=True)
        await self._install({name: history(kind, prompt, a.tokens, self._context) for name, prompt, a in texts})
        try:
            yield names
        finally:
            await self._forget(names)

    @property
    def _context(self) -> int:
        return self.engine.rhyme.histospec.prefix_max

    async def _install(self, histories: dict[str, list[Piece]]) -> None:
        for name, pieces in histories.items():
            if refused := await self.engine.histories.feed.hand_over(name, build_index(pieces)):
                raise RuntimeError(refused)

    async def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            await self.engine.scheduler(SchedulerDrafting.forget_history, name)

    async def _tested(self, context: Context, token: int, expected: Counter[int]) -> float:
        """Return the chance that samples with this draft are of the distribution of `expected`; 1: nothing to compare.

        A small one is tried once more.
        """
        chance = 1.0
        await self._install({SAMPLED: draft_of([context.first, token], context.prompt, self._context)})
        try:
            for _ in range(TRIES):
                found = await self._seconds(context, SAMPLED)
                values = sorted(expected | found)
                p_value = alike([expected[one] for one in values], [found[one] for one in values]).p_value
                chance = 1.0 if p_value is None else p_value
                if chance >= P_VALUE_FLOOR:
                    break
        finally:
            await self._forget([SAMPLED])
        return chance

    async def _seconds(self, context: Context, name: str) -> Counter[int]:
        """Return how often each token was sampled behind the context's first."""
        asked = (self._answer(context.prompt, name, SAMPLED_TOKENS, 1.0) for _ in range(SAMPLES))
        answers = await asyncio.gather(*asked)
        return Counter(answer.tokens[1] for answer in answers if answer.tokens[0] == context.first)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
