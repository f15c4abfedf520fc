"""Checks of a run's models before anything is started: the policy, its profile and the draft source.

Each check raises PreflightError with one sentence: what is wrong, where, what to do.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.engine_errors import first_line
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import ProfileError, model_name
from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.run import model_shape
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DRAFT_MODEL, EAGLE3, HISTORY, WITH_MODEL, DraftingSettings
from rhyme_openrlhf.settings.latency import AUTO, NONE


class PreflightError(Exception):
    """A run that cannot work; the message is one sentence for the user."""


def check_model(flag: str, path: str | None) -> Any:
    import transformers

    if not path:
        raise PreflightError(f"{flag} is missing: name a model directory or a model of the hub")
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise PreflightError(f"{flag}: {path} has no config.json, so it is not a model directory")
    if not os.path.exists(path) and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise PreflightError(f"{flag}: {path} does not exist")
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)
    except Exception as error:  # people's files, and code of the model's, which raise anything
        reason = first_line(error)
        raise PreflightError(f"{flag}: {path} cannot be loaded as a model ({reason})") from error


def check_tensor_parallel(args: SimpleNamespace, config: Any) -> None:
    size = args.vllm.tensor_parallel_size
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if size < 1:
        raise PreflightError(f"--vllm.tensor_parallel_size must be at least 1, got {size}")
    if heads and heads % size:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise PreflightError(
            f"--vllm.tensor_parallel_size {size} does not divide the model's {heads} attention heads; possible: {fits}"
        )
    if kv_heads and kv_heads % size and size % kv_heads:
        raise PreflightError(
            f"--vllm.tensor_parallel_size {size} fits the model's {kv_heads} key-value heads in no way: one must "
            "divide the other"
        )


def check_profile(args: SimpleNamespace, config: Any, drafting: DraftingSettings) -> None:
    try:
        if args.emulate.profile:
            profiles.read(Path(args.emulate.profile))
    except ProfileError as error:
        raise PreflightError(f"--emulate.profile: {error}") from error
    if args.latency.profile in (AUTO, NONE):
        return
    try:
        profile = profiles.read(Path(args.latency.profile))
        # Hardware and number format are the engines' to tell (training/engines.py).
        wanted = dataclasses.replace(
            profile.subject, model=model_name(config, drafting), tensor_parallel_size=args.vllm.tensor_parallel_size
        )
        profile.check_fits(wanted, args.latency.profile)
    except ProfileError as error:
        raise PreflightError(f"--latency.profile: {error}") from error


def is_hybrid(config: Any) -> bool:
    """Return whether a model (its Hugging Face configuration) has layers that keep a state, as Mamba's do."""
    return model_shape.is_hybrid(config.get_text_config().to_dict())


def check_hybrid(args: SimpleNamespace, config: Any) -> None:
    """Check that a hybrid model runs without drafts.

    vLLM keeps a state behind each draft token of a step. Where a sample has no draft in the next step, vLLM goes on
    from the first of them, and what the sample accepted is not in it. Every source of ours has drafts in some steps
    only. Found by reading vLLM 0.29.0 (v1/attention/backends/gdn_attn.py and short_conv_attn.py: rows without drafts).
    """
    if args.histospec.enable and is_hybrid(config):
        raise PreflightError(
            f"--actor.model_name_or_path: {args.actor.model_name_or_path} has Mamba-like layers, and vLLM loses part "
            "of their state where a sample has drafts in some steps only, which would change what the model "
            "generates: give --no-histospec.enable"
        )


def check_source(args: SimpleNamespace, config: Any, settings: RhymeSettings) -> None:
    """Check that the draft source suits the run and its policy, whose configuration is `config`."""
    drafting = settings.drafting
    source = f"--drafting.source {drafting.source}"
    if drafting.source == HISTORY:
        return
    if not settings.histospec.enable:
        raise PreflightError(f"{source} needs speculation: leave --no-histospec.enable out")
    if drafting.method not in WITH_MODEL:
        return
    if settings.tp_switch.enable:
        raise PreflightError(
            f"{source} does not go with --tp_switch.enable yet: the layouts' memory is planned without a draft model; "
            "leave --tp_switch.enable out, or draft from history"
        )
    drafter = check_model("--drafting.model", drafting.model)
    if drafting.method == EAGLE3 and not any("eagle" in name.lower() for name in drafter.architectures or ()):
        raise PreflightError(
            f"--drafting.model: {drafting.model} is no EAGLE head (its architecture is "
            f"{', '.join(drafter.architectures or ['not named'])}): a whole model is --drafting.source draft_model"
        )
    _check_vocabulary(args, config, drafting, drafter)
    if drafting.method == EAGLE3 and not gpu_present():
        raise PreflightError(
            f"{source} runs on GPUs only: no EAGLE head has been tried on an engine without one; ngram and draft_model "
            "run here"
        )


def _check_vocabulary(args: SimpleNamespace, config: Any, drafting: DraftingSettings, drafter: Any) -> None:
    """Check that both models have one vocabulary; vLLM compares only its size, which two vocabularies can share."""
    flag = f"--drafting.model: {drafting.model}"
    ours, theirs = config.get_text_config().vocab_size, drafter.get_text_config().vocab_size
    if ours != theirs:
        raise PreflightError(f"{flag} has a vocabulary of {theirs} tokens, the policy one of {ours}")
    if drafting.method != DRAFT_MODEL:
        return
    from transformers import AutoTokenizer

    try:
        words = AutoTokenizer.from_pretrained(drafting.model, trust_remote_code=True).get_vocab()
    except (OSError, ValueError):
        # A draft model without a tokenizer of its own has the policy's.
        return
    wanted = AutoTokenizer.from_pretrained(args.actor.model_name_or_path, trust_remote_code=True).get_vocab()
    other = [word for word, number in wanted.items() if words.get(word, number) != number]
    if other:
        raise PreflightError(
            f"{flag} numbers its tokens differently than the policy ({len(other)} of {len(wanted)}, {other[0]!r} among "
            "them): a draft model must have the policy's tokenizer"
        )
