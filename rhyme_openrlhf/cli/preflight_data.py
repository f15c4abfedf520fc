"""Checks of people's data before anything is started: data sets, splits, templates, the tokenizer, every row.

Upstream's loaders, templates and tokenizers raise any exception, so they are wrapped as a whole. An exception becomes
one sentence that names the flag and, where there is one, the row (from 1).

Invariant: after `check_data`, every row that the run will use is a text that gives at least one token of the model's,
and leaves room for a response.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.engine_errors import first_line
from rhyme_openrlhf.history.archive import ArchiveError
from rhyme_openrlhf.history.lineage import Ancestors, ancestors
from rhyme_openrlhf.settings.config import RhymeSettings

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
TRAINING, EVALUATION = "--data.prompt_dataset", "--eval.dataset"
# A line of progress, so that a check of many rows does not look like one that hangs; the clock is read once in a while.
PROGRESS_SECONDS = 5.0
PROGRESS_ROWS = 1000
SPLIT_FLAGS = {TRAINING: "--data.prompt_split", EVALUATION: "--eval.split"}


def check_data(args: SimpleNamespace) -> int:
    """Check all prompts of training and evaluation; return how many training prompts there are."""
    if not args.data.prompt_dataset:
        raise PreflightError(f"{TRAINING} is missing: name a file (.jsonl, .parquet, ...) or a data set")
    _check_template(args)
    tokenizer = _tokenizer(args)
    if args.eval.dataset:
        _check_prompts(EVALUATION, args.eval.dataset, args.eval.split, tokenizer, args)
    return _check_prompts(TRAINING, args.data.prompt_dataset, args.data.prompt_split, tokenizer, args)


def some_prompts(args: SimpleNamespace, most: int) -> list[tuple[str, list[int]]]:
    """Return text and tokens of up to `most` training prompts, as upstream builds them, from all over the data set."""
    rows = _load(TRAINING, args.data.prompt_dataset, args.data.prompt_split, args)
    count = min(most, len(rows))
    chosen = rows.select([number * len(rows) // count for number in range(count)])
    tokenizer = _tokenizer(args)
    texts = _texts(TRAINING, args.data.prompt_dataset, chosen, tokenizer, args)
    return [(prompt, _tokens(prompt, tokenizer)) for prompt in texts]


def check_earlier(args: SimpleNamespace, settings: RhymeSettings) -> Ancestors | None:
    """Return which earlier runs' responses the run can draft from; None where it keeps no history."""
    if not settings.keeps_history:
        return None
    try:
        return ancestors(settings.history, _tokenizer(args), may_resume=args.ckpt.load_enable)
    except ArchiveError as error:
        raise PreflightError(str(error)) from error


def _check_template(args: SimpleNamespace) -> None:
    template = args.data.input_template
    if not template or args.data.apply_chat_template:
        return
    try:
        template.format("a prompt")
    except (ValueError, LookupError, AttributeError) as error:
        reason = first_line(error)
        raise PreflightError(
            f"--data.input_template {template!r} cannot be filled in ({reason}): write {{}} where the prompt goes, and "
            "braces of the text twice"
        ) from error


def _tokenizer(args: SimpleNamespace) -> Any:
    from openrlhf.utils.utils import get_tokenizer

    path = args.actor.model_name_or_path
    try:
        tokenizer = get_tokenizer(path, None, "left", None, not args.data.disable_fast_tokenizer)
    except Exception as error:  # people's files, read by libraries that raise anything
        raise PreflightError(
            f"--actor.model_name_or_path: the tokenizer of {path} cannot be loaded ({_reason(error)})"
        ) from error
    if args.data.apply_chat_template and not getattr(tokenizer, "chat_template", None):
        raise PreflightError(
            f"--data.apply_chat_template: the tokenizer of {path} has no chat template; give --data.input_template, or "
            "a model with a template"
        )
    return tokenizer


