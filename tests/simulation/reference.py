"""The engine token by token: slow and plain, what the event-skipping one must agree with."""

from __future__ import annotations

import math

from rhyme_openrlhf.simulation.engine import Job
from rhyme_openrlhf.simulation.engine_kinds import EngineKind


def run(kind: EngineKind, jobs: list[Job]) -> tuple[dict[int, float], float, int]:
    """(seconds at which each sample ended, seconds in all, preemptions) without speculation."""
    waiting, running, ended = list(jobs), [], {}  # type: ignore[var-annotated]
    now, preemptions = 0.0, 0
    prefill: list[Job] = []
    chunks, each = 0, 0.0
    while waiting or running or prefill:
        if not prefill:
            free = kind.kv_tokens - sum(job.context for job in running)
            margin = len(running)
            while waiting and len(running) + len(prefill) < kind.most_running:
                margin += 1
                if waiting[0].context + margin > free:
                    break
                free -= waiting[0].context
                prefill.append(waiting.pop(0))
            if prefill:
                lengths = [int(job.context) for job in prefill if job.generated]
                lengths += list({job.prompt: job.prompt_tokens for job in prefill if not job.generated}.values())
                chunks = max(1, math.ceil(sum(lengths) / kind.step_tokens))
                each = kind.prefill_seconds(lengths) / chunks
        while running and sum(job.context for job in running) + len(running) > kind.kv_tokens:
            waiting.insert(0, running.pop())
            preemptions += 1
        if prefill:
            now += each
            chunks -= 1
        if running:
            now += kind.times.seconds(len(running), sum(job.context for job in running), 0)
            for job in running:
                job.generated += 1
        if prefill and not chunks:
            running += prefill
            prefill = []
        for job in [job for job in running if job.generated >= job.length]:
            running.remove(job)
            ended[job.sample] = now
    return ended, now, preemptions
