"""The cost of a move, and the gain of reallocation. Real engines of the embedded model on this machine.

    python benchmarks/move.py cost --out move-cost.json     # a sample's downtime by carrier and context
    python benchmarks/move.py skew [--paced 2] --out ...    # 24 + 1 samples, and 12 + 12; paced to RLHFSpec 3.3
    python benchmarks/move.py skew --paced 8 --rules throughput 6 19 --counts 24+1 --out ...    # which rule

`cost`: two engines, each with samples that decode. One more sample with a long context moves to and fro, by each
carrier in turn. No prefix is cached, so each recompute is a whole one. Downtime is from its stop to its first token at
the other engine. Predictions are a run's own (scheduling/move_costs.py, learnt from the moves before).

`skew`: both engines' samples are equally long; the stage ends with the last one. Arms are interleaved: without
reallocation, and by each of --rules, `throughput` or a threshold of samples.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from move_bench import Bench, Session, settings
from rlhfspec_instance import papers_profile

from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE
from rhyme_openrlhf.settings.moves import ReallocationSettings

CARRIERS = (KV_TRANSFER, RECOMPUTE)
THROUGHPUT = "throughput"


# --- what a move costs

# The first moves of each condition, which build kernels and allocate memory.
WARM_UP = 2


async def downtimes(session: Session, profile: Profile, contexts: list[int], beside: int, repeats: int) -> list[Any]:
    """Moves of samples of these contexts, by both carriers in turn, while `beside` samples decode at each engine."""
    session.install(profile)
    bench, rows = session.bench, []
    crowd = [
        asyncio.create_task(session.keeper.generate(bench.request(64, 6000), number % 2))
        for number in range(2 * beside)
    ]
    for context in contexts:
        request = bench.request(context, 6000 - context)
        moved = asyncio.create_task(session.keeper.generate(request, 0))
        sample = await session.grown(5, request.prompt)
        for repeat in range(repeats):
            for carrier in CARRIERS if repeat % 2 else CARRIERS[::-1]:
                session.carrier, target = carrier, 1 - sample.engine
                # As a run does: what is known of the engines is from their last reports.
                await session.reports.hear()
                await asyncio.sleep(0.1)
                await session.reports.hear()
                tokens = len(request.prompt) + len(sample.known.tokens)
                chosen = session.reports.costs.cheaper(tokens, session.reports.destination(target, tokens))
                # The steps that the sample itself makes: those of its engine.
                own = session.reports.statuses[1 - target].decode
                record = await session.mover.move(sample, target, "reallocation")
                rows.append(
                    {
                        "context": context, "beside": beside, "carrier": carrier, "repeat": repeat, "chosen": chosen,
                        "tokens": record.tokens, "phase": record.move.phase.value, "downtime_s": record.downtime,
                        "seconds": record.seconds, "predicted_s": record.choice.predicted,
                        "step_s": own.seconds if own is not None else None,
                        "first_step_s": await bench.engines[target].scheduler("take_first_step"),
                        "destination": dataclasses.asdict(record.choice.destination),
                    }
                )  # fmt: skip
        moved.cancel()
        await asyncio.wait([moved])
    for task in crowd:
        task.cancel()
    await asyncio.wait(crowd) if crowd else None
    return rows


def cost_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians by condition, how far predictions were off, and how often the cheaper carrier was chosen."""
    warm = [row for row in rows if row["repeat"] >= WARM_UP and row["phase"] == "running" and row["downtime_s"]]
    found: dict[str, Any] = {"conditions": []}
    chosen_right, off = [], {carrier: [] for carrier in CARRIERS}
    print("| context | beside | step ms | KV ms | steps | before its own | recompute ms | predicted | chosen right |")
    print("|---|---|---|---|---|---|---|---|---|")
    for beside in sorted({row["beside"] for row in warm}):
        for context in sorted({row["context"] for row in warm}):
            of = [row for row in warm if (row["context"], row["beside"]) == (context, beside)]
            took = {c: [row["downtime_s"] for row in of if row["carrier"] == c] for c in CARRIERS}
            said = {c: [row["predicted_s"] for row in of if row["carrier"] == c] for c in CARRIERS}
            if not all(took.values()):
                continue
            median = {c: statistics.median(took[c]) for c in CARRIERS}
            expected = {c: statistics.median(said[c]) for c in CARRIERS}
            step = statistics.median(row["step_s"] for row in of if row["step_s"])
            cheaper = min(CARRIERS, key=lambda c: median[c])
            sent = [row for row in of if row["carrier"] == KV_TRANSFER]
            waited = statistics.median(row["downtime_s"] - row["first_step_s"] for row in sent) / step
            right = [row["chosen"] == cheaper for row in of]
            chosen_right += right
            for carrier in CARRIERS:
                off[carrier].append(expected[carrier] / median[carrier] - 1)
            found["conditions"].append(
                {
                    "context": context, "beside": beside, "step_s": step, "downtime_s": median, "predicted_s": expected,
                    "kv_steps": median[KV_TRANSFER] / step, "kv_steps_waited": waited,
                    "chosen_right": statistics.fmean(right),
                }
            )  # fmt: skip
            says = f"{1e3 * expected[KV_TRANSFER]:.1f} / {1e3 * expected[RECOMPUTE]:.1f}"
            print(
                f"| {context} | {beside} | {1e3 * step:.1f} | {1e3 * median[KV_TRANSFER]:.1f} "
                f"| {median[KV_TRANSFER] / step:.2f} | {waited:.2f} | {1e3 * median[RECOMPUTE]:.1f} "
                f"| {says} | {statistics.fmean(right):.0%} |"
            )
    found["chosen_right"] = statistics.fmean(chosen_right)
    found["predicted_off"] = {c: [round(x, 3) for x in off[c]] for c in CARRIERS}
    print(f"the cheaper carrier was chosen in {found['chosen_right']:.1%} of {len(chosen_right)} cases")
    return found


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Run the first benchmark."""
    contexts = [256, 1024, 4096]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rhyme-benchmark-") as folder:
        bench = Bench(settings(""), 8192, 24, Path(folder))
        try:
            profile = bench.profile(contexts, [1, 4, 9, 16])
            rows = []
            for beside in options.beside:

                async def test(session: Session, beside: int = beside) -> list[Any]:
                    return await downtimes(session, profile, contexts, beside, options.repeats)

                rows += bench.run(test, ReallocationSettings())
        finally:
            bench.stop()
    prefills = [dataclasses.asdict(point) for point in profile.prefills]
    return {"rows": rows, "prefills": prefills, **cost_table(rows)}


# --- what reallocation gains


async def stage(session: Session, counts: tuple[int, int], tokens: int, reallocate: bool) -> dict[str, Any]:
    """Run one rollout stage: these many samples at the two engines, each `tokens` long."""
    bench = session.bench
    began = time.monotonic()
    asked = [(bench.request(32, tokens), engine) for engine, count in enumerate(counts) for _ in range(count)]
    running = [asyncio.create_task(session.keeper.generate(request, engine)) for request, engine in asked]
    ended: list[float] = []
    together = asyncio.gather(*running)
    together.add_done_callback(lambda _: ended.append(time.monotonic()))
    await session.grown(10, asked[-1][0].prompt)
    for engine in bench.engines:
        await engine.scheduler("take_added")
    before = await throughput(bench, 1.0)
    loop = asyncio.create_task(session.watch()) if reallocate else None
    after = before
    if reallocate:
        while not session.records and not together.done():
            await asyncio.sleep(0.05)
        if session.records:
            await asyncio.sleep(0.5)
            after = await throughput(bench, 1.0)
    await together
    seconds = ended[0] - began
    added = [await engine.scheduler("take_added") for engine in bench.engines]
    if loop is not None:
        loop.cancel()
    held_up = {name: max(sum(one.get(name, [])) for one in added) for name in {n for one in added for n in one}}
    return {
        "seconds": seconds, "before": before, "after": after, "moves": len(session.records),
        "downtimes": [record.downtime for record in session.records],
        "held_up_s": held_up, "overhead": sum(held_up.values()) / seconds,
    }  # fmt: skip


async def throughput(bench: Bench, seconds: float) -> float:
    """Response tokens a second of both engines, from now on."""

    async def tokens() -> float:
        return sum([(await engine.scheduler("read_counters"))["response_tokens"] for engine in bench.engines])

    first, began = await tokens(), time.monotonic()
    await asyncio.sleep(seconds)
    return (await tokens() - first) / (time.monotonic() - began)


def skew(options: argparse.Namespace) -> dict[str, Any]:
    """Run the second benchmark."""
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rhyme-benchmark-") as folder:
        path = ""
        if options.paced:
            profiles.write(papers_profile(options.paced), Path(folder) / "paced.json")
            path = str(Path(folder) / "paced.json")
        bench = Bench(settings(path), 1024, 32, Path(folder))
        try:
            profile = papers_profile(options.paced) if options.paced else bench.profile([64, 600], [1, 6, 12, 19, 24])
            arms = ["", *options.rules]
            for repeat in range(options.repeats):
                for counts in options.counts:
                    for rule in arms if repeat % 2 else arms[::-1]:

                        async def test(session: Session, of: Any = (counts, rule)) -> dict[str, Any]:
                            session.install(profile)
                            return await stage(session, of[0], options.tokens, bool(of[1]))

                        threshold = 0 if rule in ("", THROUGHPUT) else int(rule)
                        row = bench.run(test, ReallocationSettings(enable=True, threshold=threshold))
                        rows.append({"counts": counts, "rule": rule, "repeat": repeat, **row})
                        print(json.dumps(rows[-1]), flush=True)
        finally:
            bench.stop()
    return {"rows": rows, **skew_table(rows)}


def skew_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of stages with and without, repeat by repeat, for each rule."""
    found = {}
    for counts, rule in dict.fromkeys((row["counts"], row["rule"]) for row in rows if row["rule"]):
        pairs = [
            tuple(
                next(r for r in rows if (r["counts"], r["rule"], r["repeat"]) == (counts, of, repeat))
                for of in ("", rule)
            )
            for repeat in sorted({row["repeat"] for row in rows})
        ]
        faster = [off["seconds"] / on["seconds"] for off, on in pairs]
        gained = [on["after"] / on["before"] for _, on in pairs]
        name = f"{counts[0]} + {counts[1]}, {rule}"
        found[name] = {
            "stage_without_s": statistics.median(off["seconds"] for off, _ in pairs),
            "stage_with_s": statistics.median(on["seconds"] for _, on in pairs),
            "stage_ratio": statistics.median(faster), "stage_ratios": faster,
            "throughput_ratio": statistics.median(gained), "throughput_ratios": gained,
            "moves": [on["moves"] for _, on in pairs],
            "overhead": statistics.median(on["overhead"] for _, on in pairs),
        }  # fmt: skip
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()))
    return found


