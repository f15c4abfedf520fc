"""The embedded tokenizer and the shipped model: round trips, size, shape, and that it solves a short problem."""

import json
import random

import embedded_model as embedded
import pytest
import torch
from embedded_tasks import KINDS, draw_problem, make_problem
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from rhyme_openrlhf.embedded import DATA, MODEL


@pytest.fixture(scope="module", params=["built", "shipped"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param == "built":
        return embedded.build_tokenizer()
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_round_trip_of_all_tasks(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(6)
    texts = [row["input"] + ";" + row["label"] for row in shipped_rows()]
    for kind in KINDS:
        problems = [draw_problem(kind, rng, with_errors=True) for _ in range(50)]
        texts += [problem.prompt + problem.solution for problem in problems]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=False) == text + "<eos>"


def test_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("ab")["input_ids"] == tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert not set("<>") & set(embedded.CHARACTERS)
    assert len(tokenizer) == embedded.VOCABULARY_SIZE


def test_chat_template_concatenates(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "a3b7="}, {"role": "assistant", "content": "b3+7=10;10"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "a3b7=b3+7=10;10"


def test_architecture_suits_two_ranks_and_cpu_attention() -> None:
    config = embedded.model_config()
    assert config.num_attention_heads % 2 == config.num_key_value_heads % 2 == 0
    assert config.vocab_size % 2 == config.intermediate_size % 2 == 0
    assert config.head_dim in (32, 48, 64, 80, 128)
    assert config.max_position_embeddings >= 1024


def test_shipped_model_is_small_and_bfloat16(model: Qwen3ForCausalLM) -> None:
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    files = list(MODEL.iterdir())
    assert sum(file.stat().st_size for file in files) < 8_000_000
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {file.name for file in files}
    written = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert written["architectures"] == ["Qwen3ForCausalLM"]
    assert written["dtype"] == "bfloat16"
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (0, 2)


def test_shipped_configuration_is_the_one_in_code(model: Qwen3ForCausalLM) -> None:
    expected = embedded.model_config()
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "num_key_value_heads"):
        assert getattr(model.config, name) == getattr(expected, name)


@torch.no_grad()
def test_shipped_model_prefers_the_right_step(model: Qwen3ForCausalLM) -> None:
    """Teacher-forced on right solutions, the most likely token is the written one nearly always."""
    tokenizer, right, total = embedded.build_tokenizer(), 0, 0
    for seed in range(4):
        for kind in KINDS:
            problem = make_problem(kind, 8, random.Random(seed))
            ids = torch.tensor([tokenizer(problem.prompt + problem.solution)["input_ids"]])
            predicted = model(ids).logits[0, :-1].argmax(-1)
            start = len(problem.prompt)
            right += (predicted[start - 1 :] == ids[0, start:]).sum().item()
            total += ids.shape[1] - start
    assert right / total > 0.97


def shipped_rows() -> list[dict[str, str]]:
    return [json.loads(line) for path in DATA.glob("*.jsonl") for line in path.read_text().splitlines()]
