"""Checks before anything is started, so that bad input costs a sentence and not a cluster's minutes.

Each check raises PreflightError with one sentence: what is wrong, where, what to do. Upstream's own argument checks
have run before (`cli/upstream.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from rhyme_openrlhf.cli.preflight_data import check_data, check_earlier
from rhyme_openrlhf.cli.preflight_layouts import check_layouts
from rhyme_openrlhf.cli.preflight_models import (
    PreflightError,
    check_hybrid,
    check_model,
    check_profile,
    check_source,
    check_tensor_parallel,
)
from rhyme_openrlhf.cli.preflight_outputs import check_outputs
from rhyme_openrlhf.cli.preflight_runner import choose_runner
from rhyme_openrlhf.history.lineage import Ancestors
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.latency import AUTO, NONE
from rhyme_openrlhf.settings.upstream_ranges import misplaced
from rhyme_openrlhf.settings.weights import OPENRLHF

# OpenRLHF's default of --vllm.sync_backend.
SYNC_BACKEND = "nccl"
# Importing a reward file may import torch or a tokenizer; more than this means it does not come back.
IMPORT_TIMEOUT_SECONDS = 180

# Run in a process of its own: a user's file may do anything when it is imported.
IMPORTED = "imported to its end"
_IMPORT_FILE = """
import importlib.util, inspect, sys
from rhyme_openrlhf.platform import gpu_present, shims
if not gpu_present(): shims.install()
path, wanted = sys.argv[1:3]
spec = importlib.util.spec_from_file_location("user_file", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
found = getattr(module, wanted, None)
if not callable(found): sys.exit(f"it defines no {wanted}")
if wanted == "reward_func":
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        sys.exit("its reward_func must return rewards, and neither await nor yield")
    try: signature = inspect.signature(found)
    except ValueError: signature = None
    try: signature and signature.bind([], [], [])
    except TypeError: sys.exit(f"its reward_func{signature} must take three arguments: queries, prompts, labels")
print()
print(sys.argv[3])
"""


@dataclass(frozen=True)
class Checked:
    """Results of the checks: the number of training prompts, and the layouts of engines, None for one layout.

    `ancestors`: the earlier runs that it can draft from, None where it keeps no history.

    `said`: sentences for the user: on the memory of several layouts, the choice of a model runner, and disk space.
    """

    prompts: int
    layouts: LayoutPlan | None = None
    said: tuple[str, ...] = ()
    ancestors: Ancestors | None = None


def check(args: SimpleNamespace, on_gpus: bool = False) -> Checked:
    """Run all checks on upstream's nested arguments. Raises PreflightError for the first that fails.

    Decides 'auto' of --weights.transport and --drafting.runner in `args`. `on_gpus` is `platform.run_has_gpus()`.
    """
    if sentence := misplaced(args):
        raise PreflightError(sentence)
    layouts, said = check_features(args, on_gpus)
    _check_reward(args)
    critic = args.critic.model_name_or_path
    if critic and critic != args.actor.model_name_or_path:
        check_model("--critic.model_name_or_path", critic)
    space = check_outputs(args)
    prompts = check_data(args)
    earlier = check_earlier(args, RhymeSettings.from_namespace(args))
    return Checked(prompts, layouts, (*said, space) if space else said, earlier)


def check_features(args: SimpleNamespace, on_gpus: bool = False) -> tuple[LayoutPlan | None, tuple[str, ...]]:
    """Check the model and which features go together; return layouts and sentences, as `Checked`.

    Decides 'auto' of --weights.transport and --drafting.runner in `args`. Raises PreflightError.
    """
    decided = RhymeSettings.from_namespace(args).with_transport(on_gpus, lora=args.ds.lora.rank > 0)
    args.weights.transport = decided.weights.transport
    config = check_model("--actor.model_name_or_path", args.actor.model_name_or_path)
    check_tensor_parallel(args, config)
    check_profile(args, config, decided.drafting)
    check_source(args, config, decided)
    args.drafting.runner, why = choose_runner(decided, on_gpus)
    check_hybrid(args, config)
    _check_reallocation(args)
    layouts, said = check_layouts(args, config, on_gpus)
    _check_transport(args, on_gpus)
    _check_pipeline(args)
    return layouts, tuple(filter(None, (said, why, _ignored(args))))


def _check_reallocation(args: SimpleNamespace) -> None:
    if not args.reallocation.enable:
        return
    if args.vllm.num_engines < 2:
        raise PreflightError("--reallocation.enable needs two engines to move samples between: --vllm.num_engines is 1")
    # Only an engine that speculates can measure its own step times.
    missing = args.latency.profile == NONE or (args.latency.profile == AUTO and not args.histospec.enable)
    if missing and not args.emulate.profile and not args.reallocation.threshold:
        raise PreflightError(
            "--reallocation.enable needs step times to find how many samples an engine should run: give a file of "
            "`rhyme profile` as --latency.profile, or the number as --reallocation.threshold"
        )


def _check_transport(args: SimpleNamespace, on_gpus: bool) -> None:
    by_buffer = args.weights.transport != OPENRLHF
    if by_buffer and args.ds.tensor_parallel_size > 1:
        raise PreflightError(
            "--ds.tensor_parallel_size above 1 needs --weights.transport openrlhf, which is the default on GPUs "
            "without --move.enable, --reallocation.enable, --tp_switch.enable, --histopipe.enable and --ds.lora.rank"
        )
    if args.ds.load_in_4bit and args.ds.lora.rank > 0:
        raise PreflightError(
            "--ds.load_in_4bit does not go with --ds.lora.rank: the weight buffer adds adapters to the weights, which "
            "are packed in 4 bits; leave one of the two out"
        )
    if not by_buffer and args.ds.lora.rank > 0:
        raise PreflightError(
            "--ds.lora.rank above 0 needs --weights.transport buffer (or auto), because OpenRLHF's own transport sends "
            "adapters that vLLM cannot load"
        )
    if not by_buffer and args.train.colocate_all and not on_gpus:
        raise PreflightError(
            "--train.colocate_all with --weights.transport openrlhf needs GPUs, because OpenRLHF then shares weights "
            "by CUDA IPC: use --weights.transport buffer (or auto)"
        )


def _ignored(args: SimpleNamespace) -> str:
    """Return a sentence on given options that do nothing in this run; "" for none."""
    if args.weights.transport == OPENRLHF:
        return ""
    given = [f"--vllm.sync_backend {args.vllm.sync_backend}"] if args.vllm.sync_backend != SYNC_BACKEND else []
    given += ["--vllm.sync_with_ray"] if args.vllm.sync_with_ray else []
    if not given:
        return ""
    return f"{' and '.join(given)} {'have' if given[1:] else 'has'} no effect: the weight buffer carries the weights"


# What the streaming pipeline cannot go together with: whether it is asked for, and why not.
_NOT_PIPELINED: tuple[tuple[Callable[[SimpleNamespace], bool], str], ...] = (
    (lambda a: not a.train.async_enable, "needs --train.async_enable: it trains one step off policy"),
    (
        lambda a: a.train.async_queue_size > 1,
        "does not go with --train.async_queue_size above 1: samples would be more than one step off policy",
    ),
    (
        lambda a: (a.rollout.vllm_generate_batch_size or 0) > 2 * a.rollout.batch_size,
        "does not go with --rollout.vllm_generate_batch_size above twice --rollout.batch_size: engines have two steps' "
        "prompts, and samples generated further ahead would be more than one step off policy",
    ),
    (
        lambda a: a.train.partial_rollout_enable,
        "does not go with --train.partial_rollout_enable: engines load weights between two steps, never within one",
    ),
    (
        lambda a: a.algo.dynamic_filtering_enable and a.histopipe.defer,
        "does not go with --algo.dynamic_filtering_enable and --histopipe.defer together: both take prompt groups of "
        "the next step",
    ),
    (
        lambda a: a.train.colocate_all,
        "does not go with --train.colocate_all: engines generate beside training",
    ),
    (lambda a: a.weights.transport == OPENRLHF, "needs --weights.transport buffer, from which engines load"),
    (
        lambda a: a.run.reproducible,
        "does not go with --run.reproducible: which weights are newest depends on timing",
    ),
    (
        lambda a: a.reallocation.enable,
        "does not go with --reallocation.enable yet: what moves is decided by rank groups (--move.enable)",
    ),
    (
        lambda a: (a.move.enable or a.tp_switch.enable) and a.train.agent_func_path,
        "does not go with --train.agent_func_path together with --move.enable or --tp_switch.enable: a conversation "
        "that waits for its agent is in no turn",
    ),
)


def _check_pipeline(args: SimpleNamespace) -> None:
    if not args.histopipe.enable:
        return
    for asked, reason in _NOT_PIPELINED:
        if asked(args):
            raise PreflightError(f"--histopipe.enable {reason}")


def _check_reward(args: SimpleNamespace) -> None:
    if args.train.agent_func_path:
        _check_import("--train.agent_func_path", args.train.agent_func_path, "AgentExecutor")
        return
    for path in args.reward.remote_url or []:
        if path.endswith(".py"):
            _check_import("--reward.remote_url", path, "reward_func")
        elif not path.startswith(("http://", "https://")):
            raise PreflightError(
                f"--reward.remote_url: {path} is neither a .py file nor an address that begins with http:// or https://"
            )
    if not args.reward.remote_url and not args.reward.model_name_or_path:
        raise PreflightError(
            "there is no reward: give --reward.remote_url (a .py file with reward_func, or a URL), "
            "--reward.model_name_or_path or --train.agent_func_path"
        )
    if not args.reward.remote_url:
        check_model("--reward.model_name_or_path", args.reward.model_name_or_path)


def _check_import(flag: str, path: str, wanted: str) -> None:
    if not os.path.isfile(path):
        raise PreflightError(f"{flag}: {path} does not exist")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT_FILE, path, wanted, IMPORTED],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise PreflightError(f"{flag}: importing {path} did not end within {IMPORT_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PreflightError(f"{flag}: {path} cannot be imported: {last}")
    if not done.stdout.rstrip().endswith(IMPORTED):
        raise PreflightError(f"{flag}: {path} ends the process when it is imported (sys.exit or os._exit)")
