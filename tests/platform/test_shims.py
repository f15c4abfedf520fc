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


USES_WITHOUT_A_GPU = """
from rhyme_openrlhf.platform import PlatformError, cpu_sampling, shims
from rhyme_openrlhf.platform.cpu_arguments import adapt_arguments, cpu_engine_arguments
from rhyme_openrlhf.platform.local_ray import start_local_ray
from rhyme_openrlhf.settings.config import CpuSettings

for use in (
    shims.patch_torch_cuda,
    lambda: cpu_engine_arguments({}, CpuSettings()),
    lambda: start_local_ray(1, 1, {}, False),
    lambda: adapt_arguments(None),
    cpu_sampling.apply,
):
    try:
        use()
    except PlatformError as error:
        print(error)
"""


@pytest.mark.usefixtures("starts_python")
def test_the_platform_fails_loudly_where_a_gpu_is() -> None:
    done = run(f"import torch; torch.cuda.is_available = lambda: True\n{USES_WITHOUT_A_GPU}")
    assert done.returncode == 0, done.stderr
    # An import may warn in between.
    assert done.stdout.count("is only for machines without a GPU, but torch sees one here") == 5, done.stdout
