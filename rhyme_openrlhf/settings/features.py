"""The features that a run may switch on: their names for people, what each is for, and its options.

The form of a new run shows this table. An option group with a switch `enable` must have an entry; a test holds it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A feature with its switch `flag`, and the option groups and single flags that belong to it."""

    name: str
    sentence: str
    flag: str
    groups: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Goal:
    """A goal of a user, and the features that serve it, the most useful first."""

    name: str
    features: tuple[Feature, ...]


GOALS: tuple[Goal, ...] = (
    Goal(
        "Faster rollouts",
        (
            Feature(
                "Drafts from history",
                "Engines draft the next tokens from earlier responses to the same prompt, and verify several at once. "
                "Faster from the second episode on; the distribution of samples stays the same.",
                "--histospec.enable",
                groups=("histospec", "history", "drafting"),
            ),
            Feature(
                "Reallocation",
                "Running samples go from full engines to empty ones during a rollout. Needs two engines.",
                "--reallocation.enable",
                groups=("reallocation",),
            ),
        ),
    ),
    Goal(
        "No idle tail",
        (
            Feature(
                "TP switching",
                "The last samples of a step go on at fewer engines with more tensor parallelism, on the same devices.",
                "--tp_switch.enable",
                groups=("tp_switch",),
            ),
            Feature(
                "Asynchronous training",
                "Engines generate the next batches while the trainer learns from the last ones. Needs separate GPUs "
                "for both, and samples come from slightly older weights.",
                "--train.async_enable",
                flags=("--train.async_queue_size", "--rollout.vllm_generate_batch_size"),
            ),
            Feature(
                "Streaming pipeline",
                "Engines go from step to step without waiting for each other, at most one step off policy. Needs "
                "asynchronous training.",
                "--histopipe.enable",
                groups=("histopipe",),
            ),
            Feature(
                "Partial rollout",
                "New weights reach engines in the middle of responses, instead of waiting for the longest one. Needs "
                "asynchronous training.",
                "--train.partial_rollout_enable",
            ),
        ),
    ),
    Goal(
        "Fewer GPUs",
        (
            Feature(
                "All models on the same GPUs",
                "Engines and trainer take turns on the same GPUs, instead of having GPUs of their own. Switch on "
                "sleeping too, so that each frees its memory for the other.",
                "--train.colocate_all",
                flags=("--vllm.enable_sleep", "--ds.enable_sleep"),
            ),
            Feature(
                "Optimizer in main memory",
                "The optimizer's states and its step leave the GPU: less GPU memory, more time.",
                "--ds.adam_offload",
            ),
        ),
    ),
    Goal(
        "A run that survives and repeats",
        (
            Feature(
                "Moves of samples",
                "A running sample can go on at another engine, so a run continues without a lost engine. Reallocation "
                "and TP switching switch it on.",
                "--move.enable",
                groups=("move",),
            ),
            Feature(
                "Reproducible sampling",
                "Two runs with the same settings on the same machine sample the same tokens. Costs a little waiting "
                "time.",
                "--run.reproducible",
            ),
        ),
    ),
)
FEATURES: tuple[Feature, ...] = tuple(feature for goal in GOALS for feature in goal.features)
