"""Workload of a simulated run: for every step its prompts, and the length of each of their responses.

Recorded workloads come from `trace.py` and `recorded_run.py`. Parametric ones draw log-normal lengths. A prompt has a
level of its own, which moves a little from epoch to epoch, and its samples vary around it. All levels grow by the same
factor an epoch. Lengths end at the longest allowed. PRESETS have the distributions that the papers print; what they do
not print is marked as assumed. None prints how lengths vary between the samples of a prompt: all take the defaults,
which follow RhymeRL's table 2.

Invariants: the same parameters and seed give the same workload; every response has at least one token and at most the
longest allowed; every epoch has each prompt once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


class WorkloadError(ValueError):
    """A trace cannot be read; the message says where and why."""


# How one sample drafts along its response: (from token, tokens per step, draft tokens per step), ascending from 0.
Drafting = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class PromptLoad:
    """A prompt of a step. `prompt`: its number, the same in every epoch; `lengths`: of its responses, in tokens;
    `drafting`: of each response where it was recorded (empty: not of that one), or empty; `engine`: the one that it
    was generated on, where that was recorded, or -1; `data_set`: any name of its own."""

    prompt: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    drafting: tuple[Drafting, ...] = ()
    engine: int = -1
    data_set: str = ""


@dataclass(frozen=True)
class StepLoad:
    """A step's prompts, in the order in which they are drawn. Epochs are numbered from 1."""

    epoch: int
    prompts: tuple[PromptLoad, ...]


@dataclass(frozen=True)
class Workload:
    """`name` and `source` say what it is; `longest`: the longest response allowed."""

    name: str
    source: str
    steps: tuple[StepLoad, ...]
    longest: int


@dataclass(frozen=True)
class Shape:
    """A parametric workload.

    `median`: response tokens in the first epoch; `sigma`: of their logarithm; `within`: the share of its variance that
    lies between the samples of one prompt; `stability`: correlation of a prompt's level from one epoch to the next;
    `growth`: factor an epoch.
    """

    name: str
    source: str
    median: float
    sigma: float
    longest: int
    # RhymeRL, table 2: with 8 rank groups 79 to 86 % of the responses stay in theirs; these give 80 %.
    within: float = 0.03
    stability: float = 0.99
    growth: float = 1.0
    prompt_tokens: int = 200

    def __post_init__(self) -> None:
        if min(self.median, self.sigma, self.longest, self.growth, self.prompt_tokens) <= 0:
            raise ValueError("median, sigma, longest, growth and prompt_tokens must be above 0")
        if not (0 <= self.within <= 1 and -1 <= self.stability <= 1):
            raise ValueError("within lies between 0 and 1, stability between -1 and 1")


def drawn(shape: Shape, steps: int, prompts: int, samples: int, steps_per_epoch: int, seed: int) -> Workload:
    """Draw a workload of `steps` steps of `prompts` prompts with `samples` samples each; as many prompts in all as fill
    `steps_per_epoch` steps, in a new order every epoch."""
    random = np.random.default_rng(seed)
    known = prompts * steps_per_epoch
    between, within = shape.sigma * math.sqrt(1 - shape.within), shape.sigma * math.sqrt(shape.within)
    level = random.standard_normal(known)
    found: list[StepLoad] = []
    epoch = 0
    while len(found) < steps:
        epoch += 1
        if epoch > 1:
            # A level keeps its variance while it moves.
            level = shape.stability * level + math.sqrt(1 - shape.stability**2) * random.standard_normal(known)
        logs = math.log(shape.median) + (epoch - 1) * math.log(shape.growth) + between * level
        lengths = np.exp(logs[:, None] + within * random.standard_normal((known, samples)))
        lengths = np.clip(np.rint(lengths), 1, shape.longest).astype(np.int64)
        order = random.permutation(known)
        for begin in range(0, known, prompts):
            if len(found) == steps:
                break
            loads = (
                PromptLoad(int(p), shape.prompt_tokens, tuple(lengths[p].tolist()))
                for p in order[begin : begin + prompts]
            )
            found.append(StepLoad(epoch, tuple(loads)))
    return Workload(shape.name, f"{shape.source}; seed {seed}", tuple(found), shape.longest)


def _through(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """(median, sigma) of the log-normal distribution with these two (length, share of responses up to it)."""
    (low, low_share), (high, high_share) = first, second
    low_z, high_z = NormalDist().inv_cdf(low_share), NormalDist().inv_cdf(high_share)
    sigma = (math.log(high) - math.log(low)) / (high_z - low_z)
    return math.exp(math.log(low) - low_z * sigma), sigma


# PAT, section 2.3: 10.85 % of the responses are longer than 8K tokens, 2.18 % longer than 16K.
_PAT = _through((8192, 1 - 0.1085), (16384, 1 - 0.0218))
# RLHFSpec, section 3.1: median 378 tokens, 95th percentile 1373; section 7.1: at most 2048 are generated.
_LMSYS = _through((378, 0.5), (1373, 0.95))

PRESETS = {
    shape.name: shape
    for shape in (
        Shape(
            "pat-deepscaler",
            "PAT 2.3 (LLaMA3.1-8B on DeepScaleR: 10.85 % above 8K, 2.18 % above 16K)",
            *_PAT,
            longest=16384,
        ),
        Shape(
            "rlhfspec-lmsys",
            "RLHFSpec 3.1 and 7.1 (LMSYS-Chat-1M: median 378, 95th percentile 1373, at most 2048)",
            *_LMSYS,
            longest=2048,
        ),
        # RhymeRL, figure 3a: the mean grows from 1K to 10K in 320 steps; section 7: at most 16K. The spread is not
        # printed and is taken from PAT's.
        Shape(
            "rhymerl-math",
            "RhymeRL figure 3a and table 2 (mean 1K growing to 10K in 320 steps, at most 16K); spread assumed as PAT's",
            1000 / math.exp(_PAT[1] ** 2 / 2),
            _PAT[1],
            longest=16384,
            growth=1.08,
        ),
    )
}