def counted(text: str) -> tuple[int, int]:
    """Return the samples of both engines."""
    first, second = map(int, text.split("+"))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "skew"))
    parser.add_argument("--out", type=Path, default=Path("move.json"))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument(
        "--beside", type=int, nargs="+", default=[1, 8], help="cost: samples that decode at each engine"
    )
    parser.add_argument("--tokens", type=int, default=500, help="skew: response tokens of each sample")
    parser.add_argument("--rules", nargs="+", default=[THROUGHPUT], help="skew: throughput, or thresholds in samples")
    parser.add_argument("--counts", type=counted, nargs="+", default=[(24, 1), (12, 12)], help="skew: as 24+1")
    parser.add_argument("--paced", type=float, default=0, help="skew: pace to RLHFSpec 3.3, slower by this factor")
    options = parser.parse_args()
    if options.what == "cost" and options.repeats <= WARM_UP:
        parser.error(
            f"--repeats: cost needs {WARM_UP + 1} or more, because the first {WARM_UP} of each condition do not count"
        )
    found = cost(options) if options.what == "cost" else skew(options)
    kind = "emulated" if options.paced else "measured"
    conditions = {"kind": kind, "cpus": os.cpu_count(), "load_average": os.getloadavg()}
    options.out.write_text(json.dumps({**conditions, **found}) + "\n")


if __name__ == "__main__":
    main()
