"""What the tests of shared catalogues have in common."""

import multiprocessing

import sqlalchemy as sa

from sftriage.traces.catalogue import Catalogue
from sftriage.traces.databases import CaptureQuery
from tests.integration.processes import DEADLINE_S
from tests.unit.conftest import manifest_of

FORK = multiprocessing.get_context("fork")


def put(store, trace, capture_id, second=0, rank=2, run="run-1"):
    def build(artefact):
        return manifest_of(capture_id, artefact, second=second, rank=rank).model_copy(update={"run": run})

    return store.put(capture_id, trace, build)


def asked(start, directory, *arguments) -> tuple[int, str, str]:
    """The exit code, output and messages of `sftriage traces ...` in a directory."""
    process = start("traces", *arguments, cwd=directory)
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def ids(catalogue: Catalogue, wanted: CaptureQuery | None = None) -> list[str]:
    return [row.capture_id for row in catalogue.find(wanted)]


def ask(url: str, statement: str) -> list[tuple]:
    with sa.create_engine(url).begin() as connection:
        found = connection.execute(sa.text(statement))
        return [tuple(row) for row in found] if found.returns_rows else []


def alive(processes) -> None:
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * len(processes)
