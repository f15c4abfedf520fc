"""Training on the CPU."""

import pytest

pytest.importorskip("deepspeed")


@pytest.mark.parametrize(
    ("asynchronous", "ranks", "cores", "threads"),
    [(False, 1, 2, 2), (False, 2, 2, 1), (False, 4, 2, 1), (True, 1, 8, 1)],
)
def test_training_threads(asynchronous: bool, ranks: int, cores: int, threads: int) -> None:
    from rhyme_openrlhf.platform.cpu_strategy import training_threads

    assert training_threads(asynchronous, ranks, cores) == threads


def test_float32_is_added_to_upstreams_names_once() -> None:
    import openrlhf.utils.utils as upstream
    import torch

    from rhyme_openrlhf.platform.cpu_strategy import allow_float32

    allow_float32()
    first = upstream.convert_to_torch_dtype
    allow_float32()
    assert upstream.convert_to_torch_dtype is first
    assert (first("fp32"), first("bf16"), first("fp16")) == (torch.float32, torch.bfloat16, torch.float16)
    with pytest.raises(ValueError, match="Invalid param_dtype"):
        first("int8")


def test_the_op_that_is_not_compiled_still_has_this_name() -> None:
    import deepspeed
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    from rhyme_openrlhf.platform.cpu_strategy import SHARED_MEMORY_OP

    assert ShareMemCommBuilder.NAME == SHARED_MEMORY_OP
    assert isinstance(deepspeed.ops.__compatible_ops__, dict)
