"""Log-probabilities of drafts: vLLM's numbers from the rows that were computed, and memory for all rows there may be.

vLLM's own sampler runs here on CPU tensors, with the stand-ins that its CPU build has for its Triton kernels.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.utils.cpu_triton_utils as cpu_kernels
import vllm.v1.sample.rejection_sampler as upstream
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from rhyme_openrlhf.engine import rows as engine_rows
from rhyme_openrlhf.engine.patches import rejection_sampling
from rhyme_openrlhf.engine.patches.rejection_sampling import ComputedRowsSampler
from rhyme_openrlhf.platform import cpu_sampling

VOCABULARY = 97
KERNELS = (
    "rejection_greedy_sample_kernel", "rejection_random_sample_kernel", "expand_kernel",
    "sample_recovered_tokens_kernel",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """The CPU's stand-ins for vLLM's Triton kernels, as vLLM's workers have them."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(cpu_kernels, "expand_kernel"):
            for name in KERNELS:
                patch.setattr(upstream, name, getattr(cpu_kernels, name))
        else:
            # From 0.32 on. vLLM then looks at all modules' names, and llvmlite's library answers to any.
            patch.delitem(sys.modules, "llvmlite.binding.ffi", raising=False)
            current_platform.register_triton_kernel_overrides()
        yield


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(upstream, "expand_batch_to_tokens", cpu_sampling.expand_batch_to_tokens)
    # To compile starts processes.
    with torch.compiler.set_stance("force_eager"):
        yield


def a_step(lengths: list[int]) -> SpecDecodeMetadata:
    """Drafts of these lengths, as the runner describes them (`_calc_spec_decode_metadata`)."""
    drafts = torch.randint(VOCABULARY, (sum(lengths),), dtype=torch.int32)
    counts = torch.tensor(lengths)
    ends = torch.cumsum(counts + 1, 0).to(torch.int32)
    bonus = ends - 1
    rows = torch.arange(int(ends[-1]), dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=drafts,
        num_draft_tokens=lengths,
        cu_num_draft_tokens=torch.cumsum(counts, 0).to(torch.int32),
        cu_num_sampled_tokens=ends,
        target_logits_indices=rows[~torch.isin(rows, bonus)],
        bonus_logits_indices=bonus,
        logits_indices=rows,
    )


def asked(samples: int, logprobs: int | None, greedy: bool = False) -> SamplingMetadata:
    nothing = torch.zeros(samples)
    return SamplingMetadata(
        temperature=None if greedy else torch.full((samples,), 0.8),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=None if greedy else torch.full((samples,), 0.9),
        top_k=None,
        generators={},
        max_num_logprobs=logprobs,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(samples)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[[] for _ in range(samples)],
    )


def sampled(kind: Any, mode: Any, step: SpecDecodeMetadata, logits: Any, asking: SamplingMetadata) -> Any:
    """What the runner makes of a step that `kind` samples."""
    torch.manual_seed(5)
    output = kind(Sampler(logprobs_mode=mode))(step, None, logits.clone(), asking)
    return kind.parse_output(output.sampled_token_ids, VOCABULARY, logprobs_tensors=output.logprobs_tensors)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("logprobs", [0, 1, 3])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_the_numbers_are_those_of_vllm_bit_for_bit(mode: str, logprobs: int, greedy: bool) -> None:
    torch.manual_seed(3)
    lengths = [0, 5, 1, 0, 0, 9, 2, 1]
    step = a_step(lengths)
    # Sharp ones, some of which agree with the drafts.
    logits = 4 * torch.randn(sum(lengths) + len(lengths), VOCABULARY)
    agreeing = torch.arange(0, sum(lengths), 2)
    logits[step.target_logits_indices[agreeing], step.draft_token_ids[agreeing].long()] += 20
    asking = asked(len(lengths), logprobs, greedy)
    tokens, found = sampled(ComputedRowsSampler, mode, step, logits, asking)
    expected_tokens, expected = sampled(upstream.RejectionSampler, mode, step, logits, asking)
    assert tokens == expected_tokens and any(len(sample) > 1 for sample in tokens)
    assert_same(found, expected)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_step_may_have_empty_drafts_alone(mode: str) -> None:
    step, logits, asking = a_step([0, 0, 0]), torch.randn(3, VOCABULARY), asked(3, 1)
    tokens, found = sampled(ComputedRowsSampler, mode, step, logits, asking)
    expected_tokens, expected = sampled(upstream.RejectionSampler, mode, step, logits, asking)
    assert tokens == expected_tokens and [len(sample) for sample in tokens] == [1, 1, 1]
    assert_same(found, expected)


