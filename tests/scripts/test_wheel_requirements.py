"""`scripts/wheel_requirements.py` on wheels made here."""

import zipfile
from pathlib import Path
from types import ModuleType

import pytest

METADATA = """Metadata-Version: 2.1
Name: thing
Version: 1.0
Requires-Dist: torch==2.13.0+cpu; platform_system == "Linux"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: Flash_Attn==2.8.3
Requires-Dist: ray[default]==2.55.0
Requires-Dist: six; python_version < "3"
Requires-Dist: vllm==0.29.0; extra == "vllm"
Provides-Extra: vllm
"""


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        # What holds here, without markers and without extras.
        ("", ["torch==2.13.0+cpu", "Flash_Attn==2.8.3", "ray[default]==2.55.0"]),
        # Names are compared in canonical form.
        ("--without flash-attn TORCH", ["ray[default]==2.55.0"]),
        ("--without torch flash-attn ray", []),
        ("--extra vllm --only vllm", ["vllm==0.29.0"]),
        ("--only vllm", None),
        (b"no wheel", None),
        (None, None),
    ],
)
def test_requirements_or_one_sentence(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: str | bytes | None,
    printed: list[str] | None,
) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    if isinstance(options, str):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("thing-1.0.dist-info/METADATA", METADATA)
    elif options:
        wheel.write_bytes(options)
    assert script.main([str(wheel), *(options.split() if isinstance(options, str) else ())]) == (
        2 if printed is None else 0
    )
    found = capsys.readouterr()
    assert found.out.splitlines() == (printed or [])
    assert len(found.err.splitlines()) == (printed is None)
