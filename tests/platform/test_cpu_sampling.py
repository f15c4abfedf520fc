"""The correction of vLLM's CPU rejection sampling."""

import importlib.util
import types

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    from rhyme_openrlhf.platform import cpu_sampling

    # vLLM's own function: an engine of this process may have had it corrected.
    upstream = importlib.util.find_spec(rejection_sampler.__name__)
    assert upstream is not None and upstream.loader is not None
    untouched = importlib.util.module_from_spec(upstream)
    upstream.loader.exec_module(untouched)
    own = untouched.expand_batch_to_tokens
    own = types.FunctionType(own.__code__, vars(rejection_sampler), own.__name__, own.__defaults__)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", own)
    # Put back afterwards.
    for name in cpu_sampling.KERNELS:
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    return cpu_sampling


def test_vllm_needs_the_correction_and_gets_it(sampling) -> None:  # type: ignore[no-untyped-def]
    """When this fails because nothing was needed, vLLM has mended it: drop the module."""
    assert sampling.apply() is True
    assert sampling.self_check()
    assert sampling.apply() is False


def test_expansion() -> None:
    from rhyme_openrlhf.platform.cpu_sampling import expand_batch_to_tokens

    values = torch.tensor([0.5, 0.0, 2.0])
    ends = torch.tensor([1, 1, 4])
    assert expand_batch_to_tokens(values, ends, 4).tolist() == [0.5, 2.0, 2.0, 2.0]
    zeros = torch.tensor([0, 3])
    assert expand_batch_to_tokens(zeros, torch.tensor([2, 3]), 3, 0, 9).tolist() == [9, 9, 3]
    assert expand_batch_to_tokens(values, ends, 4).dtype == torch.float32


def test_a_check_that_still_fails_stops_the_engine(sampling, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sampling, "self_check", lambda: False)
    with pytest.raises(sampling.SamplingCheckError, match="--no-histospec.enable"):
        sampling.apply()
