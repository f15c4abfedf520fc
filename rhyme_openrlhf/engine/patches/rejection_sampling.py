"""Patches: vLLM's rejection sampler takes log-probabilities of computed rows, counts drafts, and has memory reserved.

vLLM gathers a row of logits for every sample and every place of the longest draft, and only then takes the softmax. 128
samples of which one has 32 drafts compute 160 rows, and vLLM's log-softmax runs over 4,224. `ComputedRowsSampler` takes
it of the computed rows, and repeats the few numbers that remain of each.

Behind accepted drafts vLLM samples one more token. Before a response has `min_tokens` tokens, none may end it. vLLM
counts the response without the drafts, so this token cannot end it although the drafts have reached the minimum. Here
the drafts count.

vLLM's profile run decides how large the KV cache is. It verifies a draft token for each sample, without
log-probabilities. Here it also verifies as many rows as a step may have (`engine/scheduler_parts/drafting.py`), with
log-probabilities.

Invariants: but for that count, what the sampler returns for tokens that were sampled is vLLM's own, bit for bit; the
memory is reserved on GPUs only. Checked against vLLM 0.29.0 and 0.32.0 `v1/sample/rejection_sampler.py`,
`v1/worker/gpu_model_runner.py`, and against 0.29.0 `v1/sample/logits_processor/builtin.py`; contract test:
`tests/engine/patches/test_rejection_sampling.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import vllm.v1.worker.gpu_model_runner as runner
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from rhyme_openrlhf.drafting.budget import share
from rhyme_openrlhf.engine.rows import most_rows, profiled_rows

_vllm_dummy_run = runner.GPUModelRunner._dummy_sampler_run


class ComputedRowsSampler(RejectionSampler):
    """vLLM's rejection sampler, whose log-probabilities need memory for the computed rows alone."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Return what vLLM's method does, with drafts counted where a response has a minimum length."""
        with drafts_counted(sampling_metadata.logitsprocs, metadata.num_draft_tokens):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def _get_logprobs_tensors(
        self,
        max_num_logprobs: int,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        sampled_token_ids: torch.Tensor,
    ) -> LogprobsTensors:
        """Return what vLLM's method does: an entry for each sample and place, those of rejected tokens without meaning.

        `logits`: [rows, vocabulary], of which those of draft tokens are `target_logits` and the others `bonus_logits`;
        `sampled_token_ids`: [samples, longest draft + 1].
        """
        rows, places = logits.shape[0], sampled_token_ids.shape[-1]
        ends = metadata.cu_num_sampled_tokens.to(torch.int64)
        starts = torch.zeros_like(ends)
        starts[1:] = ends[:-1]
        row = torch.arange(rows, device=ends.device)
        sample = torch.searchsorted(ends, row, right=True)
        tokens = sampled_token_ids[sample, row - starts[sample]].to(torch.int64)
        tokens = tokens.masked_fill(tokens == PLACEHOLDER_TOKEN_ID, 0)

        fields: list[torch.Tensor] = []
        indices = (metadata.target_logits_indices.long(), metadata.bonus_logits_indices.long())
        for of_part, part in zip(indices, (target_logits, bonus_logits), strict=True):
            # A step may have empty drafts only, and vLLM 0.32.0 gathers from at least one row.
            if not len(part):
                continue
            part = part.to(torch.float32)
            logprobs = part if self.is_logits_logprobs_mode else self.sampler.compute_logprobs(part)
            gathered = self.sampler.gather_logprobs(logprobs, max_num_logprobs, tokens[of_part])[:3]
            # Before the other part's are made.
            del part, logprobs
            fields = fields or [one.new_empty((rows, *one.shape[1:])) for one in gathered]
            for field, one in zip(fields, gathered, strict=True):
                field[of_part] = one

        row_of_place = (starts[:, None] + torch.arange(places, device=ends.device)).flatten().clamp_(max=rows - 1)
        return LogprobsTensors(*(field[row_of_place] for field in fields))


@contextmanager
def drafts_counted(processors: LogitsProcessors, drafts: Sequence[int]) -> Iterator[None]:
    """Let the token behind a request's drafts be an end where response and drafts have the minimum length.

    `drafts`: the draft tokens of each request. The rows of drafts themselves vLLM counts right, by other fields.
    """
    changed: list[tuple[Any, str, Any]] = []
    for processor in processors.non_argmax_invariant:
        if not isinstance(processor, MinTokensLogitsProcessor):
            continue
        waiting = processor.min_toks.items()
        reached = [number for number, (least, so_far, *_) in waiting if len(so_far) + drafts[number] >= least]
        if not reached:
            continue
        # Not in every version.
        for name in {"logits_slice", "restore_logits_slice"} & vars(processor).keys():
            rows, tokens = getattr(processor, name)
            kept = ~torch.isin(rows, rows.new_tensor(reached))
            changed.append((processor, name, (rows, tokens)))
            setattr(processor, name, (rows[kept], tokens[kept]))
    try:
        yield
    finally:
        for processor, name, value in changed:
            setattr(processor, name, value)


@torch.inference_mode()
def dummy_sampler_run(self: Any, hidden_states: torch.Tensor) -> Any:
    """Stand for GPUModelRunner._dummy_sampler_run: vLLM's, and then a step that verifies all rows there may be."""
    output = _vllm_dummy_run(self, hidden_states)
    most = most_rows(self.vllm_config) if self.speculative_config else None
    if most is not None and isinstance(output, SamplerOutput):
        verify_dummies(self, hidden_states, profiled_rows(most, hidden_states.shape[0], self.num_spec_tokens))
    return output


def verify_dummies(self: Any, hidden_states: torch.Tensor, rows: int) -> None:
    """Compute and verify `rows` rows, of a sample for each of `hidden_states`, with log-probabilities.

    That takes `rows.reserved_bytes`.
    """
    samples, device = hidden_states.shape[0], hidden_states.device
    lengths = share([self.num_spec_tokens] * samples, rows - samples).tolist()
    rows = samples + sum(lengths)
    logits = self.model.compute_logits(torch.rand_like(hidden_states[:1]).expand(rows, -1).contiguous())
    nothing = torch.zeros(samples, device=device)
    self.rejection_sampler(
        SpecDecodeMetadata.make_dummy([[0] * length for length in lengths], device),
        None,
        logits,
        SamplingMetadata(
            temperature=torch.ones(samples, device=device),
            all_greedy=False,
            all_random=True,
            top_p=torch.full((samples,), 0.9, device=device),
            top_k=None,
            generators={},
            # As engines are asked for (engine/actor.py): that of the sampled token.
            max_num_logprobs=0,
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
        ),
    )


def apply() -> None:
    """Replace both names in this process."""
    runner.RejectionSampler = ComputedRowsSampler
    runner.GPUModelRunner._dummy_sampler_run = dummy_sampler_run
