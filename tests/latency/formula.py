"""Profiles whose step times follow a formula, so that a test knows every answer."""

from __future__ import annotations

from rhyme_openrlhf.latency.profile import PrefillPoint, Profile, StepPoint, Subject

SUBJECT = Subject(model="Qwen2ForCausalLM 4x128", hardware="test", dtype="float32", tensor_parallel_size=1)
RUNNING = (1, 4, 16, 64)
CONTEXTS = (32, 256, 2048)
DRAFTS = (0, 1, 3, 15)
PADDED = (16, 32, 64, 128, 256, 1024)


def rows(running: int, drafts: int) -> int:
    return next((size for size in PADDED if size >= running + drafts), running + drafts)


def formula(running: int, context: int, drafts: int) -> float:
    """8 ms a step, 1 ms more to verify at all, 0.05 ms a row, 1 us a token of context."""
    if not drafts:
        return 0.008 + running * 5e-5 + context * 1e-6
    return 0.009 + rows(running, drafts) * 5e-5 + context * 1e-6


def unspeculated(factor: float) -> tuple[StepPoint, ...]:
    """Steps of an engine without speculation, whose steps take `factor` of those without drafts."""
    return tuple(
        StepPoint(b, b * each, 0, factor * formula(b, b * each, 0), 0.0001, 20) for b in RUNNING for each in CONTEXTS
    )


def profile(**changes: object) -> Profile:
    values: dict[str, object] = {
        "subject": SUBJECT,
        "origin": "measured",
        "steps": tuple(
            StepPoint(b, b * each, b * n, formula(b, b * each, b * n), 0.0001, 20)
            for b in RUNNING
            for each in CONTEXTS
            for n in DRAFTS
        ),
        "prefills": tuple(PrefillPoint(n, length, n * length * 1e-5, 0.0, 3) for n in (1, 4) for length in (64, 512)),
        "padded_rows": PADDED,
        "kv_cache_tokens": 200_000,
        "kv_bytes_per_token": 2048,
        "kv_bytes_per_second": 1e9,
        "weight_load_seconds": 0.05,
        "versions": {"vllm": "0.29.0"},
        "notes": ("made by a formula",),
    }
    return Profile(**{**values, **changes})  # type: ignore[arg-type]
