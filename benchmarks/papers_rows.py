"""A row for each figure and table of the three papers, from the tables that were simulated before."""

from __future__ import annotations

from typing import Any

from papers_inputs import end_to_end, spread
from papers_rlhfspec import middle_of

OWN_RUN = "[a run of ours](measurements/history.md#rhymerls-figures-of-a-run-of-ours)"


def every_figure(found: dict[str, Any]) -> str:
    """Return a row for each figure and table of the three papers."""
    pat_most = found["pat"][-1]["seconds"]
    pat_theirs = spread([end_to_end(row[0] / row[2], 0.817) for row in pat_most])
    others = {row["figure"][:3]: row["seconds"] for row in found["pat-others"]}
    gains = {
        name: spread([end_to_end(row[0] / row[2], share) for row in others[name]])
        for name, share in (("10b", 0.817), ("10c", 0.817), ("11a", 0.779), ("11b", 0.702))
    }
    middle = middle_of(found)
    spec, selection, moved = middle["gains"][1:]
    batch = next(row for row in found["rhymerl-batches"] if row["rollouts"] == 1024)
    models = [row["gain"] for row in found["rhymerl-models"]]
    ranks = found["rhymerl-ranks"]
    calculated = found["arithmetic"]
    column = found["rhymerl"]["samples_per_second"][0]
    fifteen = found["rhymerl"]["seconds_of_8_steps"][0]
    most = [max(a / b for a, b in zip(fifteen[row - 1], fifteen[row], strict=True)) for row in (1, 2)]
    drawing = ("a drawing, a list or an algorithm", "nothing to compare", "")
    migrated = ", ".join(f"{share:.1%}" for share in found["rhymerl"]["migrated"])
    migrated += " (3, 10, 30 % of the variance within a prompt)"
    rows: list[tuple[str, str, str, str]] = [
        ("RhymeRL 1, 4, 5, 7, 10, 11, 12; tables 1, 3", *drawing),
        ("RhymeRL 2", "rollout 84 to 91 % of a step", "taken as an input: 87.5 %", "assumed"),
        ("RhymeRL 3", "mean length 1K to 10K in 320 steps; idle 76 %", "lengths taken as an input", "assumed"),
        ("RhymeRL section 1", "over 46 % idle", f"{batch['idle']:.0%} at 1,024 rollouts an engine", "simulated"),
        ("RhymeRL 6", "93 % found (math), 75 % (code)", f"84 to 91 %, {OWN_RUN}", "measured"),
        ("RhymeRL 8", "hit lengths", f"drawn of {OWN_RUN}", "measured"),
        (
            "RhymeRL 9, table 2",
            "79.0 to 85.7 % in their group or a shorter one (8 groups), 71.6 to 79.7 % (16)",
            " and ".join(f"{ranks[groups]['predicted'][0]:.1%}" for groups in (8, 16)) + "; the other rows below",
            "arithmetic",
        ),
        ("RhymeRL 13", "1.9x at 8K, 2.3x at 16K (mean)", f"{min(models):.2f} to {max(models):.2f}x", "simulated"),
        (
            "RhymeRL 14",
            "1.43x, 1.10x, 1.50x",
            ", ".join(f"{column[row] / column[row - 1]:.2f}x" for row in (1, 2, 3))
            + f"; at 1,024 an engine {batch['gains'][1]:.2f}x, {batch['gains'][2] / batch['gains'][1]:.2f}x, "
            f"{batch['gains'][3] / batch['gains'][2]:.2f}x",
            "simulated",
        ),
        ("RhymeRL 15", "1.68x, 1.14x (most)", f"{most[0]:.2f}x, {most[1]:.2f}x", "simulated"),
        ("RhymeRL 16", "1.86x (most)", f"step by step 2.15x (1.28 to 4.08), {OWN_RUN}", "measured"),
        ("RhymeRL 17", "65 to 79 % accepted", f"54 to 84 % from epoch 2, {OWN_RUN}", "measured"),
        ("RhymeRL 18", "2.2 to 5.5 % migrated (math)", migrated, "simulated"),
        (
            "RhymeRL 19",
            "rewards overlap",
            "difference 0.028, standard error 0.025 ([learning](measurements/scheduling.md))",
            "measured",
        ),
        ("RhymeRL section 7.4", "1.80 to 1.86x by HistoSpec", "the table by batch, below", "simulated"),
        ("RLHFSpec 1, 6, 7, 8, 10", *drawing),
        ("RLHFSpec 2, 3", "lengths; generation 68.4 %", "taken as inputs", "assumed"),
        (
            "RLHFSpec 4, table 1",
            "95.5 to 99.9 % of the best fixed n",
            "103 to 126 % ([budget](measurements/drafts.md))",
            "measured",
        ),
        ("RLHFSpec 5, 9", "24 + 1 samples become 19 + 6", f"{calculated['moved']} samples moved", "arithmetic"),
        (
            "RLHFSpec section 3.3",
            "1.40x by these five",
            "1.47x (1.46 to 1.48) ([moves](measurements/moves.md))",
            "emulated",
        ),
        ("RLHFSpec 11", "2.02x, 1.97x (most, against Speculative)", f"{moved / spec:.2f}x", "simulated"),
        ("RLHFSpec 12", "1.37x, 1.35x (most)", f"{calculated['rlhfspec-12']:.2f}x", "arithmetic"),
        ("RLHFSpec 13", "1.18x, 1.95x, 2.32x", f"{spec:.2f}x, {selection:.2f}x, {moved:.2f}x", "simulated"),
        (
            "RLHFSpec 7.2, 7.3, against OpenRLHF",
            "generation 2.52x (LMSYS), 2.65x (GSM8K); whole steps 3.01x, 2.97x",
            "rollouts 2.11x, whole steps 1.40x from epoch 2 on, with history instead of EAGLE "
            "([speed](measurements/speed.md))",
            "measured",
        ),
        (
            "RLHFSpec 7.7",
            "budget, reallocation and prediction cost 3.87 % of the generation",
            "reports, decisions and copies of reallocation 0.55 % ([moves](measurements/moves.md))",
            "emulated",
        ),
        ("RLHFSpec 14", "1.19x by five moved samples", "not reproduced: the samples of both are not printed", ""),
        ("PAT 1, 2, 5, 7, 8, 9", *drawing),
        ("PAT 3, 4", "shares, lengths, step times", "taken as inputs (`pat-a40`)", "assumed"),
        ("PAT 6", "step time over total tokens", "not reproduced: needs an H100", ""),
        ("PAT 10a", "1.05x to 1.27x", f"{pat_theirs} at 16K", "simulated"),
        ("PAT 10b", "1.19x (most)", gains["10b"], "simulated"),
        ("PAT 10c", "1.05x to 1.18x", gains["10c"], "simulated"),
        ("PAT 11", "1.37x, 1.29x", f"{gains['11a']}, {gains['11b']}", "simulated"),
        (
            "PAT 12",
            "a switch takes 5.52 s, 2.36 s of it for KV caches",
            "taken as inputs; ours reshards nothing",
            "assumed",
        ),
        (
            "PAT 13",
            "2.5 GB more at a switch",
            "no resharding: both layouts resident ([memory](measurements/scheduling.md))",
            "measured",
        ),
        ("PAT 14", "3.07 and 4.04 % error", "3.3 % over a run ([step times](measurements/drafts.md))", "measured"),
    ]
    lines = ["| figure or table | paper | ours | how |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