def _check_prompts(flag: str, names: str, split: str, tokenizer: Any, args: SimpleNamespace) -> int:
    """Check that the prompts are there and fit; return how many there are."""
    paths = [name.split("@")[0].strip() for name in names.split(",")]
    for path in paths:
        if path.endswith(DATA_SUFFIXES):
            if not os.path.isfile(path):
                raise PreflightError(f"{flag}: {path} does not exist")
            if not os.path.getsize(path):
                raise PreflightError(f"{flag}: {path} is empty")
    if flag == TRAINING:
        _check_probabilities(args.data.prompt_probs, len(paths))
    rows = _load(flag, names, split, args)
    if not len(rows):
        raise PreflightError(f"{flag}: {names} has no rows")
    for key_flag, key in (("--data.input_key", args.data.input_key), ("--data.label_key", args.data.label_key)):
        if key not in rows.column_names and not (key is None and key_flag == "--data.label_key"):
            columns = ", ".join(rows.column_names)
            raise PreflightError(f"{flag}: {names} has no column {key!r} ({key_flag}); its columns are: {columns}")
    _check_rows(flag, names, rows, tokenizer, args)
    _check_labels(flag, names, rows, args)
    return len(rows)


def _check_probabilities(probabilities: str | None, data_sets: int) -> None:
    if probabilities is None:
        return
    flag = f"--data.prompt_probs {probabilities}"
    try:
        shares = [float(share) for share in probabilities.split(",")]
    except ValueError as error:
        raise PreflightError(f"{flag} must be numbers with commas between them") from error
    if len(shares) != data_sets:
        raise PreflightError(
            f"{flag} has {len(shares)} numbers, but {TRAINING} names {data_sets} data sets: give one for each"
        )
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise PreflightError(f"{flag} must be shares from 0 to 1 that add up to 1")


def _load(flag: str, names: str, split: str, args: SimpleNamespace) -> Any:
    """Load the rows with upstream's own function."""
    import datasets
    from openrlhf.datasets.utils import blending_datasets

    datasets.disable_progress_bars()
    quiet = SimpleNamespace(print=lambda *_: None, is_rank_0=lambda: False, args=args)
    try:
        rows = blending_datasets(
            names, args.data.prompt_probs if flag == TRAINING else None, quiet, args.train.seed,
            max_count=args.data.max_samples, dataset_split=split,
        )  # fmt: skip
        return rows.select(range(min(args.data.max_samples, len(rows))))
    except Exception as error:  # people's files, read by libraries that raise anything
        if isinstance(error, AttributeError) and "DatasetDict" in str(error):
            reason = f"it has no split {split!r} ({SPLIT_FLAGS[flag]}); the rows of a file are its split 'train'"
        elif not all(name.strip() for name in names.split(",")):
            reason = "it names nothing before or behind a comma"
        else:
            reason = _reason(error)
        raise PreflightError(f"{flag}: {names} cannot be loaded: {reason}") from error


def _check_rows(flag: str, names: str, rows: Any, tokenizer: Any, args: SimpleNamespace) -> None:
    limit = args.data.max_len - (args.rollout.max_new_tokens or 1)
    if limit < 1:
        raise PreflightError(
            f"--rollout.max_new_tokens {args.rollout.max_new_tokens} leaves no room for a prompt in --data.max_len "
            f"{args.data.max_len}"
        )
    vocabulary = _vocabulary(args)
    # Otherwise the tokenizer has no token that the model lacks.
    has_more = len(tokenizer) > vocabulary
    prompts = _texts(flag, names, rows, tokenizer, args)
    for row, prompt in _with_progress(prompts, f"rhyme train: {flag}: checked row {{}} of {len(rows):,}"):
        # A token covers at least one byte, so most prompts need not be tokenized to know that they fit.
        if prompt and len(prompt.encode(errors="replace")) <= limit and not has_more and not prompt.isspace():
            continue
        where = f"{flag}: the prompt in row {row} of {names}"
        try:
            tokens = _tokens(prompt, tokenizer)
        except Exception as error:  # a tokenizer may be code of the model's
            raise PreflightError(f"{where} cannot be tokenized ({_reason(error)})") from error
        if not tokens:
            raise PreflightError(f"{where} is empty: leave the row out")
        if len(tokens) > limit:
            raise PreflightError(
                f"{where} has {len(tokens)} tokens, but --data.max_len {args.data.max_len} less "
                f"--rollout.max_new_tokens {args.rollout.max_new_tokens or 1} leaves {limit}: raise --data.max_len, or "
                "shorten the prompt"
            )
        if max(tokens) >= vocabulary:
            raise PreflightError(
                f"{where} has the token {max(tokens)}, but the model has {vocabulary}: the tokenizer is another model's"
            )


