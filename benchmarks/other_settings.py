"""Does the history of a run help one that differs from it? Real runs are recorded, and replayed with each other.

    python benchmarks/other_settings.py --record       # makes the runs anew, and writes data/path-*.jsonl.xz
    python benchmarks/other_settings.py                # replays them: tokens a decode step by epoch (simulated)

No rule of drafts was chosen with these prompts or runs in view. They are twelve problems of the kind `path`, of middle
length, three epochs of two steps, eight samples a prompt, two engines. `base` is the earlier run. Each of the others
has another seed, and differs from it in one more thing:

- `learning rate`: a quarter of it.
- `reward`: shorter right responses earn more.
- `further`: it begins with a model that other prompts have trained for four steps.
- `half new`: half of its prompts are others.

Each is replayed (replay.py) without and with `base`, with an index of the last rollout or of the last two. Its
evaluations of twelve other problems are replayed too, each with the one before.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from earlier_runs import flat, replayed, written
from replay import ENGINES, Ours, read_trace, replay, write_trace
from rollout import RUN_TIMEOUT_SECONDS

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.history.archive import ArchiveReader
from rhyme_openrlhf.history.record import Record, decode
from rhyme_openrlhf.history.store import archives_in
from rhyme_openrlhf.platform import run_gpus
from rhyme_openrlhf.prompt_keys import is_evaluation
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.history import NONE

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from embedded_tasks import STEP_COUNTS, Problem, jsonl, make_problem

DATA = Path(__file__).parent / "data"
BASE, FURTHER = "base", "further"
VARIANTS = ("learning-rate", "reward", FURTHER, "half-new")
KIND, QUANTILES, PROMPTS = "path", (0.35, 0.8), 12
COMMON = (
    "--rollout.batch_size", "6", "--rollout.n_samples_per_prompt", "8", "--train.batch_size", "48",
    "--train.num_episodes", "3", "--eval.steps", "2", "--eval.n_samples_per_prompt", "4", "--history.earlier", NONE,
)  # fmt: skip
REWARD = """
import torch
from rhyme_openrlhf.embedded.reward import score

def reward_func(queries, prompts, labels, **_):
    texts = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts)]
    rewards = [score(text, str(label)) * (1 - min(len(text), 500) / 1000) for text, label in zip(texts, labels)]
    found = torch.tensor(rewards, dtype=torch.float32)
    return {"rewards": found, "scores": found.clone(), "extra_logs": {}}
"""


def problems(seed: int) -> list[Problem]:
    """Return the problems of a seed, the same every time."""
    rng, (low, high) = random.Random(seed), QUANTILES
    places = ((number + 0.5) / PROMPTS for number in range(PROMPTS))
    return [make_problem(KIND, STEP_COUNTS[KIND].at(low + (high - low) * place), rng) for place in places]


def run(folder: Path, name: str, prompts: Sequence[Problem], seed: int, *options: str) -> list[Record]:
    """Make a run; return the records of its archive, evaluations too."""
    directory = folder / name
    directory.mkdir()
    for file, content in (("prompts", prompts), ("evaluated", problems(3))):
        (directory / f"{file}.jsonl").write_text(jsonl(content))
    argv = [*arguments(str(directory / "checkpoints"), run_gpus()), *COMMON, "--train.seed", str(seed)]
    argv += ["--data.prompt_dataset", str(directory / "prompts.jsonl")]
    argv += ["--eval.dataset", str(directory / "evaluated.jsonl"), *options]
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "train", *argv, "--run.dir", str(directory / "run")]
    subprocess.run([*command, "--run.progress", "lines"], check=True, timeout=RUN_TIMEOUT_SECONDS)
    (archive,) = archives_in(directory / "run")
    reader = ArchiveReader(archive)
    encoded = [reader.read(stored) for _, stored in reader.new()]
    return [decode(one) for one in encoded if one is not None]


def record(folder: Path) -> None:
    """Make all runs, and write their traces."""
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    mine = problems(1)
    run(folder, "before", problems(2), 9, "--train.num_episodes", "2", "--actor.adam.lr", "1e-4")
    further = str(folder / "before" / "checkpoints" / "trained")
    runs = {
        BASE: run(folder, BASE, mine, 1),
        "learning-rate": run(folder, "learning-rate", mine, 2, "--actor.adam.lr", "1e-4"),
        "reward": run(folder, "reward", mine, 3, "--reward.remote_url", str(reward)),
        FURTHER: run(folder, FURTHER, mine, 4, "--actor.model_name_or_path", further),
        "half-new": run(folder, "half-new", [*mine[::2], *problems(4)[1::2]], 5),
    }  # fmt: skip
    for name, records in runs.items():
        write_trace(records, path_of(name))


def path_of(name: str) -> Path:
    """Return the trace of a run."""
    return DATA / f"{KIND}-{name}.jsonl.xz"


def parts(name: str) -> tuple[list[list[Record]], list[list[Record]]]:
    """Return the records of a run's training steps, and those of its evaluations."""
    steps: list[list[Record]] = []
    evaluations: list[list[Record]] = []
    for records in read_trace(path_of(name)):
        trained = [one for one in records if not is_evaluation(one.prompt_key)]
        evaluated = [one for one in records if is_evaluation(one.prompt_key)]
        steps += [trained] if trained else []
        evaluations += [evaluated] if evaluated else []
    return steps, evaluations


def figures(totals: Sequence[Counter[str]]) -> str:
    """Return tokens a step, with drafted tokens, of each epoch."""
    return "  ".join(f"{total['tokens'] / total['samples']:5.2f} ({total['drafted']:6,})" for total in totals)


def show(folder: Path) -> None:
    """Print all replays."""
    base = written(folder, BASE, flat(parts(BASE)[0]), 1.0)
    said: list[str] = []
    for name in (BASE, *VARIANTS):
        steps, evaluations = parts(name)
        for arm, archives in (("cold", []), ("with base", [base])) if name != BASE else (("cold", []),):
            print(f"{name:14s} {arm:22s} {figures(replayed(steps, archives, ENGINES, said.append))}")
        for rollouts in (1, 2):
            drafters = [Ours(HistoSpecSettings(), rollouts=rollouts) for _ in range(ENGINES)]
            print(f"{name:14s} {f'own rollouts: {rollouts}':22s} {figures(replay(steps, list(drafters)))}")
        for arm, rollouts in (("evaluations, without", 0), ("evaluations, with", 1)):
            drafters = [Ours(HistoSpecSettings(), rollouts=rollouts) for _ in range(ENGINES)]
            print(f"{name:14s} {arm:22s} {figures(replay(evaluations, list(drafters)))}", flush=True)
    print(*said, sep="\n")


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="make the runs and their traces anew")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rhyme-other-settings-") as folder:
        if chosen.record:
            record(Path(folder))
        show(Path(folder))


if __name__ == "__main__":
    main()
