"""By which words a profile is found again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rhyme_openrlhf.latency import subject as subjects
from rhyme_openrlhf.latency.profile import Subject
from rhyme_openrlhf.settings.drafting import DraftingSettings

CONFIG = SimpleNamespace(
    architectures=["Qwen2ForCausalLM"],
    num_hidden_layers=4,
    hidden_size=128,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=512,
    head_dim=16,
)


def test_what_vllm_drafts_with_is_part_of_the_name() -> None:
    drafting = DraftingSettings(source="draft_model", model="/models/half/", tokens=3)
    assert subjects.model_name(CONFIG, drafting).endswith("vocabulary 512, 3 drafts by draft_model half")
    assert subjects.model_name(CONFIG, DraftingSettings(source="ngram")).endswith(", 4 drafts by ngram")


def test_two_trained_copies_of_a_model_share_a_profile() -> None:
    assert subjects.model_name(CONFIG, DraftingSettings()) == "Qwen2ForCausalLM 4x128 heads 8/2 vocabulary 512"


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_grouped_query_heads_are_counted_once_and_replicated_ones_on_each_rank(ranks: int, heads: int) -> None:
    assert subjects.kv_bytes_per_token(CONFIG, "float32", ranks) == 2 * 4 * heads * 16 * 4


def test_the_file_name_says_what_is_in_it() -> None:
    name = subjects.file_name(Subject("Qwen2 4x128", "AMD EPYC (TM), 2 cores", "float32", 2))
    assert name == "qwen2-4x128-amd-epyc-tm-2-cores-float32-tp2.json"


def test_a_machine_has_a_name() -> None:
    assert "cores" in subjects.hardware_name(())
    assert subjects.hardware_name(("NVIDIA H200", "NVIDIA H200")) == "NVIDIA H200"
