"""`scripts/lowest_versions.py`: every requirement of the package and of its server extra has a lowest version."""

from types import ModuleType

import pytest
from packaging.requirements import Requirement


def test_the_lowest_version_is_the_bound_or_the_pin(script: ModuleType) -> None:
    assert script.lowest(Requirement("fastapi>=0.124,<1")) == "fastapi==0.124"
    assert script.lowest(Requirement("ray[default]==2.55.0")) == "ray==2.55.0"


def test_a_requirement_without_a_lowest_version_is_refused(script: ModuleType) -> None:
    with pytest.raises(script.NoLowestVersionError, match="fastapi"):
        script.lowest(Requirement("fastapi<1"))


def test_the_server_extra_has_a_lowest_version_of_everything(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["server"]) == 0
    names = [line.partition("==")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"fastapi", "sqlalchemy", "plotly", "ray", "numpy"} <= set(names)
