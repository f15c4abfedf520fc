"""Write which features go together into docs/guides/features.md, as `rhyme train` decides it before a start.

Each cell is one call of the checks before a run, with the demo's model and prompts on pretended GPUs: "yes", the number
of the sentence that refuses the pair, or "–" where one excludes the other by its meaning. `--write` changes the page; a
test compares the two.
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
    """A feature or a mode of OpenRLHF's, by the flags that switch it on; features of one kind exclude each other."""

    name: str
    flags: str
    kind: str = ""


# Reallocation and TP switching get their thresholds by a flag, so that they need no profile.
TP_SWITCH = "--tp_switch.enable --tp_switch.samples 4 --tp_switch.device_mb 80000"
OURS = (
    Feature("drafts from history", "", "drafts"),
    Feature("n-gram drafts", "--drafting.source ngram", "drafts"),
    Feature("draft model, EAGLE", f"--drafting.source draft_model --drafting.model {embedded.DRAFT_MODEL}", "drafts"),
    Feature(
        "history and a draft model",
        f"--drafting.source history+draft_model --drafting.model {embedded.DRAFT_MODEL}",
        "drafts",
    ),
    Feature("no drafts", "--no-histospec.enable", "drafts"),
    Feature("pipeline", "--train.async_enable --histopipe.enable", "pipeline"),
    Feature("pipeline with deferral", "--train.async_enable --histopipe.enable --histopipe.defer", "pipeline"),
    Feature("moves", "--move.enable"),
    Feature("reallocation", "--reallocation.enable --reallocation.threshold 8"),
    Feature("TP switching", TP_SWITCH, "switching"),
    Feature("TP switching, KV caches in turns", f"{TP_SWITCH} --tp_switch.kv_caches turns", "switching"),
    Feature("reproducible", "--run.reproducible"),
)
UPSTREAM = (
    Feature("synchronous", "", "loop"),
    Feature("asynchronous", "--train.async_enable"),
    Feature("partial rollout", "--train.async_enable --train.partial_rollout_enable"),
    Feature("oversampling", "--train.async_enable --rollout.vllm_generate_batch_size 24"),
    Feature("colocated, with sleep", "--train.colocate_all --vllm.enable_sleep --ds.enable_sleep"),
    Feature("dynamic filtering", "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1"),
    Feature("evaluation", f"--eval.steps 2 --eval.dataset {embedded.DATA}"),
    Feature("agent", "--train.agent_func_path AGENT"),
    Feature("images (vision)", "--data.max_images_per_prompt 1"),
    Feature(
        "critic (GAE)",
        f"--algo.advantage.estimator gae --critic.model_name_or_path {embedded.MODEL} --critic.num_gpus_per_node 1",
    ),
    Feature("reward model", f"--reward.model_name_or_path {embedded.MODEL}"),
    Feature("LoRA", "--ds.lora.rank 8"),
    Feature("4-bit weights", "--ds.load_in_4bit"),
    Feature("policy over several GPUs (`--ds.tensor_parallel_size`)", "--ds.tensor_parallel_size 2"),
    Feature("packing, ring attention", "--ds.packing_samples --ds.ring_attn_size 2"),
)  # fmt: skip
# Why a pair is refused, by words of its sentence.
SENSELESS, NOT_BUILT, UPSTREAM_REFUSES = "makes no sense", "not built", "OpenRLHF refuses it"
WHY = {
    "OpenRLHF: ": UPSTREAM_REFUSES,
    "needs speculation": SENSELESS,
    "does not go with --tp_switch.enable yet": NOT_BUILT,
    "does not go with --reallocation.enable yet": NOT_BUILT,
    "does not go with --run.reproducible": SENSELESS,
    "does not go with --train.partial_rollout_enable": SENSELESS,
    "needs --weights.transport openrlhf": NOT_BUILT,
    "does not go with --algo.dynamic_filtering_enable and --histopipe.defer": NOT_BUILT,
    "only in the streaming pipeline": SENSELESS,
    "with KV caches in turns does not go": NOT_BUILT,
}


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


def why(sentence: str) -> str:
    """Return why a pair with this sentence is refused. Raise ValueError for a sentence that is not in WHY."""
    for words, reason in WHY.items():
        if words in sentence:
            return reason
    raise ValueError(f"WHY in scripts/feature_table.py has no entry for: {sentence}")


def table(folder: Path) -> str:
    """Return the tables of pairs, and the sentences that their numbers stand for."""
    sentences: list[str] = []

    def cell(one: Feature, other: Feature) -> str:
        if one.name == other.name or (one.kind and one.kind == other.kind):
            return "–"
        if one.name == "synchronous" and "--train.async_enable" in other.flags:
            return "–"
        sentence = re.sub(re.escape(str(folder)) + r"/?", "", refusal(folder, one, other))
        if sentence and sentence not in sentences:
            sentences.append(sentence)
        return f"[{sentences.index(sentence) + 1}]" if sentence else "yes"

    def rows(lines: tuple[Feature, ...]) -> list[str]:
        head = f"| | {' | '.join(feature.name for feature in OURS)} |"
        body = [f"| **{one.name}** | {' | '.join(cell(one, other) for other in OURS)} |" for one in lines]
        return [head, "|---" * (len(OURS) + 1) + "|", *body]

    text = ["Ours with ours:", "", *rows(OURS), "", "OpenRLHF's modes with ours:", "", *rows(UPSTREAM), ""]
    text += ["| number | refused with | why |", "|---|---|---|"]
    refused = [f"| {number} | {sentence} | {why(sentence)} |" for number, sentence in enumerate(sentences, 1)]
    return "\n".join([*text, *refused, ""])


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
