"""Writes the profiles that ship with the simulator, from figures that papers print.

    python scripts/derive_profiles.py

PAT (LLaMA3.1-8B on 8 A40), all that is printed about time:

- figure 4: four decode steps;
- section 5.4: the two ways of handling the KV caches of 9 samples at 12K context;
- section 4.2: the token budget.

The cost of context is not printed. It comes from the A40's data sheet, as the time to read a token's keys and values
once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rhyme_openrlhf.simulation
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import PrefillPoint, Profile, StepPoint, Subject

FOLDER = Path(rhyme_openrlhf.simulation.__file__).parent / "profiles"
DEVICES = 8
# Figure 4: seconds of a decode step by tensor-parallel size and global batch size.
STEP_SECONDS = {2: {1: 15.37e-3, 128: 24.41e-3}, 8: {1: 9.64e-3, 128: 30.87e-3}}
# LLaMA3.1-8B: 32 layers x 8 key-value heads x 128 x (keys and values) x 2 bytes.
KV_BYTES = 32 * 8 * 128 * 2 * 2
# NVIDIA A40 data sheet: 696 GB/s.
MEMORY_BYTES_PER_SECOND = 696e9
# Section 5.4: 9 samples at 12K, from TP 2 to TP 8: sent in 2.36 s, computed again in 19.01 s.
MOVED, MOVED_CONTEXT, SENT_SECONDS, PREFILL_SECONDS = 9, 12 * 1024, 2.36, 19.01
# Section 4.2: 2**20 tokens on 8 devices.
TOKENS_PER_DEVICE = 2**20 // 8
CONTEXTS = (1, 1024, 8192, 16384)
NOTES = (
    "derived from PAT (papers: figure 4, sections 4.2 and 5.4), not measured",
    "batch sizes of figure 4 are read as global ones: 128 on 8 devices are 32 an engine at TP 2 and 128 at TP 8",
    "figure 4 does not say at which context: its values are taken for an empty one",
    "the cost of context is that of reading keys and values once at 696 GB/s (A40 data sheet)",
    "KV transfer: 9 samples of 12K tokens at TP 2 in 2.36 s; prefill: the same in 19.01 s at TP 8, by tokens; the same "
    "per token is taken for TP 2",
    "drafts: not printed; a step of n rows is taken to cost what n samples cost",
    "weight loads: not printed",
)


def derive(size: int) -> Profile:
    """Return the profile of one tensor-parallel size."""
    engines = DEVICES // size
    kv_bytes = KV_BYTES // size
    context_seconds = kv_bytes / MEMORY_BYTES_PER_SECOND
    steps = []
    for batch, seconds in STEP_SECONDS[size].items():
        running = max(1, batch // engines)
        for each in CONTEXTS:
            context = running * each
            if context <= TOKENS_PER_DEVICE * size:
                steps.append(StepPoint(running, context, 0, round(seconds + context * context_seconds, 8), 0.0, 1))
    prefill = PREFILL_SECONDS / (MOVED * MOVED_CONTEXT)
    return Profile(
        subject=Subject("LlamaForCausalLM 32x4096", "NVIDIA A40 (PAT)", "bfloat16", size),
        origin="derived",
        steps=tuple(steps),
        prefills=tuple(
            PrefillPoint(sequences, length, round(sequences * length * prefill, 6), 0.0, 1)
            for sequences in (1, MOVED)
            for length in (128, MOVED_CONTEXT)
        ),
        padded_rows=(),
        kv_cache_tokens=TOKENS_PER_DEVICE * size,
        kv_bytes_per_token=kv_bytes,
        kv_bytes_per_second=round(MOVED * MOVED_CONTEXT * KV_BYTES // 2 / SENT_SECONDS, 0),
        weight_load_seconds=0.0,
        versions={},
        notes=NOTES,
    )


def main() -> None:
    """Write them all."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for size in STEP_SECONDS:
        profiles.write(derive(size), FOLDER / f"pat-a40-tp{size}.json")


if __name__ == "__main__":
    main()
