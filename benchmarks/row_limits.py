"""Tokens a second by the room that a step has for drafts, on a GPU whose step times were measured. Simulated.

    python benchmarks/row_limits.py --running 128 256 --rows 512 1024 2048 --out row_limits.json

vLLM's real scheduler with our drafts and plans (step_overhead.py) runs the recorded samples. What a step takes is not
timed: it is what the profile of `--profile` in benchmarks/data/speed-by-load-h200.json says, for 512 rows as measured,
beyond them with the same slope. Samples are kept running, so contexts are those of whole responses. A row is a token
whose logits a step computes: one for each sample, and one for each draft token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import step_overhead

from rhyme_openrlhf.latency.profile import parse
from rhyme_openrlhf.latency.step_model import StepModel

MEASURED = Path(__file__).parent / "data/speed-by-load-h200.json"


class TimedRun(step_overhead.Run):
    """A run that adds up what its steps would take, with drafts and without any."""

    def __init__(self, running: int, rows: int, model: StepModel) -> None:
        super().__init__("planned" + step_overhead.LATE, running)
        self.scheduler.drafting._most_rows = rows
        self._model = model
        self.seconds = self.without = 0.0
        self.rows = self.steps = 0

    def output(self, scheduled: Any) -> Any:
        names = list(scheduled.num_scheduled_tokens)
        context = sum(self.scheduler.requests[name].num_computed_tokens for name in names)
        drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        self.seconds += self._model.seconds(len(names), context, drafts)
        self.without += self._model.seconds(len(names), context, 0)
        self.rows += len(names) + drafts
        self.steps += 1
        return super().output(scheduled)

    def figures(self, steps: int) -> dict[str, float]:
        """Return tokens a second, against those of the same steps without drafts; rows and tokens of a step."""
        for _ in range(step_overhead.WARM_UP):
            self.step()
        self.seconds = self.without = 0.0
        self.rows = self.steps = self.tokens = self.sample_steps = 0
        for _ in range(steps):
            self.step()
        speed = self.tokens / self.seconds
        return {
            "tokens_per_second": speed,
            "times_without_drafts": speed * self.without / self.sample_steps,
            "rows_of_a_step": self.rows / self.steps,
            "tokens_per_step": self.tokens / self.sample_steps,
        }


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[128, 256], help="samples an engine runs")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 2048], help="rows a step may have")
    parser.add_argument("--profile", choices=("v1", "v2", "v2-async"), default="v2-async", help="whose step times")
    parser.add_argument("--steps", type=int, default=150, help="steps counted")
    parser.add_argument("--out", type=Path, default=Path("row_limits.json"))
    chosen = parser.parse_args()
    text = json.dumps(json.loads(MEASURED.read_text())["profiles"][chosen.profile])
    # What plans go by is what steps take.
    step_overhead.profile_text = lambda: text
    model = StepModel(parse(text, str(MEASURED)))
    found: dict[str, Any] = {"kind": "simulated", "profile": chosen.profile, "rows": []}
    print("running  rows  tokens/s  x without drafts  rows of a step  tokens/step")
    for running in chosen.running:
        for rows in chosen.rows:
            one = TimedRun(running, rows, model).figures(chosen.steps)
            found["rows"].append({"running": running, "rows": rows} | one)
            chosen.out.write_text(json.dumps(found, indent=1) + "\n")
            speed, times, used, tokens = one.values()
            print(f"{running:7d}{rows:6d}{speed:10,.0f}{times:18.2f}{used:16.0f}{tokens:13.2f}", flush=True)


if __name__ == "__main__":
    main()
