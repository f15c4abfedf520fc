"""OpenRLHF arguments that cannot mean what they say without a GPU, and what they become here.

Invariant: every substitution is reported in one sentence; an option that has no CPU counterpart is refused.
"""

from __future__ import annotations

from types import SimpleNamespace

from rhyme_openrlhf.platform import PlatformError, require_no_gpu


def adapt_arguments(args: SimpleNamespace) -> list[str]:
    """Change `args` in place for this machine; returns a sentence for each change.

    Raises PlatformError for options that need a GPU.
    """
    require_no_gpu("adapt_arguments")
    for flag, value, only in (
        ("--ds.packing_samples", args.ds.packing_samples, False),
        ("--ds.load_in_4bit", args.ds.load_in_4bit, False),
        ("--ds.use_liger_kernel", args.ds.use_liger_kernel, False),
        ("--ds.ring_attn_size", args.ds.ring_attn_size, 1),
        ("--ds.tensor_parallel_size", args.ds.tensor_parallel_size, 1),
    ):
        if value != only:
            raise PlatformError(f"{flag} needs a GPU, and this machine has none: leave it out")
    changes = []
    if "flash" in args.ds.attn_implementation:
        changes.append(f"no GPU here: --ds.attn_implementation {args.ds.attn_implementation} becomes sdpa")
        args.ds.attn_implementation = "sdpa"
    if args.cpu.dtype == "float32":
        args.ds.param_dtype = "fp32"
    return changes
