"""Rows that an engine with drafts computes for nothing, because steps are padded to CUDA graphs.

    python benchmarks/graph_padding.py

Counted, not timed. The draft lengths of a recorded run (`replay.py`; ours, by the fixed rules) are given step by step
to vLLM's own dispatchers, for an H100 that is pretended (`cuda_stand_in.py`). "vLLM's default" is vLLM's choice for an
engine of the first model runner with drafts of up to 32 tokens, FULL_AND_PIECEWISE; "ours" is the setting of our
engines, and "ours, V2" that of the second runner.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stand_in
from replay import ENGINES, TRACE, Ours, Sample, read_trace, replay

from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import V2_ASYNC, DraftingSettings, HistoSpecSettings

# Upper ends of the classes of running samples that are told apart.
RUNNING = (4, 16, 64, 512)


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step: its samples, the rows it computes, and those of its longest sample."""

    running: int
    rows: int
    longest: int


class Recording(Ours):
    """Our drafter, which notes what every step verifies."""

    def __init__(self, settings: HistoSpecSettings) -> None:
        super().__init__(settings, rollouts=2)
        self.steps: list[Step] = []

    def draft(self, running: list[Sample]) -> list[list[int]]:
        drafts = super().draft(running)
        rows = [1 + min(len(draft), sample.room) for draft, sample in zip(drafts, running, strict=True)]
        self.steps.append(Step(len(rows), sum(rows), max(rows)))
        return drafts


def recorded_steps(trace: Path = TRACE) -> list[Step]:
    """Yield the decode steps of all engines of a recorded run."""
    drafters = [Recording(HistoSpecSettings()) for _ in range(ENGINES)]
    replay(read_trace(trace), drafters)
    return [step for drafter in drafters for step in drafter.steps]


def first_dispatch(config: Any) -> Callable[[Step], tuple[str, int]]:
    """Return what tells the first model runner's mode of CUDA graph for a step, and its rows with padding."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    longest = 1 + config.num_speculative_tokens
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, longest)

    def dispatch(step: Step) -> tuple[str, int]:
        uniform = GPUModelRunner._is_uniform_decode(step.longest, longest, step.rows, step.running)
        mode, graph = dispatcher.dispatch(step.rows, uniform)
        return mode.name, graph.num_tokens

    return dispatch


def second_dispatch(config: Any) -> Callable[[Step], tuple[str, int]]:
    """Return the same of the second model runner."""
    import torch
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.utils import get_uniform_decode_token_count

    mode, longest = config.compilation_config.cudagraph_mode, 1 + config.num_speculative_tokens
    graphs = model_runner.ModelCudaGraphManager(config, torch.device("cpu"), mode, decode_query_len=longest)
    graphs._graphs_captured = True

    # vLLM 0.32 asks whether a step can have a graph for decoding, not whether it has a prefill.
    *_, asked = inspect.signature(get_uniform_decode_token_count).parameters
    decodes = {asked: asked != "has_prefill"}

    def dispatch(step: Step) -> tuple[str, int]:
        uniform = get_uniform_decode_token_count(step.running, step.rows, step.longest, **decodes)
        graph = graphs.dispatch(step.running, step.rows, uniform, 0, step.longest)
        return graph.cg_mode.name, graph.num_tokens

    return dispatch


def counted(config: Any, steps: list[Step]) -> dict[int, Counter[str]]:
    """Return by class of running samples: steps, rows, rows with padding, and steps by mode of CUDA graph."""
    cuda_stand_in.resolve_graphs(config)
    dispatch = (second_dispatch if config.use_v2_model_runner else first_dispatch)(config)
    found: dict[int, Counter[str]] = {most: Counter() for most in RUNNING}
    for step in steps:
        mode, computed = dispatch(step)
        of_class = found[next(most for most in RUNNING if step.running <= most)]
        of_class.update({"steps": 1, "rows": step.rows, "computed": computed, mode: 1})
    return found


def main() -> None:
    """Print one table, and the counts as JSON."""
    steps = recorded_steps()
    cuda_stand_in.install()
    ways = {"vLLM's default": {"compilation_config": {}}, "ours": {}}
    found = {way: counted(cuda_stand_in.engine_config(RhymeSettings(), **more), steps) for way, more in ways.items()}
    # From then on every engine of this process has the second runner.
    second = RhymeSettings(drafting=DraftingSettings(runner=V2_ASYNC))
    found["ours, V2"] = counted(cuda_stand_in.engine_config(second), steps)
    print("| samples running | way | steps | rows asked for | rows computed | more | FULL | PIECEWISE | no graph |")
    print("|---|---|---|---|---|---|---|---|---|")
    for place, most in enumerate(RUNNING):
        least = RUNNING[place - 1] + 1 if place else 1
        for way, classes in found.items():
            row = classes[most]
            if row["steps"]:
                more = row["computed"] / row["rows"] - 1
                modes = " | ".join(str(row[mode]) for mode in ("FULL", "PIECEWISE", "NONE"))
                print(
                    f"| {least} to {most} | {way} | {row['steps']} | {row['rows']} | {row['computed']} | {more:+.0%} | "
                    f"{modes} |"
                )
    json.dump(found, sys.stderr)


if __name__ == "__main__":
    main()