def assert_same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and (ours == theirs).all()
    assert found.cu_num_generated_tokens == expected.cu_num_generated_tokens


@pytest.mark.parametrize("greedy", [True, False])
def test_a_response_may_end_at_the_first_token_behind_its_minimum(greedy: bool) -> None:
    """The model wants an end everywhere; all drafts are what it says where no end may be."""
    end, least, lengths = 7, 4, [5, 0, 3, 4, 2, 1, 9]
    so_far = [[11] * count for count in (0, 2, 1, 0, 1, 9, 3)]
    step = a_step(lengths)
    step.draft_token_ids[:] = 23
    logits = torch.zeros(sum(lengths) + len(lengths), VOCABULARY)
    logits[:, end], logits[:, 23] = 200, 100
    asking = asked(len(lengths), 0, greedy)
    minimum = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    added = [(n, SamplingParams(min_tokens=least, stop_token_ids=[end]), None, said) for n, said in enumerate(so_far)]
    minimum.update_state(BatchUpdate(len(so_far), removed=[], added=added, moved=[]))
    asking.logitsprocs = LogitsProcessors([minimum])
    tokens, _ = sampled(ComputedRowsSampler, "processed_logprobs", step, logits, asking)
    for said, drafted, found in zip(so_far, lengths, tokens, strict=True):
        # As many tokens as the drafts allow, and an end at the place behind the minimum if there is one.
        before = max(0, least - len(said))
        assert found == ([23] * before + [end] if before <= drafted else [23] * (drafted + 1))
    # The step after this one: the processor's own state is what it was.
    assert sorted(set(minimum.logits_slice[0].tolist())) == [0, 1, 2, 3, 4, 6]


def test_one_long_draft_among_many_samples_costs_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [0] * 127 + [32]
    rows = sum(lengths) + len(lengths)
    step, logits = a_step(lengths), torch.randn(rows, VOCABULARY)
    softmaxed: list[int] = []
    log_softmax = torch.Tensor.log_softmax

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        softmaxed.append(self.shape[0])
        return log_softmax(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "log_softmax", counted)
    sampled(upstream.RejectionSampler, "raw_logprobs", step, logits, asked(128, 0))
    assert softmaxed == [128 * 33]
    softmaxed.clear()
    sampled(ComputedRowsSampler, "raw_logprobs", step, logits, asked(128, 0))
    assert sum(softmaxed) == rows == 160
    softmaxed.clear()
    # vLLM's sampler itself makes log-probabilities of the 128 last rows, in the mode that OpenRLHF asks for.
    sampled(ComputedRowsSampler, "processed_logprobs", step, logits, asked(128, 0))
    assert sum(softmaxed) == rows + 128


def test_the_profile_run_verifies_all_rows_that_a_step_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, width = 24, 8
    verified: list[tuple[int, int, int | None]] = []

    class Counted(ComputedRowsSampler):
        def forward(self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
            found = (logits.shape[0], metadata.max_spec_len, sampling_metadata.max_num_logprobs)
            verified.append(found)
            return super().forward(metadata, draft_probs, logits, sampling_metadata)

    # What vLLM's dummy run asks of its runner.
    sampler = Sampler(logprobs_mode="processed_logprobs")
    stand_in = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=None),
            scheduler_config=SimpleNamespace(max_num_seqs=samples, max_num_batched_tokens=256),
            num_speculative_tokens=32,
        ),
        model=SimpleNamespace(compute_logits=torch.nn.Linear(width, VOCABULARY)),
        device=torch.device("cpu"),
        sampler=sampler,
        rejection_sampler=Counted(sampler),
        num_spec_tokens=32,
        speculative_config=SimpleNamespace(rejection_sample_method="standard", draft_sample_method="greedy"),
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    rejection_sampling.dummy_sampler_run(stand_in, torch.randn(samples, width))
    # vLLM's own: a draft token each, without log-probabilities; and here, without a GPU, nothing more.
    assert verified == [(2 * samples, 1, None)] * 2
    verified.clear()
    monkeypatch.setattr(engine_rows, "gpu_present", lambda: True)
    rejection_sampling.dummy_sampler_run(stand_in, torch.randn(samples, width))
    # 256 rows that drafts may fill, and one for each sample that joins meanwhile.
    assert verified[2:] == [(256 + samples, 11, 0)]


def test_what_is_replaced_is_what_the_runner_uses() -> None:
    assert list(inspect.signature(upstream.RejectionSampler._get_logprobs_tensors).parameters) == list(
        inspect.signature(ComputedRowsSampler._get_logprobs_tensors).parameters
    )
