"""A run's history workers as its driver sees them: start them, call the owner of each prompt, stop them.

Invariant: no call waits without a limit, and a worker that is gone or does not answer costs drafts and order alone.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.history.journal import TOKEN_BYTES
from rhyme_openrlhf.history.lineage import Lineage
from rhyme_openrlhf.history.worker import GB, HistoryWorker, WorkerPlace
from rhyme_openrlhf.prompt_keys import evaluation_key, owner, prompt_key
from rhyme_openrlhf.ray_classes import WITHOUT_TORCH
from rhyme_openrlhf.settings.history import HistorySettings

# Enough to delete some ten thousand files. A worker that is busy longer leaves them in the run directory.
CLOSE_SECONDS = 10
# A hundred thousand records of earlier runs are found in two seconds; after this the run begins without.
KNOWN_TIMEOUT_SECONDS = 60.0


def start_history_workers(
    settings: HistorySettings,
    journals: Path,
    checkpoint: Sequence[Path] = (),
    recorder: str = "",
    lineage: Lineage | None = None,
) -> list[ray.actor.ActorHandle]:
    """Start the run's history workers, one node after the other; Ray restarts a dead worker without limit.

    - `journals`: the directory of this run for the workers' journals.
    - `checkpoint`: the files that the workers of the resumed run saved (`checkpoint_file`). Their number may differ
      from this run's.
    - `recorder`, `lineage`: the same as in `WorkerPlace`.
    """
    threads = str(max(1, int(settings.cpus_per_worker)))
    variables = {"OMP_NUM_THREADS": threads, **WITHOUT_TORCH}
    token = secrets.token_bytes(TOKEN_BYTES)
    nodes = _nodes(settings.cpus_per_worker)
    count = settings.workers_on(len(nodes))
    memory = int(settings.memory_gb * GB) // -(-count // len(nodes))
    spill: Path | None = journals / "spilled"
    # A directory that the user names may be shared by runs; the run's own is not.
    if settings.spill_dir:
        spill = Path(settings.spill_dir).absolute() / f"rhyme-{token.hex()}"
    elif len(nodes) > 1:
        # The run directory is often on a disk that all nodes share.
        spill = None
    workers = []
    for number in range(count):
        # Of as many workers each has a file of its own; of another number each gets all files.
        own = [path for path in checkpoint if path.name == checkpoint_file(number, count)]
        place = WorkerPlace(
            number,
            count,
            journals / f"worker-{number}.journal",
            token,
            tuple(own or checkpoint),
            memory,
            spill,
            settings,
            recorder,
            lineage,
        )
        workers.append(
            HistoryWorker.options(
                num_cpus=settings.cpus_per_worker,
                # A byte, because Ray puts an actor that reserves nothing on any node.
                memory=1,
                max_restarts=-1,
                # Soft, so that a worker whose node is lost is started elsewhere.
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    nodes[number % len(nodes)], soft=True, _spill_on_unavailable=True
                ),
                runtime_env={"env_vars": variables},
            ).remote(place)
        )
    return workers


def _nodes(cpus: float) -> list[str]:
    """Return Ray's ids of the nodes with at least this number of CPUs; of all nodes where none has it."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    fit = [node for node in alive if node["Resources"].get("CPU", 0.0) >= cpus]
    return sorted(node["NodeID"] for node in fit or alive)


def checkpoint_file(number: int, workers: int) -> str:
    """Return the name of a worker's file in a checkpoint."""
    return f"history-{number}-of-{workers}"


def last_lengths(
    workers: Sequence[ray.actor.ActorHandle],
    prompt_keys: Sequence[str],
    timeout_s: float,
    missed: Callable[[Exception], None] = lambda error: None,
) -> list[tuple[int, ...]]:
    """Return each prompt's response lengths in its last rollout (`HistoryShard.last_lengths`), from its worker.

    The planner of a rollout calls this before the rollout. If a worker is gone or does not answer in time, its prompts
    have no history, as if they were never seen, and `missed` gets the error.
    """
    found: list[tuple[int, ...]] = [()] * len(prompt_keys)
    places: dict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(prompt_keys if workers else ()):
        places[owner(key, len(workers))].append(place)
    asked = {workers[n].last_lengths.remote([prompt_keys[place] for place in of]): of for n, of in places.items()}
    if asked:
        ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    for answer, of in asked.items():
        try:
            for place, lengths in zip(of, ray.get(answer, timeout=0), strict=True):
                found[place] = lengths
        except ray.exceptions.RayError as error:
            missed(error)
    return found


def _shares(keys: Iterable[str], workers: Sequence[Any]) -> dict[int, list[str]]:
    """Return the keys of each worker that has some, by its number."""
    found: dict[int, list[str]] = defaultdict(list)
    for key in keys:
        found[owner(key, len(workers))].append(key)
    return found


def announce(prompts: Sequence[str], workers: Sequence[Any], step: int, evaluation: bool = False) -> None:
    """Tell each history worker, without waiting, which of its prompts engines will ask for in training step `step`.

    Or in an `evaluation` after that step.
    """
    for number, keys in _shares(map(prompt_key, prompts if workers else ()), workers).items():
        workers[number].prepare.remote([evaluation_key(key) for key in keys] if evaluation else keys, step)


def known_earlier(keys: list[str], workers: Sequence[Any], named: bool) -> list[str]:
    """Return one sentence for each earlier run that has responses to some of these prompts.

    `named`: the user has named runs, so that nothing found is also told.
    """
    asked = [workers[number].known_earlier.remote(share) for number, share in _shares(keys, workers).items()]
    try:
        answers = ray.get(asked, timeout=KNOWN_TIMEOUT_SECONDS)
    except ray.exceptions.RayError:
        return ["the history workers are still reading what earlier runs have left"]
    prompts: Counter[tuple[str, str]] = Counter()
    rollouts: Counter[tuple[str, str]] = Counter()
    for known in (known for answer in answers for known in answer):
        run = known.archive, known.run
        prompts[run] += known.prompts
        rollouts[run] = max(rollouts[run], known.rollouts)
    if not prompts and named:
        return ["no prompt is known from the runs of --history.earlier"]
    return [
        f"{count} of {len(keys)} prompts known from run {run[1]}, "
        + (f"epochs 1 to {rollouts[run]}" if rollouts[run] > 1 else "one epoch")
        for run, count in prompts.most_common()
    ]


def stop_history_workers(workers: Sequence[ray.actor.ActorHandle]) -> None:
    """Make the workers delete their files, as far as they answer; their processes end with the run."""
    if not workers:
        return
    with suppress(ray.exceptions.RayError):
        ray.wait([worker.close.remote() for worker in workers], num_returns=len(workers), timeout=CLOSE_SECONDS)