def _check_labels(flag: str, names: str, rows: Any, args: SimpleNamespace) -> None:
    """Raise PreflightError that names the row whose label cannot be sent to a reward server.

    A reward function or an agent gets any label as it is, so nothing is wrong with one there. Images are not checked:
    OpenRLHF ignores them for a model of text, and leaves out those that it cannot load.
    """
    key, by_function = args.data.label_key, args.train.agent_func_path
    urls = [path for path in args.reward.remote_url or () if path.startswith("http")]
    if key is None or by_function or not urls:
        return
    for row, label in enumerate(rows.select_columns(key), start=1):
        try:
            json.dumps(label[key])
        except (TypeError, ValueError) as error:
            raise PreflightError(
                f"{flag}: row {row} of {names} has {_shown(label[key])} in {key!r}, which cannot be sent to the reward "
                f"server as JSON ({first_line(error)}): make it a text"
            ) from error


def _with_progress(prompts: Iterable[str], form: str) -> Iterator[tuple[int, str]]:
    """Yield the prompts with their numbers (from 1); print `form` with the number every PROGRESS_SECONDS."""
    told = time.monotonic()
    for row, prompt in enumerate(prompts, start=1):
        if not row % PROGRESS_ROWS and time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            print(form.format(f"{row:,}"), file=sys.stderr, flush=True)
        yield row, prompt


def _vocabulary(args: SimpleNamespace) -> int:
    """Return how many tokens the model has an embedding for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.actor.model_name_or_path, trust_remote_code=True)
    return int(config.get_text_config().vocab_size)


def _texts(flag: str, names: str, rows: Any, tokenizer: Any, args: SimpleNamespace) -> Iterator[str]:
    """Yield the prompts of rows as upstream builds them. Raises PreflightError that names the row."""
    from openrlhf.datasets.prompts_dataset import preprocess_data

    key, template = args.data.input_key, tokenizer.apply_chat_template if args.data.apply_chat_template else None
    # Other columns may be images, which would be decoded.
    read = iter(rows.select_columns(key))
    for number in range(1, len(rows) + 1):
        where = f"{flag}: row {number} of {names}"
        try:
            row = next(read)
        except Exception as error:  # a file's bytes may be no text, which is seen only here
            raise PreflightError(f"{where} cannot be read ({_reason(error)})") from error
        given = row[key]
        if template is None and isinstance(given, list):
            raise PreflightError(f"{where} has messages in {key!r} instead of a text: give --data.apply_chat_template")
        if not isinstance(given, str | list) or (isinstance(given, list) and not given):
            raise PreflightError(f"{where} has {_shown(given)} in {key!r}, which must be a text")
        try:
            prompt, _ = preprocess_data(row, args.data.input_template, key, None, template)
        except Exception as error:  # a chat template is a program of the model's
            raise PreflightError(f"{where} does not go into the chat template ({_reason(error)})") from error
        yield prompt


def _tokens(prompt: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text=prompt, add_special_tokens=False)["input_ids"])


def _reason(error: Exception) -> str:
    # `datasets` hides what is wrong with a file behind "An error occurred while generating the dataset".
    cause = error.__cause__
    return first_line(cause if isinstance(cause, Exception) else error)


def _shown(value: object) -> str:
    """Return a value of a row as messages show it."""
    return "nothing" if value is None else repr(value)[:60]
