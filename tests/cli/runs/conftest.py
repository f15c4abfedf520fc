"""Fixtures that the tests of this folder share."""

from tests.cli.runs.running_service import reported, rhyme, service, signed_in  # noqa: F401 (fixtures)
