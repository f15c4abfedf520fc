"""Write which features go together into docs/guides/features.md, as `rhyme train` decides it before a start.

Each cell is one call of the checks before a run, with the demo's model and prompts on pretended GPUs: "yes", or the
number of the sentence that refuses the pair. `--write` changes the page; a test compares the two.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import preflight, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.settings.options import SettingsError

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "features.md"
BEGIN, END = "<!-- combinations: begin -->\n", "<!-- combinations: end -->"
AGENT = "class AgentExecutor:\n    pass\n"


class Feature(NamedTuple):
    """A feature or a mode of OpenRLHF's, by the flags that switch it on."""

    name: str
    flags: str


# Reallocation and TP switching get their thresholds by a flag, so that they need no profile.
OURS = (
    Feature("drafts from history", ""),
    Feature("n-gram drafts", "--drafting.source ngram"),
    Feature("no drafts", "--no-histospec.enable"),
    Feature("pipeline", "--train.async_enable --histopipe.enable"),
    Feature("pipeline with deferral", "--train.async_enable --histopipe.enable --histopipe.defer"),
    Feature("moves", "--move.enable"),
    Feature("reallocation", "--reallocation.enable --reallocation.threshold 8"),
    Feature("TP switching", "--tp_switch.enable --tp_switch.samples 4 --tp_switch.device_mb 80000"),
    Feature("rehearsal", "--rehearsal.enable"),
    Feature("reproducible", "--run.reproducible"),
)
UPSTREAM = (
    Feature("synchronous", ""),
    Feature("asynchronous", "--train.async_enable"),
    Feature("partial rollout", "--train.async_enable --train.partial_rollout_enable"),
    Feature("colocated, with sleep", "--train.colocate_all --vllm.enable_sleep --ds.enable_sleep"),
    Feature("LoRA", "--ds.lora.rank 8"),
    Feature("policy over several GPUs (`--ds.tensor_parallel_size`)", "--ds.tensor_parallel_size 2"),
    Feature("agent", "--train.agent_func_path AGENT"),
    Feature("dynamic filtering", "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1"),
    Feature("critic (GAE)", f"--algo.advantage.estimator gae --critic.model_name_or_path {embedded.MODEL}"),
)  # fmt: skip


def refusal(folder: Path, *features: Feature) -> str:
    """Return the sentence that refuses these features together, "" where they go together."""
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    flags = " ".join(feature.flags for feature in features).replace("AGENT", str(agent)).split()
    engines = ["--vllm.num_engines", "2", "--actor.num_gpus_per_node", "2"]
    try:
        preflight.check_features(upstream.parse([*arguments(str(folder)), *engines, *flags]), on_gpus=True)
    except (preflight.PreflightError, SettingsError) as error:
        return str(error)
    except upstream.ArgumentsError as error:
        return f"OpenRLHF: {error}"
    return ""


def table(folder: Path) -> str:
    """Return the tables of pairs, and the sentences that their numbers stand for."""
    sentences: list[str] = []

    def cell(one: Feature, other: Feature) -> str:
        if one.name == other.name:
            return "–"
        if other.name == "synchronous" and "--train.async_enable" in one.flags:
            return "asynchronous alone"
        sentence = re.sub(re.escape(str(folder)) + r"/?", "", refusal(folder, one, other))
        if sentence and sentence not in sentences:
            sentences.append(sentence)
        return f"[{sentences.index(sentence) + 1}]" if sentence else "yes"

    def rows(columns: tuple[Feature, ...]) -> list[str]:
        head = f"| | {' | '.join(feature.name for feature in columns)} |"
        lines = [f"| **{one.name}** | {' | '.join(cell(one, other) for other in columns)} |" for one in OURS]
        return [head, "|---" * (len(columns) + 1) + "|", *lines]

    text = ["Ours with ours:", "", *rows(OURS), "", "Ours with OpenRLHF's modes:", "", *rows(UPSTREAM), ""]
    return "\n".join([*text, *(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)), ""])


def main() -> int:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write into {PAGE.name}")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(sys.stdout if not write else None):
        made = table(Path(folder))
    if write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}")
    else:
        print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
