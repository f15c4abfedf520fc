"""Drafts of the scheduler in vLLM's second model runner: what is written to the runner's state, and vLLM's own side."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import model_runner

from rhyme_openrlhf.engine import rows as engine_rows
from rhyme_openrlhf.engine.patches import second_runner
from rhyme_openrlhf.engine.patches.second_runner import METHOD, REFUSED, Graphs, NoProposals, write_drafts

LONGEST = 8


def state(names: list[str]) -> Any:
    """Return the part of vLLM's request state that `write_drafts` uses: rows by request, int64[rows, longest draft]."""
    rows = {name: len(names) - 1 - number for number, name in enumerate(names)}
    return SimpleNamespace(req_id_to_index=rows, draft_tokens=torch.full((len(names), LONGEST), -7, dtype=torch.int64))


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.lists(st.integers(0, 1 << 20), min_size=1, max_size=LONGEST), max_size=6
    )
)
def test_each_draft_begins_the_row_of_its_request(drafts: dict[str, list[int]]) -> None:
    found = state(list("abcdef"))
    write_drafts(found, SimpleNamespace(scheduled_spec_decode_tokens=drafts))
    for name, row in found.req_id_to_index.items():
        draft = drafts.get(name, [])
        assert found.draft_tokens[row, : len(draft)].tolist() == draft
        if not draft:
            assert (found.draft_tokens[row] == -7).all()


def test_nothing_is_proposed_in_the_place_of_drafts() -> None:
    made = NoProposals(SimpleNamespace(num_speculative_tokens=LONGEST), torch.device("cpu"))
    proposed = made.propose(SimpleNamespace(num_reqs=3), None, dummy_run=True)
    assert proposed.shape == (3, LONGEST) and proposed.dtype == torch.int64 and not proposed.any()
    assert made.draft_logits is None and not made.supports_mm_inputs


def test_vllm_refuses_the_method_in_these_words_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    config = VllmConfig()
    speculative = SimpleNamespace(method=METHOD, parallel_drafting=False)
    monkeypatch.setattr(config, "speculative_config", speculative)
    second_runner.apply()
    patched = VllmConfig._get_v2_model_runner_unsupported_features
    assert REFUSED in inspect.unwrap(patched)(config)
    assert REFUSED not in patched(config)
    monkeypatch.setattr(speculative, "method", "suffix")
    assert patched(config) == inspect.unwrap(patched)(config) != []


def test_other_methods_have_their_own_speculator(monkeypatch: pytest.MonkeyPatch) -> None:
    second_runner.apply()
    device = torch.device("cpu")
    ours = SimpleNamespace(speculative_config=SimpleNamespace(method=METHOD), num_speculative_tokens=LONGEST)
    assert isinstance(model_runner.init_speculator(ours, device), NoProposals)
    # vLLM 0.32.0 gives it the states of requests, too.
    more = [None] * (len(inspect.signature(model_runner.init_speculator).parameters) - 2)
    with pytest.raises(AttributeError):
        model_runner.init_speculator(SimpleNamespace(speculative_config=SimpleNamespace(method="ngram")), device, *more)


@pytest.mark.parametrize(
    ("method", "support", "mode", "made"),
    [
        (METHOD, AttentionCGSupport.ALWAYS, CUDAGraphMode.FULL_AND_PIECEWISE, (CUDAGraphMode.FULL_AND_PIECEWISE, True)),
        (METHOD, AttentionCGSupport.UNIFORM_BATCH, CUDAGraphMode.FULL_AND_PIECEWISE, (CUDAGraphMode.PIECEWISE, False)),
        (METHOD, AttentionCGSupport.ALWAYS, CUDAGraphMode.NONE, (CUDAGraphMode.NONE, None)),
        ("", AttentionCGSupport.ALWAYS, CUDAGraphMode.FULL_AND_PIECEWISE, (CUDAGraphMode.FULL_AND_PIECEWISE, None)),
    ],
)
def test_graphs_take_drafts_of_any_length_where_attention_does(
    method: str, support: AttentionCGSupport, mode: CUDAGraphMode, made: tuple[CUDAGraphMode, bool | None]
) -> None:
    graphs = Graphs(lambda config, device, chosen, **named: (chosen, named.get("varlen_decode")))
    graphs.resolves(support)
    compilation = SimpleNamespace(cudagraph_mode=mode)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method) if method else None, compilation_config=compilation
    )
    assert graphs(config, torch.device("cpu"), mode) == made
    assert compilation.cudagraph_mode == made[0]


def test_the_profile_run_has_the_logits_of_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(tuple(hidden.shape))
        return torch.zeros(hidden.shape[0], 50)

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=20, max_num_batched_tokens=300), num_speculative_tokens=LONGEST
    )
    runner = SimpleNamespace(vllm_config=config, model=SimpleNamespace(compute_logits=logits))
    second_runner.take_rows(runner, torch.zeros(20, 8))
    # Without a GPU nothing is reserved.
    assert asked == []
    monkeypatch.setattr(engine_rows, "gpu_present", lambda: True)
    second_runner.take_rows(runner, torch.zeros(20, 8))
    # No step has more than all samples with whole drafts.
    assert asked == [(20 * (1 + LONGEST), 8)]
    config.scheduler_config.max_num_batched_tokens = 100
    second_runner.take_rows(runner, torch.zeros(20, 8))
    # As many as a step computes, and one for each sample that joins meanwhile.
    assert asked[1:] == [(100 + 20, 8)]


def test_vllm_has_what_is_patched() -> None:
    runner = model_runner.GPUModelRunner
    gather = inspect.signature(inspect.unwrap(runner.gather_batch_req_state))
    assert list(gather.parameters)[:3] == ["self", "scheduler_output", "dummy_run"]
    second_runner.apply()
    for patched in (runner.gather_batch_req_state, runner.prepare_inputs):
        given_by_vllm = [None] * len(inspect.signature(patched).parameters)
        inspect.signature(patched, follow_wrapped=False).bind(*given_by_vllm)
    proposals = set(inspect.signature(NoProposals.propose).parameters)
    assert {"self", "input_batch"} <= proposals
    used = inspect.getsource(runner)
    for name in ("init_cudagraph_manager", "capture", "propose", "supports_mm_inputs", "draft_logits"):
        assert f"self.speculator.{name}" in used and hasattr(NoProposals, name)
    assert list(inspect.signature(runner._dummy_sampler_run).parameters) == ["self", "hidden_states"]
