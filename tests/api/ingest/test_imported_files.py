"""A run directory that was made to do harm: pipes, links, and files, lines and numbers without end."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.api.ingest import imported_files
from rhyme_openrlhf.api.ingest.imported_files import CHUNK_BYTES, LONGEST_LINE, ImportedFiles, ImportingError
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.store.database import Database
from tests.stores import place_upgraded

NOTE = {"kind": "note", "time": 1.0, "source": "a", "sequence": 0, "level": "info", "text": ""}
SECONDS = 30


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Database]:
    place_upgraded(tmp_path / "store.db")
    database = Database(f"sqlite:///{tmp_path}/store.db")
    yield database
    database.dispose()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "events.jsonl").write_text(json.dumps(NOTE) + "\n")
    return folder


def files_of(folder: Path, ended: bool = False) -> ImportedFiles:
    return ImportedFiles(folder, lambda: ended)


@pytest.mark.parametrize("name", ["config.json", "events.jsonl"])
def test_a_pipe_is_refused_instead_of_waited_for(kept: Database, folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with ThreadPoolExecutor(1) as pool:
        importing = pool.submit(import_directory, kept, folder, 1.0)
        try:
            with pytest.raises(ImportingError, match=f"{name} cannot be read: it is not a regular file"):
                importing.result(timeout=SECONDS)
        finally:
            if not importing.done():  # lets a reader that waits for the pipe go
                os.close(os.open(folder / name, os.O_WRONLY))


@pytest.mark.parametrize("name", ["config.json", "events.jsonl"])
def test_a_link_out_of_the_directory_is_refused(kept: Database, folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    (folder / "inside").write_bytes(content)
    (folder / name).symlink_to("inside")
    assert import_directory(kept, folder, 1.0).accepted == 1
    (folder.parent / "secret").write_bytes(content)
    (folder / name).unlink()
    (folder / name).symlink_to(folder.parent / "secret")
    with pytest.raises(ImportingError, match="a link that leads out of its folder"):
        import_directory(kept, folder, 1.0)


def test_a_link_in_the_place_of_the_checked_directory_is_refused(kept: Database, folder: Path) -> None:
    """A swap between the check of the route, which resolves the directory, and the opening of its files."""
    checked = folder.resolve()
    folder.rename(folder.parent / "outside")
    folder.symlink_to(folder.parent / "outside")
    with pytest.raises(ImportingError, match="a link that leads out of its folder"):
        import_directory(kept, checked, 1.0)


@pytest.mark.parametrize("name", ["config.json", "events.jsonl"])
def test_a_huge_file_is_refused_without_reading_it(kept: Database, folder: Path, name: str) -> None:
    os.truncate(folder / name, 300_000_000)  # a sparse file without a newline
    tracemalloc.start()
    try:
        with pytest.raises(ImportingError, match="it has more than 1048576 bytes|line 2 has 4194304 bytes or more"):
            import_directory(kept, folder, 1.0)
        assert tracemalloc.get_traced_memory()[1] < 8 * LONGEST_LINE
    finally:
        tracemalloc.stop()
    os.truncate(folder / name, 2**40)
    with pytest.raises(ImportingError, match="bytes"):
        import_directory(kept, folder, 1.0)


def test_a_chunk_of_long_lines_has_few(folder: Path) -> None:
    line = json.dumps({**NOTE, "text": "x" * 1_000_000}) + "\n"
    (folder / "events.jsonl").write_text(40 * line)
    sizes = [len(chunk) for chunk in files_of(folder).chunks()]
    assert sum(sizes) == 40 and max(sizes) * len(line) <= CHUNK_BYTES + len(line)


def test_sources_and_gaps_have_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported_files, "MOST_SOURCES", 10)
    monkeypatch.setattr(imported_files, "MOST_GAPS", 10)
    for rows in (
        [{**NOTE, "source": str(number)} for number in range(11)],
        [{**NOTE, "sequence": 2 * number} for number in range(12)],
    ):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "events.jsonl").write_text(text.rpartition("{")[0])
        files_of(folder).sources()
        (folder / "events.jsonl").write_text(text)
        with pytest.raises(ImportingError, match="at most 10 sources and 10 gaps are imported"):
            files_of(folder).sources()


def test_an_import_ends_with_the_service(kept: Database, folder: Path) -> None:
    rows = ({**NOTE, "sequence": number} for number in range(imported_files.LOOK_LINES))
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ImportingError, match="the service is ending: import the directory again"):
        import_directory(kept, folder, 1.0, lambda: True)
    assert import_directory(kept, folder, 1.0).accepted == imported_files.LOOK_LINES


@pytest.mark.parametrize(
    "events", [f'{{"source": "a", "sequence": {number}}}\n' for number in ("-1", "1" + "0" * 400, "9" * 5000, "1e400")]
    + ['{"source": 5, "sequence": 0}\n', '{"source": "", "sequence": 0}\n', "\xff\n", "[" * 5000 + "\n"],
)  # fmt: skip
def test_an_odd_number_or_source_is_refused_in_words(kept: Database, folder: Path, events: str) -> None:
    (folder / "events.jsonl").write_bytes(events.encode("latin-1"))
    with pytest.raises(ImportingError, match="line 1 is not an event"):
        import_directory(kept, folder, 1.0)


@pytest.mark.parametrize(
    "config",
    ['{"settings": {"control": {"run_uid": 5}}}', '{"settings": {"control": {"attempt_uid": ["a"]}}}', '{"a": 1e400}',
     f'{{"a": 1{400 * "0"}}}', f'{{"a": {5000 * "9"}}}', '{"a": "\\ud800"}', '{"settings": "text"}', "[" * 5000, "\xff",
     '{"settings": {"run": {"name": "\\u0000"}}}'],
)  # fmt: skip
def test_an_odd_configuration_is_refused_in_words(kept: Database, folder: Path, config: str) -> None:
    (folder / "config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(ImportingError, match="cannot be imported: "):
        import_directory(kept, folder, 1.0)


def test_imports_and_batches_have_slots_of_their_own(api: Any) -> None:
    api.announce()
    limits, directory = api.service.limits, api.root / "run"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "events.jsonl").write_text(json.dumps(NOTE) + "\n")
    with limits.imports.one(), limits.imports.one():
        refused = api.operator.post("/api/v1/imports", json={"directory": str(directory)})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        api.send([NOTE])
    for _ in range(api.service.settings.batches_in_flight):
        limits.batches.acquire()
    answer = api.operator.post("/api/v1/imports", json={"directory": str(directory)})
    assert answer.status_code == 200, answer.text
