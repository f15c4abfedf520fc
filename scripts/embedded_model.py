"""Tokenizer and architecture of the embedded model: a character-level Qwen3 of about one million parameters.

Invariants:

- Each character is one token. The vocabulary has no angle brackets, so text cannot spell special tokens.
- The numbers of attention heads and key-value heads are even, so tensor parallelism over two ranks works.
"""

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# Position in this list is the token id.
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

# A power of two, which splits evenly over any number of ranks a model this small could use.
VOCABULARY_SIZE = 128

CHARACTERS = string.digits + string.ascii_letters + "+-*/=,.;:()[]{}?!%_ \n"

# Prompts are used as they are: the template puts contents one after the other and adds nothing.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def vocabulary() -> dict[str, int]:
    """Token to id: special tokens, characters, then unused names up to VOCABULARY_SIZE."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    tokens += [f"<unused{index}>" for index in range(VOCABULARY_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character, which adds no special tokens and decodes without spaces."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model_config(layers: int = 4) -> Qwen3Config:
    """Return the architecture: 4 layers, width 128, 4 heads of 32 over 2 key-value heads, about 1.0 M parameters."""
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention supports
        max_position_embeddings=1024,  # the longest prompt and response take about 700
        tie_word_embeddings=False,
        rope_theta=10000.0,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        use_cache=True,
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Return an untrained model in float32 with weights drawn from `seed`, which sets torch's global random state."""
    return _untrained(model_config(), seed)


def build_draft_model(seed: int) -> Qwen3ForCausalLM:
    """Return an untrained model half as deep: a draft model for the embedded one, about 0.5 M parameters."""
    return _untrained(model_config(layers=2), seed)


def _untrained(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    generation = model.generation_config
    generation.bos_token_id, generation.eos_token_id, generation.pad_token_id = BOS_ID, EOS_ID, PAD_ID
    return model
