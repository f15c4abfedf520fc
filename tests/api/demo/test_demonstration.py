"""The demonstration: its six compared recordings are two groups of one experiment, which differ in drafts alone."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from rhyme_openrlhf.api.access.service import Service
from rhyme_openrlhf.api.demo.demonstration import EXPERIMENT, show
from rhyme_openrlhf.api.http.limits import Limits
from rhyme_openrlhf.api.http.service_metrics import ServiceMetrics
from rhyme_openrlhf.api.read.groups import groups_of
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Experiment
from tests.stores import prepare


def test_three_seeds_with_drafts_and_three_without(tmp_path: Path) -> None:
    settings = ServeSettings(data_dir=str(tmp_path / "data"), roots=str(tmp_path))
    prepare(settings)
    service = Service(settings, Database(settings.database_url()), Limits.of(settings), ServiceMetrics())
    (tmp_path / "shown").mkdir()
    show(service, tmp_path / "shown")
    with service.database.reading() as session:
        experiment = session.scalars(select(Experiment)).one()
        assert experiment.name == EXPERIMENT
        groups, more = groups_of(session, experiment.id)
        assert not more
        sizes = {group.options["histospec.enable"]: len(group.runs) for group in groups}
        assert len(groups) == 2 and sizes == {False: 3, True: 3}
        assert all(list(group.options) == ["histospec.enable"] for group in groups)
        for group in groups:
            assert len(set(group.seeds)) == 3
            assert all(run.status == "succeeded" and run.reward is not None for run in group.runs)
