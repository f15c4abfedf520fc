"""The correction of vLLM's CPU rejection sampling."""

import importlib.util
import inspect
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    from rhyme_openrlhf.platform import cpu_sampling

    # Put back afterwards.
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    return cpu_sampling


def test_vllm_needs_the_correction_and_gets_it(sampling) -> None:  # type: ignore[no-untyped-def]
    """When this fails because nothing was needed, vLLM has mended it: drop the module."""
    assert sampling.apply() is True
    assert sampling.rejection_sampler.expand_batch_to_tokens is sampling.expand_batch_to_tokens


def test_where_vllm_expands_correctly_nothing_is_replaced(sampling, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sampling, "expand_by_vllm", sampling.expand_batch_to_tokens)
    monkeypatch.setattr(sampling.rejection_sampler, "expand_batch_to_tokens", len)
    assert sampling.apply() is False
    assert sampling.rejection_sampler.expand_batch_to_tokens is len


def test_the_sampler_expands_by_the_name_that_is_replaced(sampling) -> None:  # type: ignore[no-untyped-def]
    """What vLLM must have: the function, asked for by its name, and the stand-in that is checked."""
    upstream = importlib.util.find_spec(sampling.rejection_sampler.__name__)
    assert upstream is not None and upstream.origin is not None
    source = Path(upstream.origin).read_text()
    assert source.count(" expand_batch_to_tokens(") == 4
    assert "x: torch.Tensor" in source.split("def expand_batch_to_tokens(")[1].split(")")[0]
    kernel = inspect.signature(sampling.cpu_kernels._expand_kernel_impl)
    assert len(kernel.parameters) == 6 and list(kernel.parameters)[3:5] == ["replace_from", "replace_to"]


def test_expansion() -> None:
    from rhyme_openrlhf.platform.cpu_sampling import expand_batch_to_tokens

    values = torch.tensor([0.5, 0.0, 2.0])
    ends = torch.tensor([1, 1, 4])
    assert expand_batch_to_tokens(values, ends, 4).tolist() == [0.5, 2.0, 2.0, 2.0]
    zeros = torch.tensor([0, 3])
    assert expand_batch_to_tokens(zeros, torch.tensor([2, 3]), 3, 0, 9).tolist() == [9, 9, 3]
    assert expand_batch_to_tokens(values, ends, 4).dtype == torch.float32


def test_a_check_that_still_fails_stops_the_engine(sampling, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sampling, "self_check", lambda expand: False)
    with pytest.raises(sampling.SamplingCheckError, match="--no-histospec.enable"):
        sampling.apply()
