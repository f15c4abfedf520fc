"""Stand-ins that let OpenRLHF import and run without CUDA. Each test runs in a fresh process."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("starts_python")
def test_openrlhf_imports_and_its_cuda_calls_do_nothing() -> None:
    done = run(
        """
from rhyme_openrlhf.platform import shims
import sys
shims.install(); shims.install()
assert "torch" not in sys.modules, "installing must stay cheap"
import openrlhf.models, torch
assert str(torch.device(f"cuda:{torch.cuda.current_device()}")) == "cuda:0"
assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
torch.cuda.set_device(0); torch.cuda.synchronize(); torch.cuda.empty_cache()
assert torch.cuda.current_stream() is None
try:
    import flash_attn.ops
except ImportError:
    print("as OpenRLHF expects")
"""
    )
    assert done.stdout.strip().endswith("as OpenRLHF expects"), done.stderr


def test_padding_functions_are_inverse() -> None:
    from rhyme_openrlhf.platform import shims

    functions = shims._padding_functions()
    hidden = torch.randn(3, 5, 2)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    packed, indices, offsets, longest, lengths = functions["unpad_input"](hidden, mask)
    assert packed.shape == (8, 2)
    assert (offsets.tolist(), longest, lengths.tolist()) == ([0, 2, 7, 8], 5, [2, 5, 1])
    assert torch.equal(functions["pad_input"](packed, indices, 3, 5), hidden * mask[..., None])
    assert torch.equal(functions["index_first_axis"](packed, torch.tensor([7, 0])), packed[[7, 0]])


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize(
    "use",
    [
        "from rhyme_openrlhf.platform import shims; shims.patch_torch_cuda()",
        "from rhyme_openrlhf.platform.cpu_arguments import cpu_engine_arguments as f\n"
        "from rhyme_openrlhf.settings.config import CpuSettings; f({}, CpuSettings())",
        "from rhyme_openrlhf.platform.local_ray import start_local_ray as f; f(1, 1, {}, False)",
        "from rhyme_openrlhf.platform.cpu_arguments import adapt_arguments as f; f(None)",
        "from rhyme_openrlhf.platform import cpu_sampling; cpu_sampling.apply()",
    ],
)
def test_the_platform_fails_loudly_where_a_gpu_is(use: str) -> None:
    done = run(f"import torch; torch.cuda.is_available = lambda: True\n{use}")
    assert done.returncode != 0
    assert "PlatformError" in done.stderr and "only for machines without a GPU" in done.stderr
